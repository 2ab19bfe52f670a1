"""The live view of a run on this machine: a table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.live import Live
from rich.table import Table

from manifests.schemas import TIERS
from tools.output import STDERR
from trainer.config import RunConfig
from trainer.run import GLOBAL

_LINE_EVERY_S = 10.0


class LiveView:
    """Takes the roles' statuses (trainer/launch.py) and shows where each island is."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._islands: dict[int, dict[str, Any]] = {
            i: {"state": "starting", "strategy": "" if config.group_by else config.strategy_of(i)}
            for i in range(config.num_islands)
        }
        self._merge = 0
        self._holdout_loss: float | None = None
        self._live = Live(self._table(), console=STDERR, refresh_per_second=4) if STDERR.is_terminal else None
        self._printed_at = time.monotonic()

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
        else:
            self._print_line()

    def __call__(self, status: dict[str, Any]) -> None:
        """Takes one status."""
        island = status["island"]
        if island != GLOBAL:
            known = self._islands.setdefault(island, {"state": "starting"})
            if status["state"] == "died":
                STDERR.print(f"island {island}: {status['how']} at step {known.get('step', 0)}; it is started again")
            elif known["state"] == "died":
                STDERR.print(f"island {island}: back at step {status.get('step', 0)}")
            known.update(status)
        else:
            self._merge = status.get("merge", self._merge)
            self._holdout_loss = status.get("holdout_loss", self._holdout_loss)
            if status["state"] == "switched":
                STDERR.print(
                    f"island {status['of']}: {status['after']} in place of {status['before']}: {status['why']}",
                    markup=False,
                )
            if status["state"] == "died":
                STDERR.print(f"syncer: {status['how']}; it is started again")
        if self._live:
            self._live.update(self._table())
        elif time.monotonic() - self._printed_at >= _LINE_EVERY_S:
            self._print_line()

    def _table(self) -> Table:
        holdout = f", global holdout loss {self._holdout_loss:.3f}" if self._holdout_loss is not None else ""
        table = Table(title=f"run {self._config.run}: {self._merge} merges{holdout}", title_justify="left")
        mixed = "mix" if self._config.group_by else f"mix {'/'.join(TIERS)}"
        for name in ("island", "state", "strategy", mixed, "step", "loss", "tokens/s"):
            table.add_column(name, justify="left" if name in ("state", "strategy", mixed) else "right")
        for island, status in self._islands.items():
            mix = self._mix(status["mix"]) if "mix" in status else ""
            loss = f"{status['loss']:.3f}" if "loss" in status else ""
            rate = f"{status['tokens_per_s']:,.0f}" if "tokens_per_s" in status else ""
            step = f"{status.get('step', 0)}/{self._config.steps}"
            table.add_row(str(island), status["state"], status.get("strategy", ""), mix, step, loss, rate)
        return table

    def _mix(self, weights: dict[str, float]) -> str:
        if self._config.group_by:
            return " ".join(f"{group} {weight:.2f}" for group, weight in weights.items() if weight > 0)
        return "/".join(f"{weights[tier]:.2f}" for tier in TIERS)

    def _print_line(self) -> None:
        self._printed_at = time.monotonic()
        parts = []
        for island, status in self._islands.items():
            loss = f" loss {status['loss']:.3f}" if "loss" in status else ""
            state = "" if status["state"] == "training" else f" {status['state']}"
            parts.append(f"island {island}{state} step {status.get('step', 0)}/{self._config.steps}{loss}")
        holdout = f" | global holdout loss {self._holdout_loss:.3f}" if self._holdout_loss is not None else ""
        STDERR.print("  " + "; ".join(parts) + f" | {self._merge} merges{holdout}")
