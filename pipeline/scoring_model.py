"""The scoring model: a small causal LM that is built from a config, trained for a while, and kept as a few checkpoints.

Only its gradients matter (influence.py); which documents it sees and is asked about is score.py's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import Module

from manifests.errors import Failure, UserError
from manifests.jobs import Report, report_nothing
from manifests.store import first_line

Tokens = npt.NDArray[Any]
_BETAS = (0.9, 0.98)
_WARMUP_STEPS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One state of the scoring model, and what Adam knew of the scale of its gradients."""

    step: int
    learning_rate: float
    train_loss: float
    """Mean over the steps since the checkpoint before, nats per token."""
    parameters: dict[str, Tensor]
    second_moments: dict[str, Tensor]
    """Adam's, bias-corrected."""

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        tensors = {f"parameters/{name}": tensor for name, tensor in self.parameters.items()}
        tensors |= {f"second_moments/{name}": tensor for name, tensor in self.second_moments.items()}
        tensors["scalars"] = torch.tensor([self.step, self.learning_rate, self.train_loss], dtype=torch.float64)
        return safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})

    @staticmethod
    def from_bytes(data: bytes) -> Checkpoint:
        """Back from `to_bytes`."""
        tensors = safetensors.torch.load(data)
        step, learning_rate, train_loss = tensors.pop("scalars").tolist()
        parts: dict[str, dict[str, Tensor]] = {"parameters": {}, "second_moments": {}}
        for key, tensor in tensors.items():
            part, name = key.split("/", 1)
            parts[part][name] = tensor.clone()  # aligned: see Direction.from_bytes
        return Checkpoint(step=int(step), learning_rate=learning_rate, train_loss=train_loss, **parts)

    def to(self, device: torch.device) -> Checkpoint:
        """The same on another device."""
        return Checkpoint(
            step=self.step,
            learning_rate=self.learning_rate,
            train_loss=self.train_loss,
            parameters={name: tensor.to(device) for name, tensor in self.parameters.items()},
            second_moments={name: tensor.to(device) for name, tensor in self.second_moments.items()},
        )


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto`: cuda where there is one, else cpu."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"device {name!r} can't be used here ({first_line(e)}); choose auto or cpu") from e
    return device


def build_model(
    config: Mapping[str, Any], path: str | None, *, vocab_size: int, longest: int, seed: int, device: torch.device
) -> Module:
    """A Hugging Face causal LM.

    Args:
        config: fields of the model's config, with `model_type`; the vocabulary is the tokenizer's unless named. Weights are drawn by the seed.
        path: a local model to start from instead.
        longest: sequence length that it must take.

    Raises:
        UserError: no such model, or it is too small for the tokenizer or the sequences.
    """
    import transformers

    try:
        if path is not None:
            if not Path(path).is_dir():
                raise UserError(f"scoring model {path}: there is no such folder; give the folder of a local model")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, torch_dtype=torch.float32
            )
        else:
            fields = {"vocab_size": vocab_size} | {k: v for k, v in config.items() if k != "model_type"}
            built = transformers.AutoConfig.for_model(str(config["model_type"]), **fields)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = transformers.AutoModelForCausalLM.from_config(built)
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long))  # some configs are only found wrong when used
    except (KeyError, ValueError, TypeError, OSError, RuntimeError, ImportError) as e:
        raise UserError(f"scoring model {path or dict(config)}: {first_line(e)}; mend the model's config") from e
    rows = model.get_input_embeddings().num_embeddings
    if rows < vocab_size:
        raise UserError(
            f"scoring model has {rows} embeddings, the tokenizer {vocab_size} tokens; give a model with as many"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and limit < longest:
        raise UserError(f"scoring model takes {limit} tokens, sequences have {longest}; shorten them")
    # Dropout would make a gradient depend on a draw.
    return model.to(device).eval()


def finished_checkpoint(path: str, *, like: Any) -> Checkpoint:
    """A local model as a checkpoint of weight 1, without an optimizer's state.

    Args:
        like: a model whose parameters it must have.

    Raises:
        UserError: no such model, or one of another shape.
    """
    import transformers

    try:
        if not Path(path).is_dir():
            raise UserError(f"checkpoint {path}: there is no such folder; give the folder of a local model")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, torch_dtype=torch.float32
        )
    except (KeyError, ValueError, TypeError, OSError, RuntimeError, ImportError) as e:
        raise UserError(f"checkpoint {path}: {first_line(e)}; give the folder of a local model") from e
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = {name: parameter.shape for name, parameter in like.named_parameters()}
    wrong = sorted(
        n for n in expected.keys() | parameters.keys() if n not in parameters or parameters[n].shape != expected.get(n)
    )
    if wrong:
        raise UserError(
            f"checkpoint {path}: its parameter {wrong[0]} is missing or of another shape than in the scoring model; "
            "give checkpoints of one training"
        )
    return Checkpoint(step=0, learning_rate=1.0, train_loss=math.nan, parameters=parameters, second_moments={})


def pack(documents: Sequence[Tokens], *, num_tokens: int, seed: int) -> Tokens:
    """A stream of documents, each drawn once before any is drawn again, in an order given by the seed."""
    rng = np.random.default_rng(seed)
    parts: list[Tokens] = []
    missing = num_tokens
    while missing > 0:
        for i in rng.permutation(len(documents)).tolist():
            parts.append(documents[i][:missing])
            missing -= len(parts[-1])
            if missing <= 0:
                break
    return np.concatenate(parts).astype(np.int64)


def train(
    model: Module,
    stream: Tokens,
    *,
    batch_size: int,
    seq_len: int,
    learning_rate: float,
    num_checkpoints: int,
    report: Report = report_nothing,
) -> Iterator[Checkpoint]:
    """Trains on a stream of tokens and yields checkpoints at even distances, the last at the end.

    AdamW with a short warm-up and then a constant rate: checkpoints are to see the model at different ages, none of them finished.
    """
    device = next(model.parameters()).device
    batches = stream[: len(stream) // (batch_size * seq_len) * batch_size * seq_len].reshape(-1, batch_size, seq_len)
    steps = len(batches)
    due = {round(steps * (k + 1) / num_checkpoints) for k in range(num_checkpoints)}
    assert len(due) == num_checkpoints
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=_BETAS, weight_decay=0.01)
    losses: list[float] = []
    for step, batch in enumerate(batches, 1):
        rate = learning_rate * min(1.0, step / min(_WARMUP_STEPS, max(1, steps // 4)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = torch.from_numpy(batch).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise Failure(f"scoring model: loss {losses[-1]} at step {step} of {steps}; lower the learning rate")
        optimizer.step()
        report("train scoring model", step, steps)
        if step in due:
            yield _checkpoint(model, optimizer, step=step, learning_rate=rate, train_loss=float(np.mean(losses)))
            losses = []


def _checkpoint(
    model: Module, optimizer: torch.optim.Optimizer, *, step: int, learning_rate: float, train_loss: float
) -> Checkpoint:
    correction = 1 - _BETAS[1] ** step
    moments = {
        name: optimizer.state[parameter]["exp_avg_sq"] / correction
        if parameter in optimizer.state
        else torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
    }
    return Checkpoint(
        step=step,
        learning_rate=learning_rate,
        train_loss=train_loss,
        parameters={name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        second_moments=moments,
    )
