"""DiLoCo over links of several latencies and bandwidths: whether steps slow down, and what becomes of the merges and the loss where a link can't carry them.

Two islands, each behind a link of its own to a real S3 server; the syncer stands beside the server. A link is fast while the processes start, slow from a given
step on, and fast again when the last step has been taken: joining, and the last whole checkpoint, would be most of what a slow link has to carry in so short a run.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manifests.errors import Failure
from tools.bench.diloco_processes import Role, Roles, call, warm_up
from tools.bench.diloco_runs import Merge, Outcome, copy_store, make_store, prepare, read_outcome
from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.bench.link import S3Server, ThrottledLink, serve_s3
from tools.output import STDERR
from trainer.run import GLOBAL

_ISLANDS = 2
_START_LIMIT_S = 120.0
_END_LIMIT_S = 120.0
_RUN = "link"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """How the links are."""

    latency_s: float = 0.0
    bandwidth_bps: float | None = None

    @property
    def name(self) -> str:
        """As the figures' names have it."""
        if self.bandwidth_bps is None:
            return "no limit"
        return f"{self.latency_s * 1e3:.0f} ms, {self.bandwidth_bps / 1e6:g} Mbit/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    cases: Sequence[Case]
    documents: int
    hidden_size: int
    num_layers: int
    steps: int
    fast_steps: int
    """Of the steps, those before the links become slow."""
    options: Mapping[str, Any]
    """Of the run's configuration."""
    case_limit_s: float
    """For the steps on the slow link."""


