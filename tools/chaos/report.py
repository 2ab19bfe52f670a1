"""What a run under chaos came to, as named figures: for the benchmark, and as the table that `atoll chaos` prints."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from tools.bench.frame import Figure
from tools.chaos.harness import Result
from tools.chaos.measures import measure, participation

TARGETS = {
    "ledger_errors": "0",
    "broken_invariants": "0",
    "goodput": "≥ 0.97",
    "participation": "≥ 0.95",
    "takeover_periods_p50": "≤ 1",
    "loss_vs_fault_free": "within ± 0.01",
}
"""What is aimed at."""


def figures_of(result: Result) -> dict[str, Figure]:
    """All figures of a result."""
    plan, facts, struck = result.plan, result.facts, result.struck
    found = measure(struck, result.healthy, facts, result.healthy_facts)
    ledger = [one for one in result.findings if one.invariant in ("ledger", "stream")]
    figures: dict[str, Figure] = {}

    def add(name: str, values: Sequence[float], unit: str, meaning: str) -> None:
        if values:
            target = f"; target {TARGETS[name]}" if name in TARGETS else ""
            figures[name] = Figure(values=[float(value) for value in values], unit=unit, meaning=meaning + target)

    def add_times(name: str, values: Sequence[float], meaning: str) -> None:
        add(f"{name}_p50", [statistics.median(values)] if values else [], "s", f"{meaning}; median of {len(values)}")
        add(f"{name}_max", [max(values)] if values else [], "s", "likewise, longest")

    add("faults", [len(struck.struck)], "faults", f"{_kinds(result)}; {plan.islands} islands, seed {plan.seed}")
    add(
        "ledger_errors",
        [len(ledger)],
        "findings",
        "tokens that aren't in the ledger exactly once, or in another order than without faults",
    )
    add(
        "broken_invariants",
        [len(result.findings)],
        "findings",
        "of the ledger, the global state, the tape, orphans and tables",
    )
    add("goodput", [found.goodput], "share", "useful steps over healthy capacity (tools/chaos/measures.py)")
    add("participation", [found.participation], "share", "of the live islands in a merge, mean over the merges")
    add("participation_healthy", [statistics.fmean(participation(result.healthy))], "share", "likewise, without faults")
    add("merged_share", [found.merged_share], "share", "of all steps whose update is in the final parameters")
    add(
        "loss_vs_fault_free", [found.loss_vs_fault_free], "share", "final holdout loss over that without faults, less 1"
    )
    add_times("rejoin_s", found.rejoin_s, "from a killed island's machine being back to its first step")
    add_times("caught_up_s", found.caught_up_s, "… to its first step that it hadn't taken before")
    add_times("merged_again_s", found.merged_again_s, "… to the first merge that it's in")
    add(
        "startup_s",
        [result.import_s],
        "s",
        "that Python and torch take to start, which a forked process doesn't; to be added where processes start anew",
    )
    add_times("detect_s", found.detect_s, "from a kill to when it was seen")
    add_times("first_merge_s", found.first_merge_s, "from a fault to the next merge of anyone")
    periods = [time_s / plan.sync_period_s for time_s in found.takeover_s]
    add(
        "takeover_periods_p50",
        [statistics.median(periods)] if periods else [],
        "sync periods",
        f"of {plan.sync_period_s:.2g} s, from the syncer's death to another's taking the role; median of {len(periods)}",
    )
    add("takeover_periods_max", [max(periods)] if periods else [], "sync periods", "likewise, longest")
    add("survivors_stall_s", [found.stall_s], "s", "longest time between two steps of a process that no fault struck")
    add("survivors_stall_healthy_s", [found.stall_healthy_s], "s", "likewise, without faults")
    add(
        "unforced_deaths",
        [len(struck.deaths)],
        "processes",
        "that ended with an error and were started again, most for a store that they couldn't reach",
    )
    add("refused", [facts.refused], "objects", "damaged outer gradients that the syncer refused")
    add("dropped", [len(facts.dropped)], "gradients", "outer gradients that came too late, or that the gate kept out")
    add("leftovers", [facts.leftovers], "objects", "of killed processes, that nobody may delete")
    add("merges", [facts.merges], "merges", f"{result.healthy_facts.merges} without faults")
    return figures  # fmt: skip


def _kinds(result: Result) -> str:
    counts = Counter(one.fault.kind for one in result.struck.struck)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
