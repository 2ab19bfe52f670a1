"""Sixteen islands and a syncer as processes of this machine: whether all take part in the merges, and what the syncer's work costs with each island.

The model is tiny and the cores are few, so an island's step is slow for its size, as it would be on a machine of its own; what is measured is the protocol.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.diloco_processes import Roles, call, warm_up
from tools.bench.diloco_runs import Merge, Outcome, make_store, prepare, read_outcome, tell_to_leave
from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.output import STDERR
from trainer.run import GLOBAL

_START_LIMIT_S = 400.0
_END_LIMIT_S = 400.0
_REPORT_EVERY_S = 30.0
_MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    islands: int
    seconds: float
    few_islands: int
    """Of the run that the memory is compared with."""
    few_seconds: float
    documents: int
    options: Mapping[str, Any]
    """Of the run's configuration."""


FULL = Size(
    islands=16,
    seconds=605,
    few_islands=2,
    few_seconds=60,
    documents=600,
    options={"batch_size": 8, "seq_len": 128, "sync_every": 32, "num_fragments": 4, "lr": 1e-3},
)
QUICK = Size(
    islands=3,
    seconds=8,
    few_islands=1,
    few_seconds=4,
    documents=120,
    options={"batch_size": 4, "seq_len": 64, "sync_every": 32, "num_fragments": 4, "lr": 1e-3},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a process has used so far."""

    after_s: float
    """Since the window began."""
    cpu_s: float
    peak_mib: float
    """VmHWM."""
    own_mib: float
    """RssAnon now: without what is mapped from files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """A run, from the first moment at which every island had taken a step to the moment at which all were told to leave."""

    began: float
    """Seconds since the epoch."""
    ended: float
    steps: Sequence[int]
    """Taken meanwhile, by island."""
    usage: Sequence[Usage]
    """Of the syncer, from the beginning to the end."""
    outcome: Outcome
    mismatches: int

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended - self.began

    @property
    def merges(self) -> list[Merge]:
        """Those made meanwhile."""
        return [merge for merge in self.outcome.merges if self.began <= merge.at <= self.ended]

    def merged_at(self, island: int) -> list[float]:
        """When the island took part in a merge."""
        return [merge.at for merge in self.merges if island in [said["island"] for said in merge.contributions]]

    def longest_gap(self, island: int) -> float:
        """Longest time that the island went without being merged, seconds."""
        times = [self.began, *self.merged_at(island), self.ended]
        return max(after - before for before, after in itertools.pairwise(times))

    def own_mib(self, after_s: float) -> float:
        """Most memory of the syncer's own in the first seconds."""
        return max(usage.own_mib for usage in self.usage if usage.after_s <= after_s)


def measure(quick: bool) -> Mapping[str, Figure]:
    """A run of few islands, for comparison, then the run of many."""
    size = QUICK if quick else FULL
    warm_up()
    with tempfile.TemporaryDirectory(prefix="atoll-scale-") as folder:
        store_uri = make_store(Path(folder), num_documents=size.documents, vocab_size=512)
        few = _run(store_uri, Path(folder), size, islands=size.few_islands, seconds=size.few_seconds)
        many = _run(store_uri, Path(folder), size, islands=size.islands, seconds=size.seconds)
    return _figures(size, few, many)


def _run(store_uri: str, folder: Path, size: Size, *, islands: int, seconds: float) -> Ran:
    name = f"of-{islands}"
    options = {
        "num_islands": islands, "steps": size.options["sync_every"] * 100_000, "schedule": "wsd", "model": _MODEL,
        "max_repeats": 1_000_000, "holdout_sequences": 16, **size.options,
    }  # fmt: skip
    call(prepare, store_uri, name, options, environment={})
    began = time.monotonic()
    with Roles(store_uri, name, folder / name, environments={i: {} for i in range(GLOBAL, islands)}) as roles:
        roles.watch(lambda: all(role.steps for role in roles.islands), limit_s=_START_LIMIT_S, what="a step of each")
        STDERR.print(f"  {islands} islands: all train after {time.monotonic() - began:.0f} s")
        window_began, began_at = time.time(), time.monotonic()
        pid = roles.syncer.process.pid
        first = [role.steps[-1][1] for role in roles.islands]
        usage = [_usage(pid, 0.0)]
        while (after_s := time.monotonic() - began_at) < seconds:
            roles.watch_for(min(_REPORT_EVERY_S, max(1.0, seconds / 10), seconds - after_s))
            usage.append(_usage(pid, time.monotonic() - began_at))
            steps = [role.steps[-1][1] for role in roles.islands]
            if int(usage[-1].after_s // _REPORT_EVERY_S) > int(usage[-2].after_s // _REPORT_EVERY_S):
                STDERR.print(
                    f"  {usage[-1].after_s:.0f} s: steps {min(steps)} – {max(steps)}, {roles.syncer.last.get('merge', 0)} merges, "
                    f"syncer {usage[-1].peak_mib:.0f} MiB, {usage[-1].cpu_s - usage[0].cpu_s:.0f} s of CPU"
                )
        window_ended = time.time()
        call(tell_to_leave, store_uri, name, environment={})
        roles.watch_out(limit_s=_END_LIMIT_S)
        outcome: Outcome = call(read_outcome, store_uri, name, None, environment={})
        return Ran(
            began=window_began,
            ended=window_ended,
            steps=[after - before for before, after in zip(first, steps, strict=True)],
            usage=usage,
            outcome=outcome,
            mismatches=outcome.count_mismatches(
                roles.steps, step_tokens=size.options["batch_size"] * size.options["seq_len"]
            ),
        )


def _usage(pid: int | None, after_s: float) -> Usage:
    folder = Path(f"/proc/{pid}")
    ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]  # utime and stime
    status = (folder / "status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status if line.startswith(("VmHWM:", "RssAnon:"))}
    return Usage(
        after_s=after_s,
        cpu_s=sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        peak_mib=kib["VmHWM"] / 1024,
        own_mib=kib["RssAnon"] / 1024,
    )


def _figures(size: Size, few: Ran, many: Ran) -> dict[str, Figure]:
    islands = range(size.islands)
    merges = many.merges
    counts = [len(many.merged_at(island)) for island in islands]
    cpu_s = many.usage[-1].cpu_s - many.usage[0].cpu_s
    backlogs = [
        line["backlog"]
        for line in many.outcome.lines
        if line["kind"] == "round" and many.began <= line["time"] <= many.ended
    ]
    taken = [len({said["island"] for said in merge.contributions}) / size.islands for merge in merges]
    alike = few.usage[-1].after_s
    own_few, own_alike, own = few.own_mib(alike), many.own_mib(alike), many.own_mib(many.seconds + 60)
    per_island = (own_alike - own_few) / (size.islands - size.few_islands)
    round_steps = size.options["sync_every"] // size.options["num_fragments"]
    merged = [count / (steps / round_steps) for count, steps in zip(counts, many.steps, strict=True)]

    def dropped(stale: bool) -> int:
        return sum((said["why"] == "stale") == stale for merge in merges for said in merge.dropped)

    found = {
        "seconds": (many.seconds, "s", f"during which all {size.islands} islands trained"),
        "step_time_s": (many.seconds / statistics.median(many.steps), "s", "of an inner step, on cores that all share"),
        "merges": (len(merges), "merges", "of one fragment each"),
        "participation": (statistics.median(taken), "share", "of the islands in a merge, median"),
        "least_participation": (min(counts) / max(counts), "share", "merges of the island with fewest over those of the one with most"),
        "merged": (statistics.median(merged), "share", "of an island's outer gradients that went into a merge meanwhile, median of the islands"),
        "least_merged": (min(merged), "share", "likewise, of the island with fewest"),
        "slowest_to_fastest": (min(many.steps) / max(many.steps), "share", "inner steps of the slowest island over those of the fastest"),
        "longest_gap_s": (max(map(many.longest_gap, islands)), "s", "longest that any island went without being merged"),
        "kept_out": (dropped(stale=False), "gradients", "outer gradients that the gate kept out"),
        "stale": (dropped(stale=True), "gradients", "outer gradients that came too late"),
        "syncer_cpu_per_merge_s": (cpu_s / len(merges), "s", "of CPU, all that the syncer does counted"),
        "syncer_cpu_per_island_minute_s": (cpu_s / size.islands / (many.seconds / 60), "s", "of CPU, for each island and minute"),
        "syncer_peak_mib": (many.usage[-1].peak_mib, "MiB", "most memory of the syncer (VmHWM), what it shares with others included"),
        "syncer_own_mib": (own, "MiB", "most memory of its own (RssAnon)"),
        "syncer_own_mib_few": (own_few, "MiB", f"likewise with {size.few_islands} islands, in the first {alike:.0f} s"),
        "syncer_mib_per_island": (per_island, "MiB", f"how much more for each island, in the first {alike:.0f} s"),
        "syncer_growth_mib": (own - own_alike, "MiB", f"how much it rose from {alike:.0f} s on"),
        "backlog": (statistics.median(backlogs), "things", "of an island that weren't in the store yet at a round's end, median"),
        "backlog_most": (max(backlogs), "things", "likewise, most"),
        "ledger_mismatches": (many.mismatches + few.mismatches, "islands", "whose tokens in the ledger aren't steps × batch × length"),
    }  # fmt: skip
    return {
        name: Figure(values=[float(value)], unit=unit, meaning=meaning)
        for name, (value, unit, meaning) in found.items()
    }


BENCHMARK = Benchmark(
    name="diloco_scale",
    question="Do all of 16 islands take part in the merges, and what does the syncer need for each?",
    measure=measure,
    notes=(
        "The islands are processes on this machine's cores, so `step_time_s` is of a sixteenth of these. All meet in a store on the local disk; "
        "the syncer is a process of its own.",
        "The processes are forked from one that has imported torch: its pages are in the syncer's memory here, as they are in any syncer's, and not in the differences.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
