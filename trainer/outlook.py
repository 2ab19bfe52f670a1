"""What the four remedies cost, and what holdout loss they give: measured where that takes no training, else predicted, and said to be.

Measured: of the newest state (continue), of the damped one, of the last clean one (restore). Predicted: of a replay, and of all of them some rounds later, from the run's own
course: a line through its holdout losses over the logarithm of the tokens, for a replay through those before the documents came. A prediction from few points is a guess.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.store import Store
from trainer.remedies import REMEDIES, cut_of, find_damping, holdout_measure, state_at, steps_of
from trainer.rollback import Plan
from trainer.run import Run, load_run
from trainer.tape import Anatomy, first_state

MOST_PARAMETERS = 100_000_000
"""Parameters up to which a plan is measured unless told not to."""
_FEWEST_POINTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """Holdout loss = level + slope · ln(tokens)."""

    level: float
    slope: float

    def at(self, tokens: float) -> float:
        """The loss after so many tokens."""
        return self.level + self.slope * math.log(max(tokens, 1.0))


def fit_trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """The least-squares line through the later half of the points (tokens, loss), at least three; None: there are fewer."""
    known = [(math.log(tokens), loss) for tokens, loss in points if tokens > 0 and math.isfinite(loss)]
    known = known[-max(_FEWEST_POINTS, len(known) // 2) :]
    if len(known) < _FEWEST_POINTS or len({x for x, _ in known}) < 2:
        return None
    line = statistics.linear_regression([x for x, _ in known], [y for _, y in known])
    return Trend(level=line.intercept, slope=line.slope)


def outlook_table(store: Store, plan: Plan, *, rounds: int, measure: bool | None) -> pa.Table:
    """A row for each remedy.

    Args:
        store: the store.
        plan: what the documents touched.
        rounds: how far ahead a loss is predicted.
        measure: whether holdout losses are measured here; None: where the model is small.

    Returns:
        plan, redo_steps (over all islands), device_s (those steps by the islands' own times; null where none was told), store_bytes (snapshot, and the checkpoints that
        the redone steps had made), steps_left (of an island, after the redone ones), holdout_now, how (measured, predicted, or as recorded), holdout_later (predicted), and notes.

    Raises:
        Failure: what is to be measured is gone or damaged.
    """
    catalog = Catalog(store)
    run = load_run(store, plan.run, catalog=catalog)
    anatomy = first_state(run)[1]
    size = sum(math.prod(shape) for shape in anatomy.shapes.values())
    if measure is None:
        measure = size <= MOST_PARAMETERS
    losses = _Losses(run, catalog, anatomy, plan, measure=measure)
    times = {row["island"]: row["step_time_s"] for row in catalog.rows(_STEP_TIMES, [run.name])}
    rows = []
    for remedy in REMEDIES:
        cut = cut_of(plan, remedy)
        redone = [start for start in cut.starts if remedy != "restore"]
        steps = steps_of(run.config, cut, remedy)
        seconds = [start.redo_steps * times[start.island] for start in redone if start.island in times]
        whole = len(seconds) == len(redone) or (redone and not any(start.redo_steps for start in redone))
        now, how, note = losses.now(remedy)
        ends = [start.step + (start.redo_steps if remedy != "restore" else 0) for start in cut.starts]
        rows.append(
            {
                "plan": remedy,
                "redo_steps": sum(start.redo_steps for start in redone),
                "device_s": round(sum(seconds), 3) if whole else None,
                "store_bytes": 3 * 4 * size + (_checkpoint_bytes(catalog, run, plan) if remedy == "replay" else 0),
                "steps_left": max(0, steps - min(ends, default=0)),
                "holdout_now": now,
                "how": how,
                "holdout_later": losses.later(remedy, now, rounds),
                "note": note,
            }
        )
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


_SCHEMA = pa.schema(
    [
        ("plan", pa.string()),
        ("redo_steps", pa.int64()),
        ("device_s", pa.float64()),
        ("store_bytes", pa.int64()),
        ("steps_left", pa.int64()),
        ("holdout_now", pa.float64()),
        ("how", pa.string()),
        ("holdout_later", pa.float64()),
        ("note", pa.string()),
    ]
)
_STEP_TIMES = "SELECT island, median(step_time_s) AS step_time_s FROM feedback WHERE run = ? GROUP BY island"
_CHECKPOINT_BYTES = """
SELECT coalesce(sum(size_bytes), 0)::BIGINT AS n FROM checkpoints WHERE run = ? AND island = ? AND step > ?
"""


def _checkpoint_bytes(catalog: Catalog, run: Run, plan: Plan) -> int:
    return sum(
        int(catalog.rows(_CHECKPOINT_BYTES, [run.name, start.island, start.step])[0]["n"])
        for start in plan.clean.starts
    )


class _Losses:
    """Holdout losses of one plan's remedies."""

    def __init__(self, run: Run, catalog: Catalog, anatomy: Anatomy, plan: Plan, *, measure: bool) -> None:
        self._run, self._plan, self._measure = run, plan, measure
        rows = catalog.ask("rollback_losses", run=run.name).to_pylist()
        points = [(row["tokens"], row["holdout_loss"]) for row in rows]
        self._recorded = {row["merge"]: row["holdout_loss"] for row in rows}
        first = min((c.merge for c in plan.touched.contributions), default=plan.newest.merge + 1)
        self._trend = fit_trend(points)
        self._clean_trend = fit_trend([p for p, row in zip(points, rows, strict=True) if row["merge"] < first])
        self._tokens = rows[-1]["tokens"] if rows else 0
        self._kept_tokens = max((row["tokens"] for row in rows if row["merge"] <= plan.merge), default=0)
        self._catalog, self._anatomy = catalog, anatomy

    def now(self, remedy: str) -> tuple[float | None, str, str]:
        """Right after it, how that is known, and what else there is to say."""
        if remedy == "replay":
            predicted = self._clean_trend.at(self._tokens) if self._clean_trend else None
            note = "bit for bit as without them" if self._plan.is_exact else "islands restart from different points"
            return predicted, "predicted" if predicted is not None else "unknown", note
        merge = cut_of(self._plan, remedy).merge
        if not self._measure:
            recorded = self._recorded.get(merge) if remedy != "damp" else None
            return recorded, "recorded" if recorded is not None else "unknown", ""
        if remedy == "damp":
            damping, _ = find_damping(self._run, self._catalog, self._anatomy, self._plan)
            return damping.after, "measured", f"{damping.direction} at {damping.factor:.3g}"
        loss_of = holdout_measure(self._run, self._catalog)
        note = "its lost steps count as taken" if remedy == "restore" else ""
        return loss_of(state_at(self._run, self._anatomy, merge).parameters()), "measured", note

    def later(self, remedy: str, now: float | None, rounds: int) -> float | None:
        """So many rounds after that, by the run's own course."""
        trend = self._clean_trend if remedy in ("replay", "restore") else self._trend
        if now is None or trend is None:
            return None
        config = self._run.config
        more = rounds * config.round_steps * config.batch_size * config.seq_len * config.num_islands
        before = self._kept_tokens if remedy == "restore" else self._tokens
        return now + trend.at(before + more) - trend.at(before)
