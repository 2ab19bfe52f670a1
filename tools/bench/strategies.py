"""Whether mixes that steer themselves are worth it: against every fixed mix, against a delivery that turns bad, over a bad network. On real text with graded synthetic tiers.

What is kept in the folder that ATOLL_BENCH_FOLDER names isn't run again; there lies each run's course, and its trajectory (tools/trajectories.py) as data.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from manifests.catalog import write_whole
from tools.bench.frame import Benchmark, Figure, exit_with_parent, run_benchmark
from tools.bench.graded import Documents
from tools.bench.strategies_arms import (
    COMMON,
    ISLANDS,
    LOOK_EVERY,
    LOSS,
    MOST_LATE,
    Arm,
    Point,
    Size,
    from_json,
    make_store,
    mean_weights,
    to_json,
    train,
)
from tools.output import STDERR

FOLDER, MORE_ARMS = "ATOLL_BENCH_FOLDER", "ATOLL_BENCH_MORE"
FULL = Size(
    documents=Documents(holdout=500, s=900, a=1800, b=1800, c=3000),
    start_steps=600,
    steps=360,
    test_sequences=192,
    seeds=(0, 1, 2),
)
QUICK = Size(
    documents=Documents(holdout=150, s=150, a=200, b=200, c=300),
    start_steps=24,
    steps=48,
    test_sequences=32,
    seeds=(0,),
)

UNIFORM = Arm(name="uniform", strategies=("uniform",))
STRATEGIES = [Arm(name=name, strategies=(name,)) for name in ("aggressive", "balanced", "conservative")]
HETERO = Arm(name="heterogeneous", strategies=("aggressive", "balanced", "conservative", "balanced"))
MEAN = Arm(name="its mean", strategies=("S=.225,A=.375,B=.3,C=.1",))
"""The one mix that the heterogeneous islands have on the mean."""
GRID = [Arm(name=mix, strategies=(mix,)) for mix in ("S=.8,A=.2", "S=.6,A=.4", "S=.4,A=.6")]
ADAPTIVE = Arm(name="adaptive", strategies=("adaptive",))
POISONED = replace(ADAPTIVE, name="adaptive poisoned", is_poisoned=True)
FIXED_POISONED = replace(STRATEGIES[0], name="aggressive poisoned", is_poisoned=True)
LOSSY = replace(ADAPTIVE, name="adaptive lossy", is_lossy=True)
ONLINE = replace(ADAPTIVE, name="adaptive online", more=(("online_influence", True), ("online_refresh", 16)))
BUDGETS = (1.0, 4.0, 10.0, 1e6)
"""ε of differential privacy; at the last one there's no noise to speak of."""
PRIVATE = [
    replace(ADAPTIVE, name=f"adaptive, ε = {epsilon:g}", more=(("feedback_epsilon", epsilon),)) for epsilon in BUDGETS
]
ARMS = [ADAPTIVE, UNIFORM, POISONED, *GRID, LOSSY, *STRATEGIES, HETERO, MEAN]
MORE = [FIXED_POISONED, ONLINE, *PRIVATE]
"""Arms that ATOLL_BENCH_MORE=1 adds: half as many runs again."""
_QUICK_ARMS = [UNIFORM, STRATEGIES[0], HETERO, MEAN, GRID[0], ADAPTIVE, POISONED, LOSSY]


class Results:
    """What the arms have come to, in a folder."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size

    def out(self, arm: Arm, seed: int) -> Path:
        """Where an arm's trajectory lies."""
        return (
            self.folder
            / "trajectories"
            / f"{arm.name.replace(' ', '-').replace('=', '').replace(',', '-').replace('ε', 'epsilon')}-{seed}"
        )

    def course(self, arm: Arm, seed: int) -> list[Point] | None:
        """What it has come to; None: it hasn't been run, or with other settings."""
        path = self._path(arm, seed)
        if not path.exists():
            return None
        kept = json.loads(path.read_text())
        return from_json(kept["course"]) if kept["settings"] == self._settings(arm) else None

    def keep(self, arm: Arm, seed: int, course: list[Point]) -> None:
        """Keeps what it has come to."""
        kept = {"settings": self._settings(arm), "course": to_json(course)}
        write_whole(self._path(arm, seed), json.dumps(kept).encode())

    def courses(self, arm: Arm) -> list[list[Point]]:
        """Of all seeds."""
        found = [self.course(arm, seed) for seed in self.size.seeds]
        return [course for course in found if course is not None]

    def losses(self, arm: Arm) -> list[float]:
        """At the end, by seed."""
        return [course[-1].loss for course in self.courses(arm)]

    def _path(self, arm: Arm, seed: int) -> Path:
        return self.folder / f"{self.out(arm, seed).name}.json"

    def _settings(self, arm: Arm) -> dict[str, object]:
        settings: dict[str, object] = json.loads(json.dumps({"arm": asdict(arm), **self.size.settings}))
        return settings