NO_LIMIT = Case()
FULL = Size(
    cases=(
        NO_LIMIT,
        Case(latency_s=0.05, bandwidth_bps=100e6),
        Case(latency_s=0.2, bandwidth_bps=100e6),
        Case(latency_s=1.0, bandwidth_bps=100e6),
        Case(latency_s=0.05, bandwidth_bps=10e6),
        Case(latency_s=0.05, bandwidth_bps=1e6),
        Case(latency_s=0.05, bandwidth_bps=0.2e6),
        NO_LIMIT,
    ),
    documents=600,
    hidden_size=128,
    num_layers=6,
    steps=432,
    fast_steps=48,
    options={"batch_size": 16, "seq_len": 64, "sync_every": 48, "num_fragments": 4, "lr": 2e-3},
    case_limit_s=300,
)
QUICK = Size(
    cases=(NO_LIMIT, Case(latency_s=0.05, bandwidth_bps=10e6), Case(latency_s=0.2, bandwidth_bps=1e6)),
    documents=80,
    hidden_size=32,
    num_layers=2,
    steps=48,
    fast_steps=16,
    options={"batch_size": 8, "seq_len": 64, "sync_every": 16, "num_fragments": 2, "lr": 2e-3},
    case_limit_s=60,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a case came to on the slow link. Lists have one entry for each island."""

    step_times_s: list[float]
    """Median time from step to step."""
    paces_s: list[float]
    """Mean time from step to step, whatever came between."""
    merged: list[float]
    """Outer gradients of the island that were merged before the last step, as a share of the rounds."""
    staleness: list[int]
    """Versions that came between the base of an outer gradient and its merge, of each merged one."""
    delays_s: list[float]
    """From the end of a round to the merge of its outer gradient, likewise."""
    dropped: int
    sent_bytes: list[int]
    received_bytes: list[int]
    loss: float
    """Of the global parameters at the last step."""
    last_loss: float
    """Of those after the run's end, when all that waited had come through."""
    mismatches: int


@dataclass(kw_only=True, slots=True)
class Results:
    """What is known so far."""

    found: dict[Case, list[Found]] = field(default_factory=dict)
    errors: dict[Case, str] = field(default_factory=dict)


def measure(quick: bool) -> Mapping[str, Figure | str]:
    """All cases, one after the other."""
    size = QUICK if quick else FULL
    warm_up()
    results = Results()
    with tempfile.TemporaryDirectory(prefix="atoll-link-") as name:
        folder = Path(name)
        (folder / "s3").mkdir()
        with serve_s3(folder / "s3") as server:
            store_uri = make_store(folder, num_documents=size.documents, vocab_size=1024)
            call(prepare, store_uri, _RUN, _options(size), environment={})
            for number, case in enumerate(size.cases):
                began = time.monotonic()
                try:
                    found = _run(case, size, server, store_uri, folder / f"case-{number}")
                except Failure as e:
                    results.errors[case] = str(e)
                    STDERR.print(f"  {case.name}: {e}", markup=False)
                    continue
                results.found.setdefault(case, []).append(found)
                STDERR.print(
                    f"  {case.name}: a step in {statistics.mean(found.step_times_s):.3f} s, merged {statistics.mean(found.merged):.0%}, "
                    f"loss {found.loss:.3f}; {time.monotonic() - began:.0f} s in all",
                    markup=False,
                )
    return _figures(results)


def _run(case: Case, size: Size, server: S3Server, local_uri: str, folder: Path) -> Found:
    store_uri = f"s3://{server.bucket}/{folder.name}"
    near: dict[str, str] = {**server.environment, "ATOLL_CACHE": str(folder / "own-cache")}
    call(copy_store, local_uri, store_uri, environment=near)
    with ExitStack() as stack:
        links = [
            stack.enter_context(ThrottledLink(server.address, latency_s=0.0, bandwidth_bps=None))
            for _ in range(_ISLANDS)
        ]
        environments = {GLOBAL: server.environment} | {
            island: {**server.environment, "AWS_ENDPOINT_URL": link.endpoint} for island, link in enumerate(links)
        }
        roles = stack.enter_context(Roles(store_uri, _RUN, folder, environments=environments))
        roles.watch(lambda: _have_begun(roles, size.fast_steps), limit_s=_START_LIMIT_S, what="the first steps")
        slow_at, slow_from = time.monotonic(), time.time()
        before = [(link.bytes_up, link.bytes_down) for link in links]
        for link in links:
            link.latency_s, link.bandwidth_bps = case.latency_s, case.bandwidth_bps
        after: dict[int, tuple[int, int]] = {}

        def have_ended() -> bool:
            for role in roles.islands:
                if role.island not in after and role.steps[-1][1] == size.steps:
                    after[role.island] = links[role.island].bytes_up, links[role.island].bytes_down
            return len(after) == _ISLANDS

        roles.watch(have_ended, limit_s=size.case_limit_s, what="the last step")
        slow_until = time.time()
        for link in links:
            link.latency_s, link.bandwidth_bps = 0.0, None
        roles.watch_out(limit_s=_END_LIMIT_S)
        outcome: Outcome = call(read_outcome, store_uri, _RUN, slow_until, environment=near)
        assert outcome.loss_then is not None
        assert outcome.holdout_loss is not None
        slow = [merge for merge in outcome.merges if slow_from <= merge.at <= slow_until]
        round_steps = size.options["sync_every"] // size.options["num_fragments"]
        rounds = range(size.fast_steps // round_steps + 1, size.steps // round_steps + 1)
        told = _told(slow, rounds)
        ended = {(line["role"], line["round"]): line["time"] for line in outcome.lines if line["kind"] == "round"}
        gaps = [_gaps(role, slow_at) for role in roles.islands]
        return Found(
            step_times_s=[statistics.median(times) for times in gaps],
            paces_s=[statistics.mean(times) for times in gaps],
            merged=[sum(said["island"] == i for _, said in told) / len(rounds) for i in range(_ISLANDS)],
            staleness=[merge.version - 1 - said["base_version"] for merge, said in told],
            delays_s=[merge.at - ended[f"island-{said['island']:04d}", said["round"]] for merge, said in told],
            dropped=sum(len(merge.dropped) for merge in slow),
            sent_bytes=[after[i][0] - before[i][0] for i in range(_ISLANDS)],
            received_bytes=[after[i][1] - before[i][1] for i in range(_ISLANDS)],
            loss=outcome.loss_then,
            last_loss=outcome.holdout_loss,
            mismatches=outcome.count_mismatches(
                roles.steps, step_tokens=size.options["batch_size"] * size.options["seq_len"]
            ),
        )


def _options(size: Size) -> dict[str, Any]:
    model = {
        "model_type": "llama", "hidden_size": size.hidden_size, "intermediate_size": 3 * size.hidden_size,
        "num_hidden_layers": size.num_layers, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    return {
        "num_islands": _ISLANDS, "strategies": ("balanced", "adaptive"), "model": model, "steps": size.steps, "schedule": "wsd",
        "checkpoint_cycles": size.steps, "max_repeats": 1_000_000, "outer_lr": 1.0, "outer_momentum": 0.0, **size.options,
    }  # fmt: skip


def _have_begun(roles: Roles, step: int) -> bool:
    return all(role.steps and role.steps[-1][1] >= step for role in roles.islands)


def _gaps(role: Role, since_s: float) -> list[float]:
    """Times from step to step."""
    times = [at_s for at_s, _ in role.steps if at_s >= since_s]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _told(merges: Sequence[Merge], rounds: range) -> list[tuple[Merge, dict[str, Any]]]:
    """The outer gradients of these rounds that went into these merges, each with its merge."""
    return [(merge, said) for merge in merges for said in merge.contributions if said["round"] in rounds]


def _figures(results: Results) -> dict[str, Figure | str]:
    figures: dict[str, Figure | str] = {}
    unlimited = results.found.get(NO_LIMIT, [])
    step_s = statistics.mean(time_s for found in unlimited for time_s in found.step_times_s) if unlimited else None
    pace_s = statistics.mean(time_s for found in unlimited for time_s in found.paces_s) if unlimited else None
    loss = statistics.mean(found.loss for found in unlimited) if unlimited else None

    def add(name: str, case: Case, values: Sequence[float], unit: str, meaning: str) -> None:
        figures[f"{name}, {case.name}"] = Figure(values=values, unit=unit, meaning=meaning)

    for case, runs in results.found.items():
        step_times = [time_s for found in runs for time_s in found.step_times_s]
        paces = [time_s for found in runs for time_s in found.paces_s]
        staleness = [lag for found in runs for lag in found.staleness]
        if case == NO_LIMIT or step_s is None or pace_s is None or loss is None:
            add("step_time_s", case, step_times, "s", "median time from step to step, of each island")
            add("pace_s", case, paces, "s", "mean time from step to step, likewise")
            add(
                "holdout_loss",
                case,
                [found.loss for found in runs],
                "nats/token",
                "of the global parameters as they are at the last step",
            )
        else:
            add(
                "step_time",
                case,
                [time_s / step_s for time_s in step_times],
                "ratio",
                "median time from step to step, over that without a limit",
            )
            add("pace", case, [time_s / pace_s for time_s in paces], "ratio", "mean time from step to step, likewise")
            add(
                "holdout_loss_rise",
                case,
                [found.loss - loss for found in runs],
                "nats/token",
                "holdout loss of the global parameters at the last step, less that without a limit",
            )
        add(
            "last_holdout_loss",
            case,
            [found.last_loss for found in runs],
            "nats/token",
            "once all that waited has come through",
        )
        add(
            "merged",
            case,
            [share for found in runs for share in found.merged],
            "share",
            "of an island's rounds whose outer gradient was merged before the last step",
        )
        if staleness:
            add("staleness", case, staleness, "versions", "between an outer gradient's base and its merge")
            add(
                "delay_s",
                case,
                [s for found in runs for s in found.delays_s],
                "s",
                "from the end of a round to the merge of its outer gradient, of each merged one",
            )
        add(
            "dropped",
            case,
            [found.dropped for found in runs],
            "gradients",
            "outer gradients that were too old, or kept out",
        )
        add(
            "sent_mb",
            case,
            [size / 1e6 for found in runs for size in found.sent_bytes],
            "MB",
            "over an island's link, towards the store",
        )
        add("received_mb", case, [size / 1e6 for found in runs for size in found.received_bytes], "MB", "the other way")
        add("ledger_mismatches", case, [found.mismatches for found in runs], "islands", "whose tokens in the ledger aren't steps × batch × length")  # fmt: skip
    figures["broken_cases"] = Figure(
        values=[len(results.errors)], unit="cases", meaning="in which a process died or didn't come to an end"
    )
    return figures | {f"error, {case.name}": error.replace("\n", " ") for case, error in results.errors.items()}


BENCHMARK = Benchmark(
    name="diloco_link",
    question="From which latency and bandwidth on does a link slow the islands' steps, or cost quality?",
    measure=measure,
    notes=(
        "Two islands, each behind a link of its own to an S3 server; the latency is of a round trip. Outer gradients in 4 bits, records, metrics, shards and merges "
        "go over the link; whole checkpoints don't, but for the last, which goes when the link is fast again.",
        "The case without a limit ran first and last; what the others are compared with is its mean. All processes share this machine's cores with the server and the links, so that steps are faster where a link carries less.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
