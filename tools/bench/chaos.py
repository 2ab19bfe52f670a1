"""A run under chaos, as a benchmark: faults survived, ledger errors, goodput, participation, times to come back, loss against the same run without faults.

The harness stands in tools/chaos/; `atoll chaos` is the same with options. The full size strikes at a rate that is to be borne at a good pace; `--faults 500` strikes
so often, at thirty a minute at most, for the ledger's sake.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

from tools.bench.frame import Benchmark, Figure, parser_of, run_benchmark
from tools.chaos.harness import Plan, run_chaos
from tools.chaos.report import figures_of
from tools.output import STDERR
from tools.progress import progress_report

_MOST_A_MINUTE = 30
FULL = Plan(minutes=4.5, faults_per_hour=125, islands=4, sync_every=48)
QUICK = Plan(
    minutes=0.15,
    faults_per_hour=2_000,
    islands=2,
    kinds=("kill", "stop", "partition", "syncer", "machine"),
    step_s=0.05,
    sync_every=16,
    num_fragments=2,
    num_documents=100,
)


def measure(quick: bool, *, faults: int | None = None) -> Mapping[str, Figure | str]:
    """One run without faults and one with them; `faults` is how many instead of the usual ones."""
    plan = QUICK if quick else FULL
    if faults is not None:
        minutes = max(plan.minutes, faults / _MOST_A_MINUTE)
        plan = dataclasses.replace(plan, minutes=minutes, faults_per_hour=faults / minutes * 60)
    with progress_report() as report:
        result = run_chaos(plan, report=report)
    for finding in result.findings:
        STDERR.print(f"  broken: {finding.invariant}: {finding.what}", markup=False)
    return figures_of(result)


BENCHMARK = Benchmark(
    name="chaos",
    question="Does a run keep its ledger, its state and its pace while its processes, its store, its disks and its clocks fail?",
    measure=measure,
    notes=(
        "Every island has a link of its own to an S3 server, which fails for it alone; processes are forked from one that has imported torch, so `startup_s` is "
        "to be added to `rejoin_s` where processes start anew. A step lasts as long as on an accelerator of its own, by sleeping.",
        "`goodput`: steps whose update is in the final global parameters, over the steps that the islands' time would have held at the rate of the run without faults, "
        "less the time that faults took however good the software is (a machine away, a process stopped, a slow step).",
    ),
)

if __name__ == "__main__":
    _parser = parser_of(BENCHMARK.name, BENCHMARK.question)
    _parser.add_argument("--faults", type=int, help="strike so many times, and as long as that takes")
    _faults = _parser.parse_known_args()[0].faults
    run_benchmark(dataclasses.replace(BENCHMARK, measure=partial(measure, faults=_faults)), parser=_parser)