def measure(quick: bool) -> Mapping[str, Figure | str]:
    """Runs all arms for every seed, or takes them from the folder where they are done."""
    size, arms = (QUICK, _QUICK_ARMS) if quick else (FULL, [*ARMS, *MORE] if os.environ.get(MORE_ARMS) else ARMS)
    with _folder() as folder:
        results = Results(folder, size)
        _run(results, arms)
        return _figures(results, arms)


def _run(results: Results, arms: Sequence[Arm]) -> None:
    size = results.size
    with _workers(size.workers) as pool:
        stores = {seed: results.folder / f"store-{size.documents.s}-{seed}" for seed in size.seeds}
        list(pool.map(_make_store, stores.values(), [size] * len(stores), stores))
        left = [(arm, seed) for seed in size.seeds for arm in arms if results.course(arm, seed) is None]
        begun = {
            pool.submit(_train, arm, seed, stores[seed], size, results.out(arm, seed)): (arm, seed)
            for arm, seed in left
        }
        try:
            for number, future in enumerate(as_completed(begun), start=1):
                arm, seed = begun[future]
                course, seconds = future.result()
                results.keep(arm, seed, course)
                STDERR.print(
                    f"  {number} of {len(left)}: {arm.name}, seed {seed}: {course[-1].loss:.4f} ({seconds:.0f} s)",
                    markup=False,
                )
        except BaseException:
            for future in begun:
                future.cancel()
            raise


def _make_store(folder: Path, size: Size, seed: int) -> None:
    make_store(folder, size, seed)


def _train(arm: Arm, seed: int, store: Path, size: Size, out: Path) -> tuple[list[Point], float]:
    began = time.monotonic()
    course = train(arm, seed=seed, store=make_store(store, size, seed), size=size, out=out)
    return course, time.monotonic() - began


def _workers(number: int) -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, mp_context=spawn, initializer=_begin_worker, initargs=(os.getpid(),))


def _begin_worker(parent_pid: int) -> None:
    import torch

    exit_with_parent(parent_pid)
    torch.set_num_threads(1)


@contextmanager
def _folder() -> Iterator[Path]:
    if named := os.environ.get(FOLDER):
        Path(named).mkdir(parents=True, exist_ok=True)
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="atoll-strategies-") as folder:
        yield Path(folder)


# The figures.


def _figures(results: Results, arms: Sequence[Arm]) -> dict[str, Figure | str]:
    losses = {arm.name: results.losses(arm) for arm in arms}
    fixed = [arm.name for arm in arms if arm in (UNIFORM, *STRATEGIES, MEAN, *GRID)]
    best = min(fixed, key=lambda name: statistics.fmean(losses[name]))
    homogeneous = [arm.name for arm in arms if arm in (UNIFORM, *STRATEGIES)]
    best_strategy = min(homogeneous, key=lambda name: statistics.fmean(losses[name]))

    def ratio(above: str, below: str, meaning: str) -> Figure:
        return Figure(
            values=[a / b for a, b in zip(losses[above], losses[below], strict=True)], unit="ratio", meaning=meaning
        )

    to_uniform = [
        _tokens_to(adaptive, uniform[-1].loss) / uniform[-1].tokens
        for adaptive, uniform in zip(results.courses(ADAPTIVE), results.courses(UNIFORM), strict=True)
    ]
    to_best = [
        _tokens_to(adaptive, course[-1].loss) / course[-1].tokens
        for adaptive, course in zip(
            results.courses(ADAPTIVE), results.courses(next(arm for arm in arms if arm.name == best)), strict=True
        )
    ]
    figures: dict[str, Figure | str] = {
        "adaptive_vs_best_fixed": ratio(
            "adaptive",
            best,
            f"test loss / that of the best fixed mix of all, {best}, which nobody knows beforehand; target: at most 1.005",
        ),
        "tokens_vs_uniform": Figure(
            values=to_uniform,
            unit="ratio",
            meaning="tokens that adaptive islands take to the loss that uniform ends with / all of uniform's; target: at most 0.8",
        ),
        "tokens_vs_best_fixed": Figure(
            values=to_best, unit="ratio", meaning="likewise, to the best fixed mix's last loss; inf: not reached"
        ),
        "hetero_vs_best_homogeneous": ratio(
            "heterogeneous",
            best_strategy,
            f"islands on aggressive, balanced, conservative, balanced / all on the best one strategy, {best_strategy}",
        ),
        "hetero_vs_its_mean": ratio(
            "heterogeneous", "its mean", "the same / all on the mean of those mixes: what differing itself does"
        ),
        "lossy_vs_perfect": ratio(
            "adaptive lossy",
            "adaptive",
            f"{LOSS:.0%} of the feedback lost, the rest up to {MOST_LATE} rounds late; target: at most 1.005",
        ),
        **_recovery(results),
    }
    if ONLINE in arms:
        figures["online_vs_regression"] = ratio(
            "adaptive online",
            "adaptive",
            "tiers told apart by online influence / by regression over islands and cycles",
        )
    for arm in PRIVATE[:-1] if PRIVATE[0] in arms else ():
        figures[f"{arm.name}, vs no noise"] = ratio(
            arm.name,
            PRIVATE[-1].name,
            f"with feedback under that budget (δ = 1e-5) / under {BUDGETS[-1]:g}, which hides nothing",
        )
    if FIXED_POISONED in arms:
        figures["poisoned_vs_fixed"] = ratio(
            "adaptive poisoned", "aggressive poisoned", "both with the delivery that turns bad half-way"
        )
    for arm in arms:
        figures[f"loss, {arm.name}"] = Figure(
            values=losses[arm.name], unit="nats/token", meaning="test loss at the end"
        )
    for tier in "SABC":
        values = [list(mean_weights(results.out(ADAPTIVE, seed), tier).values())[-1] for seed in results.size.seeds]
        figures[f"adaptive, {tier} at the end"] = Figure(
            values=values, unit="share", meaning="mean of the islands' last weights"
        )
    return figures


