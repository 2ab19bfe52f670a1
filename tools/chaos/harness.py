"""A run under chaos from beginning to end: a store of its own, the same run without faults before it, the faults, what is checked and measured after.

The schedule, the faults, the processes, the checks and the measures stand in files of their own; here they're put together.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import Failure
from manifests.jobs import Report, report_nothing
from tools.bench.diloco_processes import call, warm_up
from tools.bench.diloco_runs import copy_store, make_store, prepare
from tools.bench.link import S3Server, serve_s3
from tools.chaos.crew import Crew
from tools.chaos.facts import Facts, Finding
from tools.chaos.faults import Faults, Network
from tools.chaos.history import History, Struck, history_of
from tools.chaos.schedule import DEFAULT_KINDS, GLOBAL, Fault, make_schedule
from tools.output import STDERR

_START_LIMIT_S = 180.0
HEALTHY, STRUCK = "healthy", "chaos"
"""The two runs, each with a store of its own, so that neither finds the other's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to be done."""

    minutes: float = 5.0
    """That faults strike for: as long as the steps would last without them."""
    faults_per_hour: float = 125.0
    islands: int = 4
    seed: int = 0
    kinds: Sequence[str] = DEFAULT_KINDS
    has_syncer: bool = True
    """Whether a process of its own stands by for the syncer's role, as the islands' processes do."""
    step_s: float = 0.1
    """How long an inner step lasts on an accelerator that nobody else has."""
    sync_every: int = 32
    num_fragments: int = 4
    batch_size: int = 4
    seq_len: int = 64
    num_documents: int = 600
    hidden_size: int = 32

    @property
    def steps(self) -> int:
        """Inner steps of an island."""
        cycles = max(1, round(self.minutes * 60 / self.step_s / self.sync_every))
        return cycles * self.sync_every

    @property
    def sync_period_s(self) -> float:
        """From one sync of a fragment to its next."""
        return self.sync_every * self.step_s

    @property
    def lease_s(self) -> float:
        """After which a silent syncer is taken for dead: well within a sync period."""
        return min(10.0, max(0.5, 0.3 * self.sync_period_s))

    def options(self) -> dict[str, Any]:
        """Of the run's configuration. The mixes are fixed ones, so that an island's data is the same with and
        without faults, to the token; a merge waits long, since islands that were away come back at any moment of a sync period."""
        model = {
            "model_type": "llama", "hidden_size": self.hidden_size, "intermediate_size": 3 * self.hidden_size, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
        }  # fmt: skip
        return {
            "num_islands": self.islands, "strategies": ("balanced", "aggressive", "conservative"), "model": model, "steps": self.steps,
            "sync_every": self.sync_every, "overlap_steps": self.sync_every, "num_fragments": self.num_fragments, "batch_size": self.batch_size, "seq_len": self.seq_len,
            "lr": 2e-3, "schedule": "cosine", "outer_lr": 1.0, "outer_momentum": 0.0, "max_repeats": 1_000_000, "holdout_sequences": 64,
            "lease_s": self.lease_s, "seed": self.seed, "gate_holdout": 0.02 if "poison" in self.kinds else 0.0,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came of it."""

    plan: Plan
    healthy: History
    struck: History
    facts: Facts
    """Of the run under chaos, as the store has them."""
    healthy_facts: Facts
    findings: Sequence[Finding]
    """Invariants that don't hold; empty: all do."""
    import_s: float
    """How long Python and torch take to start, which a fork doesn't."""


def run_chaos(plan: Plan, *, report: Report = report_nothing) -> Result:
    """Does all of it, in a store of its own that is gone afterwards.

    Raises:
        Failure: SeaweedFS is missing, or a run doesn't come to its end.
    """
    schedule = make_schedule(
        seed=plan.seed,
        minutes=plan.minutes,
        faults_per_hour=plan.faults_per_hour,
        kinds=plan.kinds,
        islands=plan.islands,
    )
    with tempfile.TemporaryDirectory(prefix="atoll-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "s3").mkdir()
        with serve_s3(folder / "s3") as server:
            began = time.monotonic()
            warm_up()
            call(_import_all, environment={})
            import_s = time.monotonic() - began
            near = {**server.environment, "ATOLL_CACHE": str(folder / "own-cache")}
            local_uri = make_store_apart(folder, plan)
            stores = {run: f"s3://{server.bucket}/{run}" for run in (HEALTHY, STRUCK)}
            for run, store_uri in stores.items():
                call(copy_store, local_uri, store_uri, environment=near)
                call(prepare, store_uri, run, plan.options(), environment=near)
            healthy = _one_run(plan, HEALTHY, [], server, stores[HEALTHY], folder, near, report)
            healthy_facts, healthy_findings, stream = call(_look, stores[HEALTHY], HEALTHY, None, environment=near)
            struck = _one_run(plan, STRUCK, schedule, server, stores[STRUCK], folder, near, report)
            facts, findings, _ = call(_look, stores[STRUCK], STRUCK, stream, environment=near)
    return Result(
        plan=plan,
        healthy=healthy,
        struck=struck,
        facts=facts,
        healthy_facts=healthy_facts,
        findings=[*healthy_findings, *findings],
        import_s=import_s,
    )


def make_store_apart(folder: Path, plan: Plan) -> str:
    """A store on the local disk, made in a process of its own."""
    return str(call(_make_store, str(folder), plan.num_documents, environment={}))


def _make_store(folder: str, num_documents: int) -> str:
    return make_store(Path(folder), num_documents=num_documents, vocab_size=512)


def _look(*arguments: Any) -> tuple[Facts, list[Finding], dict[tuple[int, int], str]]:
    from tools.chaos.checks import look  # torch

    return look(*arguments)


def _import_all() -> None:
    import trainer.roles  # noqa: F401  (what a role's process needs; the process that all are forked from has it from then on)


def _one_run(
    plan: Plan,
    run: str,
    schedule: Sequence[Fault],
    server: S3Server,
    store_uri: str,
    folder: Path,
    near: Mapping[str, str],
    report: Report,
) -> History:
    """One run to its end, with faults."""
    roles = range(GLOBAL if plan.has_syncer else 0, plan.islands)
    with Network(server, list(roles)) as network, _crew(plan, run, store_uri, folder, network) as crew:
        faults = Faults(crew, network, store_uri=store_uri, run=run, environment=near, seed=plan.seed)
        deadline = time.monotonic() + _START_LIMIT_S
        while not all(role.lives and role.lives[-1].steps for role in crew.islands):
            crew.tend()
            if time.monotonic() > deadline:
                raise Failure(f"run {run}: not all islands train after {_START_LIMIT_S:.0f} s; {_where(crew)}")
        began_s = time.monotonic()
        struck = _strike(plan, run, schedule, crew, faults, began_s, report)
        faults.settle()
        return history_of(crew, struck, began_s=began_s, period_s=plan.sync_period_s, planted=faults.planted)


def _strike(
    plan: Plan, run: str, schedule: Sequence[Fault], crew: Crew, faults: Faults, began_s: float, report: Report
) -> list[Struck]:
    """Waits for the run's end, and does the faults of the schedule meanwhile, each at its time."""
    limit_s = 3 * plan.minutes * 60 + 300
    waiting, going, struck = list(schedule), list[tuple[float, Fault, int]](), list[Struck]()
    told, total = 0, plan.islands * plan.steps
    while not crew.is_over:
        crew.tend()
        now_s = time.monotonic() - began_s
        for ends_s, fault, target in [item for item in going if item[0] <= now_s]:
            faults.end(fault, target)
            going.remove((ends_s, fault, target))
        while waiting and waiting[0].at_s <= now_s:
            fault = waiting.pop(0)
            at_s = time.monotonic()
            victim = faults.begin(fault)
            if victim is not None:
                going.append((now_s + fault.seconds, fault, victim))
                struck.append(Struck(fault=fault, target=victim, at_s=at_s))
        done = sum(_last_step(role.lives) for role in crew.islands)
        if done != told:
            report(f"steps, {run} run", done, total)
            told = done
        if now_s > limit_s:
            raise Failure(f"run {run} doesn't come to its end in {limit_s:.0f} s; {_where(crew)}")
    return struck


@contextmanager
def _crew(plan: Plan, run: str, store_uri: str, folder: Path, network: Network) -> Any:
    with Crew(
        store_uri,
        run,
        folder / run,
        islands=plan.islands,
        step_s=plan.step_s,
        has_syncer=plan.has_syncer,
        environments=network.environments,
    ) as crew:
        yield crew


def _last_step(lives: Sequence[Any]) -> int:
    return max((step for life in lives for _, step in life.steps[-1:]), default=0)


def _where(crew: Crew) -> str:
    told = []
    for role in crew.roles.values():
        how = [life.how for life in role.lives if life.how not in ("", "killed", "finished")]
        told.append(
            f"{role.name}: step {_last_step(role.lives)}, {len(role.lives)} lives{', last of: ' + how[-1] if how else ''}"
        )
    STDERR.print("  " + "; ".join(told), markup=False)
    return "; ".join(told)
