"""Online influence: what every place of a training batch contributes to the descent of the holdout loss, measured while the island trains.

It is the first-order term of In-Run Data Shapley (arXiv 2406.11011) in the metric of the island's AdamW: lr · ⟨g_t, P v⟩, where g_t is place t's part of the
gradient that the optimizer is given (mean over the batch, clipped), v the gradient of the holdout loss, and P = 1 / (√v̂ + ε). A step's contributions add up to
the drop of the holdout loss that its gradient promises, over this step and those that Adam's momentum carries it to; positive is good.

The gradient of a linear layer is Σ_t a_t b_tᵀ (inputs a_t, gradients of the outputs b_t), so place t's part of the product is (a_t P v) · b_t: one more matrix
product for each layer, within the ordinary backward pass; no second pass, no gradient per sample. To stay cheap only some layers are attributed, by default those
that write to the residual stream, and of these the weights without the bias; P v is made anew from a few holdout sequences every so many steps.

A contribution belongs to the place whose activations it went through. The place of token t is where token t + 1 is predicted; and in a sequence of several
documents, later ones attend to earlier ones, so an earlier document's places carry also what their activations do to the later one's loss. Where a sequence holds
one document, the sum over its places is exactly that of the document's own gradient.

The training isn't touched: hooks only look, and the holdout's gradient is taken apart from the parameters' own, without dropout or any randomness. Knows no store.

Letters: B sequences of a batch, L places of a sequence, N holdout sequences, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from manifests.errors import UserError
from trainer.config import RunConfig
from trainer.model import token_losses

RESIDUAL_LAYERS = (
    *("o_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma, SmolLM
    *("attn.c_proj", "mlp.c_proj"),  # GPT-2
    *("attention.dense", "mlp.dense_4h_to_h"),  # GPT-NeoX
)
"""Ends of the names of the layers that write to the residual stream."""
_YOUNG_STEPS = 8
"""Steps before the first measurement: the optimizer's second moments of fewer gradients say little."""


class OnlineInfluence:
    """Watches a model's training. Each step: `prepare`, the forward and backward passes (one or several), `take`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, holdout_NL: torch.Tensor, config: RunConfig
    ) -> None:
        """Hooks onto the layers that the configuration names.

        Raises:
            UserError: the model has no such layers, or they can't be attributed.
        """
        self._model, self._optimizer, self._config = model, optimizer, config
        self._holdout_NL = holdout_NL
        self._layers = attributed_layers(model, config.online_layers)
        self._directions_IO: dict[str, torch.Tensor] = {}
        self._sums: list[torch.Tensor] = []
        self._is_new_pass = self._is_refreshing = False
        model.register_forward_pre_hook(self._begin_pass)
        for name, layer in self._layers.items():
            layer.register_forward_hook(lambda _, inputs, output, name=name: self._watch(name, inputs[0], output))

    def prepare(self, step: int) -> None:
        """Before the passes of the step after `step` steps: makes the holdout's direction anew where that is due.

        The schedule is a function of the step: after 8, 16, 32, … steps while that is below the interval, then once an interval. After a restart in between, the
        direction is made from the state at the restart.
        """
        interval = self._config.online_refresh
        is_due = step % interval == 0 or (step < interval and step.bit_count() == 1)
        if step >= min(interval, _YOUNG_STEPS) and (is_due or not self._directions_IO):
            self._refresh(step)

    def take(self, *, lr: float, norm: torch.Tensor) -> torch.Tensor | None:
        """The contribution of every place of the passes since the last call, (sequences, length) in float32; None: nothing was measured yet.

        Args:
            lr: learning rate of the step.
            norm: norm of the gradient before it was clipped.
        """
        passes, self._sums = self._sums, []
        if not passes:
            return None
        clipped = (self._config.gradient_clip / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
        return torch.cat(passes) * (lr * clipped)

    def _begin_pass(self, *_: Any) -> None:
        self._is_new_pass = True

    def _watch(self, name: str, inputs: torch.Tensor, output: torch.Tensor) -> None:
        """In a forward pass: has the output's gradient looked at when it comes."""
        if self._is_refreshing or not self._directions_IO or not output.requires_grad:
            return
        if output.dim() != 3:
            raise UserError(
                f"layer {name} sees its batch in the shape {tuple(output.shape)}, so no token of it is known; name others in online_layers"
            )
        if self._is_new_pass:
            self._is_new_pass = False
            self._sums.append(torch.zeros(output.shape[:2], dtype=torch.float32, device=output.device))
        sums_BL, inputs_BLI, direction_IO = self._sums[-1], inputs.detach(), self._directions_IO[name]

        def add(gradient_BLO: torch.Tensor) -> None:
            sums_BL.add_(_contributions(inputs_BLI, gradient_BLO, direction_IO))

        output.register_hook(add)

    def _refresh(self, step: int) -> None:
        """P v, from a few sequences of the holdout: the next ones each interval, round and round."""
        num_sequences = min(self._config.online_sequences, len(self._holdout_NL))
        first = step // self._config.online_refresh * num_sequences
        which = torch.arange(first, first + num_sequences, device=self._holdout_NL.device) % len(self._holdout_NL)
        self._is_refreshing = True
        try:
            gradients = holdout_gradients(
                self._model, list(self._layers.values()), self._holdout_NL[which], batch_size=self._config.batch_size
            )
        finally:
            self._is_refreshing = False
        for (name, layer), gradient in zip(self._layers.items(), gradients, strict=True):
            direction = gradient * preconditioner(self._optimizer, layer.weight)
            self._directions_IO[name] = direction if _is_conv1d(layer) else direction.T


