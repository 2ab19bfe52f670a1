"""The model and its losses. What torch and transformers do is theirs; this only puts them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from manifests.errors import UserError
from trainer.config import RunConfig, default_model


def pick_device(name: str) -> torch.device:
    """The device of a configuration's name.

    Raises:
        UserError: cuda is asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no CUDA device here; use --device cpu or auto")
    return torch.device(name)


def build_model(config: RunConfig) -> nn.Module:
    """The run's causal LM at its start, on the CPU; the same weights wherever it's built.

    Raises:
        UserError: the configuration is not one that transformers knows, or its vocabulary is smaller than the tokenizer's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = dict(config.model) or default_model(config.vocab_size)
    torch.manual_seed(config.seed)
    try:
        if "path" in spec:
            model = AutoModelForCausalLM.from_pretrained(spec["path"], local_files_only=True, dtype=torch.float32)
        else:
            spec.setdefault("vocab_size", config.vocab_size)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec))
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise UserError(f"the model can't be built from {spec}: {e}") from e
    if model.config.vocab_size < config.vocab_size:
        raise UserError(
            f"the model knows {model.config.vocab_size} tokens, the pool's tokenizer has {config.vocab_size}; "
            "take a model and a tokenizer that fit each other"
        )
    return model.float()


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained tensors by name, tied ones once."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def embeddings_of(model: nn.Module) -> set[str]:
    """Names of the tensors that turn tokens into vectors and back: the outer step averages them plainly."""
    layers = [getattr(model, get)() for get in ("get_input_embeddings", "get_output_embeddings") if hasattr(model, get)]
    weights = {id(layer.weight) for layer in layers if layer is not None and hasattr(layer, "weight")}
    return {name for name, parameter in model.named_parameters() if id(parameter) in weights}


def token_losses(model: Callable[..., Any], tokens_BL: torch.Tensor) -> torch.Tensor:
    """Loss of each predicted token, in float32, nats.

    Args:
        tokens_BL: token ids, (batch, length).

    Returns:
        Shape (batch, length − 1): entry [b, i] is the loss of token i + 1 given those before it.
    """
    cuda = tokens_BL.device.type == "cuda"
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cuda):
        # Without a mask transformers looks for packed sequences, and takes an explicit mask of length² in place of causal attention.
        every_BL = torch.ones_like(tokens_BL)
        logits_BLV = model(input_ids=tokens_BL, attention_mask=every_BL, use_cache=False).logits
    flat = F.cross_entropy(logits_BLV[:, :-1].float().flatten(0, 1), tokens_BL[:, 1:].flatten(), reduction="none")
    return flat.view(tokens_BL.shape[0], -1)


@torch.no_grad()
def holdout_loss(model: nn.Module, tokens_NL: torch.Tensor, *, batch_size: int = 32) -> float:
    """Mean loss per token on the holdout sequences, (sequences, length)."""
    was_training = model.training
    model.eval()
    total = sum(float(token_losses(model, batch).sum()) for batch in tokens_NL.split(batch_size))
    model.train(was_training)
    return total / (tokens_NL.shape[0] * (tokens_NL.shape[1] - 1))


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """The inner AdamW; matrices decay, vectors don't."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=False)


def learning_rate(step: int, config: RunConfig) -> float:
    """Learning rate of inner step `step`, from 1: linear warm-up, then as the run's schedule has it."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "wsd":
        falling = max(1, config.steps // 5)
        return config.lr * (0.1 + 0.9 * min(1.0, (config.steps - step) / falling))
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * progress)))))
