"""What online influence costs a training step: the same steps with and without it, in turn, in one process.

A block is a few steps of one arm; blocks of the two arms take turns, so that a machine that slows down slows both. The holdout's gradient is timed now and
then, and charged to every step by its share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.output import STDERR
from trainer.config import RunConfig, default_model

if TYPE_CHECKING:
    import torch

VOCABULARY = 4096
_WARM_STEPS = 2
MODELS: Mapping[str, Mapping[str, Any]] = {
    "default": default_model(VOCABULARY),
    "wide": default_model(VOCABULARY) | {"hidden_size": 256, "intermediate_size": 768},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    blocks: int
    """Blocks of each arm."""
    steps: int
    """Steps in a block."""


FULL = Size(blocks=20, steps=1)
QUICK = Size(blocks=4, steps=1)


class _Arm:
    """A model in training, with or without online influence."""

    def __init__(self, model: Mapping[str, Any], *, online: bool) -> None:
        import torch

        from trainer.model import build_model, make_optimizer
        from trainer.online import OnlineInfluence

        self.config = RunConfig(
            run="bench",
            tier_version=1,
            pool="p",
            token_dtype="uint16",
            vocab_size=VOCABULARY,
            model=model,
            device="cpu",
        )
        self.model = build_model(self.config)
        self.optimizer = make_optimizer(self.model, self.config)
        self._generator = torch.Generator().manual_seed(0)
        self._online = None
        for _ in range(_WARM_STEPS):
            self.step()
        if online:
            holdout_NL = self._tokens(self.config.holdout_sequences)
            self._online = OnlineInfluence(self.model, self.optimizer, holdout_NL, self.config)
            self.refresh()
        self.step()

    def step(self) -> None:
        """One inner step, as an island takes it."""
        import torch

        from trainer.model import token_losses

        losses_BL = token_losses(self.model, self._tokens(self.config.batch_size))
        self.optimizer.zero_grad(set_to_none=True)
        losses_BL.mean().backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip)
        self.optimizer.step()
        if self._online is not None:
            self._online.take(lr=self.config.lr, norm=norm)

    def refresh(self) -> None:
        """One gradient of the holdout, where it is measured at all."""
        if self._online is not None:
            self._online.prepare(self.config.online_refresh)

    def _tokens(self, count: int) -> torch.Tensor:
        import torch

        return torch.randint(VOCABULARY, (count, self.config.seq_len), generator=self._generator)


def measure(quick: bool) -> Mapping[str, Figure]:
    """Both models, one after the other; the smaller one alone if quick."""
    import torch

    size = QUICK if quick else FULL
    # As an island has where islands share a machine; and threads that wait for each other would measure other programs.
    torch.set_num_threads(1)
    figures = {}
    for name, model in list(MODELS.items())[: 1 if quick else None]:
        plain, online = _Arm(model, online=False), _Arm(model, online=True)
        off: list[_Time] = []
        on: list[_Time] = []
        refreshes: list[_Time] = []
        for block in range(size.blocks):
            off.append(_time(plain.step, times=size.steps))
            on.append(_time(online.step, times=size.steps))
            if block % 3 == 0:
                refreshes.append(_time(online.refresh, times=1))
        share = 1 / online.config.online_refresh
        wall_s = [step.wall_s + share * median(refresh.wall_s for refresh in refreshes) for step in on]
        cpu_s = [step.cpu_s + share * median(refresh.cpu_s for refresh in refreshes) for step in on]
        tail = "" if name == "default" else f"_{name}"
        size_of_it = f"{sum(p.numel() for p in plain.model.parameters()) / 1e6:.1f} M parameters"
        figures[f"online_overhead{tail}"] = Figure(
            values=[with_it / step.cpu_s - 1 for with_it, step in zip(cpu_s, off, strict=True)],
            unit="share",
            meaning=f"processor time that online influence adds to a step, {size_of_it}",
        )
        figures[f"online_overhead_wall{tail}"] = Figure(
            values=[with_it / step.wall_s - 1 for with_it, step in zip(wall_s, off, strict=True)],
            unit="share",
            meaning=f"the same in wall time, other programs included, {size_of_it}",
        )
        figures[f"steps_per_s{tail}"] = Figure(
            values=[1 / step.wall_s for step in off], unit="steps/s", meaning=f"without, {size_of_it}"
        )
        figures[f"steps_per_s_online{tail}"] = Figure(
            values=[1 / s for s in wall_s], unit="steps/s", meaning=f"with, {size_of_it}"
        )
        STDERR.print(f"  {name}: overhead {figures[f'online_overhead{tail}'].median:.1%}")
    return figures


@dataclass(frozen=True, kw_only=True, slots=True)
class _Time:
    wall_s: float
    cpu_s: float


def _time(act: Callable[[], None], *, times: int) -> _Time:
    """Mean time of an act."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        act()
    return _Time(wall_s=(time.perf_counter() - wall) / times, cpu_s=(time.process_time() - cpu) / times)


BENCHMARK = Benchmark(
    name="online",
    question="How much time does online influence add to a training step?",
    measure=measure,
    notes=(
        "Blocks of steps on made-up tokens, 8 sequences of 128, with and without in turn, one thread; a refresh of the holdout's gradient (16 sequences each 64 steps) is "
        "charged to each step by its share. Attributed are the attention's and the MLP's output layers of every block.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