def _recovery(results: Results) -> dict[str, Figure]:
    """Rounds from the bad delivery until the loss is below what it was then, for good; and until the mix has half of it left."""
    by_loss, by_mix = [], []
    num_rounds = results.size.steps // (COMMON["sync_every"] // COMMON["num_fragments"])
    for seed, course in zip(results.size.seeds, results.courses(POISONED), strict=True):
        at = num_rounds // 2
        before = [point for point in course if point.round <= at][-1]
        above = [point.round for point in course if point.round > at and point.loss >= before.loss]
        last = above[-1] if above else at
        by_loss.append(float(last - at + LOOK_EVERY * COMMON["num_fragments"]) if last < course[-1].round else math.inf)
        weights = mean_weights(results.out(POISONED, seed), "S")
        then = [weight for round_, weight in weights.items() if round_ <= at][-1]
        halved = [round_ for round_, weight in weights.items() if round_ > at and weight <= then / 2]
        by_mix.append(float(halved[0] - at) if halved else math.inf)
    return {
        "recovery_rounds": Figure(
            values=by_loss,
            unit="rounds",
            meaning=f"of {num_rounds // 2} after a delivery that puts scrambled and noisy text into S, until the test loss is below what it was, for good; inf: never",
        ),
        "recovery_rounds_mix": Figure(
            values=by_mix,
            unit="rounds",
            meaning="until the islands' mean weight of S is half of what it was; inf: never",
        ),
    }


def _tokens_to(course: Sequence[Point], loss: float) -> float:
    """Tokens at which a course first reaches a loss, between its points in a straight line; inf: it doesn't."""
    for before, after in pairwise(course):
        if after.loss <= loss < before.loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.tokens + share * (after.tokens - before.tokens)
    return course[0].tokens if course[0].loss <= loss else math.inf


BENCHMARK = Benchmark(
    name="strategies",
    question="Do mixes that steer themselves come near the best fixed mix without knowing it, out of a bad delivery, and through a bad network?",
    measure=measure,
    notes=(
        f"{ISLANDS} islands and a syncer in turn, a model of 0.08 M parameters, equal tokens (0.74 M) in every arm, from a model that was trained plainly on the uniform mix (0.6 M tokens). S is real leads of Wikipedia (9 % of the tokens), A rephrasings of others as FAQ, tables, tutorials and "
        "maths, B boilerplate, C scrambled and noisy text; no document was made from one of another tier or of the holdout (tools/bench/graded.py). Every loss is on 192 sequences of held-out leads that no "
        "island measures itself on. Uniform reads every tier by its size.",
        "The fixed mixes are the strategies and a grid of mixes of S and A; the best of them is chosen by the mean loss over the seeds. A bad delivery is a tier version, made half-way, in which the documents of S "
        "and C have changed places; islands go over to it at their next round's edge.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
