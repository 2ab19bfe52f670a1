"""The processes of a run: one island, or one that stands by for the syncer's role. Each starts anywhere with the store's address and the run's name."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from manifests.catalog import cache_root
from manifests.errors import AtollError
from manifests.store import Store
from trainer.engine import started_by_torchrun
from trainer.island import Emit, Island
from trainer.metrics import Metrics, find_logger
from trainer.run import Run, load_run
from trainer.syncer import Steward


def run_island(
    store: Store, run_name: str, island: int, *, emit: Emit, hosts_syncer: bool = True, logger: str = ""
) -> None:
    """Runs one island of a run until its last step; starts where the island was left. Several ranks (torchrun) are one island.

    Args:
        store: the store.
        run_name: the run.
        island: its number; one that the run wasn't planned for joins it.
        emit: told every step.
        hosts_syncer: whether this process takes the syncer's role where nobody holds it.
        logger: who else is told the metrics: "", "auto", "tensorboard", "trackio" or "wandb".

    Raises:
        AtollError: see Island.
    """
    run = load_run(store, run_name)
    if started_by_torchrun() and int(os.environ["RANK"]) > 0:
        from trainer.ranks import serve_rank

        serve_rank(run.config)
        return
    own = Island(run, island, emit=emit)
    metrics = _metrics(run, f"island-{island:04d}", own.incarnation, logger)
    own.metrics = metrics
    host = _Host(run, island, emit=emit, logger=logger) if hosts_syncer else None
    try:
        if host is not None:
            host.start()
        own.train()
        if host is not None and not own.is_leaving:
            host.see_out()
    finally:
        if host is not None:
            host.stop()
        metrics.close()


def run_syncer(store: Store, run_name: str, *, emit: Emit, logger: str = "") -> float | None:
    """Stands by for a run's syncer's role, and holds it whenever it's free, until the run is over.

    Returns:
        Holdout loss of the final global parameters, nats per token.
    """
    run = load_run(store, run_name)
    return Steward(run, emit=emit, name="syncer", metrics_of=_syncer_metrics(run, logger)).serve()


def leave_on_sigterm() -> None:
    """Has a SIGTERM end this process as an exit does, not as a death: the syncer's role is given back, and nobody waits for its lease to lapse."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class _Host(threading.Thread):
    """The syncer's role in an island's process, where nobody else holds it."""

    def __init__(self, run: Run, island: int, *, emit: Emit, logger: str) -> None:
        super().__init__(name="syncer", daemon=True)
        # Those who do nothing else come first, then the islands in their order.
        patience_s = run.config.lease_s * (1 + 0.1 * (island % 10))
        self._steward = Steward(
            run,
            emit=lambda status: emit({"role": "syncer", **status}),
            name=f"island {island}",
            patience_s=patience_s,
            metrics_of=_syncer_metrics(run, logger),
        )
        self.error: AtollError | None = None

    def run(self) -> None:
        """Stands by until the run is over."""
        try:
            self._steward.serve()
        except AtollError as e:
            self.error = e

    def see_out(self) -> None:
        """Waits for the end of the run if the role is held here, or by nobody."""
        while self.is_alive() and not self._steward.another_leads:
            self.join(0.2)
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Gives the role up."""
        self._steward.stopping.set()
        self.join()


def _metrics(run: Run, role: str, incarnation: int, logger: str) -> Metrics:
    folder = f"{run.folder}/metrics/{role}"
    loggers = find_logger(logger, project="atoll", run=run.name, role=role, folder=cache_root() / "logs")
    return Metrics(run.store, folder, role=role, incarnation=incarnation, loggers=[loggers] if loggers else [])


def _syncer_metrics(run: Run, logger: str) -> Callable[[int], Metrics]:
    return lambda term: _metrics(run, "syncer", term, logger)