def attributed_layers(model: nn.Module, endings: Sequence[str] = ()) -> dict[str, Any]:
    """The linear layers whose names end in one of these, by name; none given: those that write to the residual stream.

    Raises:
        UserError: there are none, or a layer's weight is another's too.
    """
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) or _is_conv1d(module)
    }
    wanted = tuple(endings) or RESIDUAL_LAYERS
    found = {name: layer for name, layer in linear.items() if any(f".{name}".endswith(f".{end}") for end in wanted)}
    if not found:
        known = sorted({".".join(name.split(".")[-2:]) for name in linear})
        raise UserError(
            f"no linear layer's name ends in {' or '.join(wanted)}; name some in online_layers: {', '.join(known)}"
        )
    places = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    shared = [name for name, layer in found.items() if places.count(id(layer.weight)) > 1]
    if shared:
        raise UserError(
            f"the weight of layer {shared[0]} is another layer's too, so its gradient is not this layer's; leave it out of online_layers"
        )
    return found


def holdout_gradients(
    model: nn.Module, layers: Sequence[nn.Module], tokens_NL: torch.Tensor, *, batch_size: int
) -> list[torch.Tensor]:
    """Gradient of the mean holdout loss for the weight of each layer, in float32. The parameters' own gradients and all randomness are left alone."""
    weights: list[Any] = [layer.weight for layer in layers]
    num_predicted = tokens_NL.shape[0] * (tokens_NL.shape[1] - 1)
    gradients = [torch.zeros_like(weight) for weight in weights]
    was_training = model.training
    model.eval()
    with torch.enable_grad():
        for batch in tokens_NL.split(batch_size):
            loss = token_losses(model, batch).sum() / num_predicted
            for gradient, part in zip(gradients, torch.autograd.grad(loss, weights), strict=True):
                gradient.add_(part)
    model.train(was_training)
    return gradients


def preconditioner(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> torch.Tensor:
    """AdamW's 1 / (√v̂ + ε) for one parameter."""
    group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
    state = optimizer.state[weight]
    second_moment = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
    return 1 / (second_moment.sqrt() + group["eps"])


def _contributions(inputs_BLI: torch.Tensor, gradient_BLO: torch.Tensor, direction_IO: torch.Tensor) -> torch.Tensor:
    """(a_t V) · b_t of every place: products in the layer's own type, sums in float32; by way of the narrower side."""
    direction_IO, inputs_BLI = direction_IO.to(gradient_BLO.dtype), inputs_BLI.to(gradient_BLO.dtype)
    if direction_IO.shape[1] <= direction_IO.shape[0]:
        product, other = inputs_BLI @ direction_IO, gradient_BLO
    else:
        product, other = gradient_BLO @ direction_IO.T, inputs_BLI
    return product.float().mul_(other).sum(dim=-1)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
