"""The live view of a run from any machine that reaches its store: what the roles say of themselves (trainer/metrics.py), and what the tables have.

Everything shown is in the store, so a view may begin, end and begin again at any time. tools/live.py shows a run whose processes are this machine's own.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from manifests.catalog import Catalog
from manifests.errors import AtollError, Failure, UserError
from manifests.schemas import TIERS
from manifests.store import Store
from trainer.checkpoints import messages_told
from trainer.lease import Lease
from trainer.members import members
from trainer.metrics import read_metrics
from trainer.privacy import feedback_budget
from trainer.run import GLOBAL, load_run

WINDOW = 50
"""Merges that rates and shares are of."""
_CATALOG_EVERY_S = 5.0
_LINE_EVERY_S = 10.0
_NEWEST = 100
"""Objects of each role that a view begins with: enough for a few minutes of an island and for WINDOW merges."""
_SILENT_S = 60.0
"""An island that was not heard of for so long, and for so many of its steps, is called silent."""
_SILENT_STEPS = 10
_ROLE = re.compile(r"island-(\d+)")
_WITHOUT_RATE = ("finished", "left", "died", "silent", "expected")

_CHECKPOINTS = """
SELECT
    island,
    arg_max({
        'incarnation': incarnation, 'round': round, 'step': step, 'loss': loss, 'holdout_loss': holdout_loss, 'mixture': mixture, 'written_at': written_at
    }, written_at) AS newest
FROM checkpoints
WHERE run = ?
GROUP BY island
"""
_MERGES = (
    f"SELECT detail, written_at FROM events WHERE run = ? AND kind = 'merge' ORDER BY written_at DESC LIMIT {WINDOW}"
)
_EVENTS = """
SELECT kind, island, count(*) AS events, max(written_at) AS written_at, arg_max(detail, written_at) AS detail
FROM events
WHERE run = ? AND kind IN ('island_joined', 'island_died', 'refused', 'quarantined', 'released', 'finished')
GROUP BY kind, island
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class IslandView:
    """One island, as it is known."""

    island: int
    state: str
    """expected, starting, training, waiting, brought_back, silent, died, left or finished."""
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    strategy: str
    mix: Mapping[str, float]
    merges_behind: int | None
    """Merges that the island hasn't applied yet."""
    bytes_up: int | None
    bytes_down: int | None
    up_bps: float | None
    """Bytes a second, of late."""
    down_bps: float | None
    seen_at: float | None
    """Last sign of life, seconds since the epoch."""
    incarnations: int
    """Times that it was started."""
    epsilon_spent: float | None
    """What its feedback has cost of its privacy budget. None: it has none, or the accountant isn't installed here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A run, as it is known."""

    run: str
    has_finished: bool
    islands: list[IslandView]
    syncer: str | None
    """Who holds the role."""
    syncer_seen_at: float | None
    """Last sign of life of its holder, by the store's clock."""
    merges: int
    merged_at: float | None
    merges_per_minute: float | None
    participation: float | None
    """Mean share of the live islands in a merge."""
    kept_out: int
    """Outer gradients that the last merges left out."""
    refused: int
    """Objects of outer gradients that couldn't be read."""
    quarantined: list[int]
    """Islands that are in quarantine."""
    holdout_loss: float | None
    """Of the global parameters, nats per token."""
    holdout_at: float | None
    unreadable: int
    """Lines of the metrics that couldn't be read."""
    feedback_epsilon: float | None
    """Privacy budget of each island's feedback; None: none was asked for."""
    feedback_delta: float | None
    """… at this delta."""


@dataclass(kw_only=True, slots=True)
class _Heard:
    """What an incarnation of an island has said."""

    incarnation: int
    at: float = 0.0
    steps: dict[str, Any] = field(default_factory=dict)
    round: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    link: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=20))

    def take(self, line: Mapping[str, Any]) -> None:
        """Takes one line."""
        self.at = max(self.at, line["time"])
        if line["kind"] == "steps":
            self.steps = dict(line)
        elif line["kind"] == "state":
            self.state = dict(line)
        elif line["kind"] == "round":
            self.round = dict(line)
            up, down = _number(line, "bytes_up"), _number(line, "bytes_down")
            if up is not None and down is not None:
                self.link.append((line["time"], int(up), int(down)))

    def rates_bps(self) -> tuple[float | None, float | None]:
        """Bytes a second sent and received, of late."""
        if len(self.link) < 2 or self.link[-1][0] <= self.link[0][0]:
            return None, None
        (began, up_0, down_0), (ended, up_1, down_1) = self.link[0], self.link[-1]
        return (up_1 - up_0) / (ended - began), (down_1 - down_0) / (ended - began)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Merge:
    """One merge, from its event or its line."""

    at: float
    islands: int
    live: int | None
    kept_out: int = 0


class Watcher:
    """Reads what is new of a run, look by look."""

    def __init__(
        self,
        store: Store,
        run_name: str,
        *,
        catalog_every_s: float = _CATALOG_EVERY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            store: the store.
            run_name: name of the run.
            catalog_every_s: how often the tables are asked, seconds.
            clock: seconds since the epoch.

        Raises:
            UserError: the store has no such run.
        """
        self.run = load_run(store, run_name)
        try:
            self._budget = feedback_budget(self.run.config)
        except UserError:
            self._budget = None  # the run can be looked at without the accountant
        self._clock = clock
        self._catalog_every_s = catalog_every_s
        self._asked_at: float | None = None
        self._cursor: dict[str, str] | None = None
        self._heard: dict[int, _Heard] = {}
        self._merges: dict[int, _Merge] = {}
        self._holdout: tuple[float, float | None] = (0.0, None)
        self._quarantined: list[int] | None = None
        self._unreadable = 0
        self._members = members(self.run)
        self._holder: str | None = None
        self._holder_at: float | None = None
        self._checkpoints: dict[int, dict[str, Any]] = {}
        self._events: dict[tuple[str, int | None], dict[str, Any]] = {}

    def look(self) -> View:
        """The run as it is now.

        Raises:
            AtollError: the store can't be read; the next look goes on from there.
        """
        if self._asked_at is None or time.monotonic() - self._asked_at >= self._catalog_every_s:
            self._ask()
            self._asked_at = time.monotonic()
        newest = _NEWEST if self._cursor is None else None
        lines, self._cursor = read_metrics(self.run.store, self.run.name, after=self._cursor, newest=newest)
        for line in lines:
            self._take(line)
        return self._view()

    def _ask(self) -> None:
        store, name = self.run.store, self.run.name
        catalog = Catalog(store, tables=("checkpoints", "events"))
        self._checkpoints = {row["island"]: row["newest"] for row in catalog.rows(_CHECKPOINTS, [name])}
        self._events = {(row["kind"], row["island"]): row for row in catalog.rows(_EVENTS, [name])}
        for row in catalog.rows(_MERGES, [name]):
            said = json.loads(row["detail"])
            contributions = said.get("contributions", [])
            self._merges[said["merge"]] = _Merge(
                at=row["written_at"].timestamp(),
                islands=len({c["island"] for c in contributions}),
                live=said.get("live"),
                kept_out=len(said.get("dropped", [])),
            )
        at_checkpoint = self._checkpoints.get(GLOBAL)
        if at_checkpoint is not None and at_checkpoint["holdout_loss"] is not None:
            self._take_holdout(at_checkpoint["written_at"].timestamp(), at_checkpoint["holdout_loss"])
        self._members = members(self.run)
        lease = self.run.lease_folder
        self._holder = Lease(store, lease, holder="", lapse_s=self.run.config.lease_s).holder()
        self._holder_at = max((info.modified_at for info in store.list(lease)), default=None)

    def _take(self, line: Mapping[str, Any]) -> None:
        kind, role = line["kind"], _ROLE.fullmatch(line["role"])
        if kind == "unreadable":
            self._unreadable += line["lines"]
        elif role is not None:
            island = int(role[1])
            heard = self._heard.get(island)
            if heard is None or heard.incarnation < line["incarnation"]:
                heard = self._heard[island] = _Heard(incarnation=line["incarnation"])
            if heard.incarnation == line["incarnation"]:
                heard.take(line)
        elif kind == "merge":
            merge = _number(line, "merge")
            if merge is not None:
                live = _number(line, "live")
                self._merges.setdefault(
                    int(merge),
                    _Merge(
                        at=line["time"],
                        islands=len(line.get("islands", [])),
                        live=int(live) if live is not None else None,
                    ),
                )
            if isinstance(line.get("quarantined"), list):
                self._quarantined = list(line["quarantined"])
        elif kind == "checkpoint":
            self._take_holdout(line["time"], _number(line, "holdout_loss"))

    def _take_holdout(self, at: float, loss: float | None) -> None:
        if loss is not None and at >= self._holdout[0]:
            self._holdout = (at, loss)

    def _view(self) -> View:
        finished = self._events.get(("finished", None))
        if finished is not None:
            self._take_holdout(finished["written_at"].timestamp(), json.loads(finished["detail"]).get("holdout_loss"))
        merges = max(self._merges, default=0)
        numbers = {*self._members, *self._heard, *(island for island in self._checkpoints if island != GLOBAL)}
        islands = [self._island(island, merges) for island in sorted(numbers)]
        self._merges = dict(sorted(self._merges.items())[-WINDOW:])
        last = list(self._merges.values())
        shares = [merge.islands / max(merge.live or len(islands), merge.islands, 1) for merge in last]
        took_s = last[-1].at - last[0].at if last else 0.0
        holdout_at, holdout_loss = self._holdout
        config = self.run.config
        return View(
            run=self.run.name,
            has_finished=finished is not None,
            islands=islands,
            syncer=self._holder,
            syncer_seen_at=self._holder_at if self._holder is not None else None,
            merges=merges,
            merged_at=last[-1].at if last else None,
            merges_per_minute=60 * (len(last) - 1) / took_s if took_s > 0 else None,
            participation=sum(shares) / len(shares) if shares else None,
            kept_out=sum(merge.kept_out for merge in last),
            refused=sum(row["events"] for (kind, _), row in self._events.items() if kind == "refused"),
            quarantined=self._quarantined if self._quarantined is not None else self._quarantined_by_events(),
            holdout_loss=holdout_loss,
            holdout_at=holdout_at if holdout_loss is not None else None,
            unreadable=self._unreadable,
            feedback_epsilon=config.feedback_epsilon or None,
            feedback_delta=config.feedback_delta if config.feedback_epsilon else None,
        )

    def _quarantined_by_events(self) -> list[int]:
        return sorted(
            island
            for kind, island in self._events
            if kind == "quarantined"
            and island is not None
            and self._event_at("released", island) < self._event_at(kind, island)
        )

    def _event_at(self, kind: str, island: int) -> float:
        event = self._events.get((kind, island))
        return event["written_at"].timestamp() if event is not None else 0.0

    def _island(self, island: int, merges: int) -> IslandView:
        config = self.run.config
        heard = self._heard.get(island) or _Heard(incarnation=-1)
        checkpoint = self._checkpoints.get(island)
        recorded_at = checkpoint["written_at"].timestamp() if checkpoint is not None else 0.0
        step, loss = _number(heard.steps, "last_step"), _number(heard.steps, "loss")
        if "loss" in heard.steps.get("not_finite", []):
            loss = float("nan")
        if checkpoint is not None and recorded_at > heard.steps.get("time", 0.0):
            step, loss = checkpoint["step"], checkpoint["loss"]
        mixture = json.loads(checkpoint["mixture"]) if checkpoint is not None else {}
        strategy = "" if config.group_by else config.strategy_of(island)
        applied = _number(heard.round, "merge")
        seen_at = max(heard.at, recorded_at, self._event_at("island_joined", island)) or None
        up_bps, down_bps = heard.rates_bps()
        known = self._members.get(island)
        joined = self._events.get(("island_joined", island))
        return IslandView(
            island=island,
            state=self._state(island, heard, seen_at, has_step=bool(step)),
            step=int(step or 0),
            steps=config.steps,
            loss=loss,
            tokens_per_s=_number(heard.steps, "tokens_per_s"),
            strategy=str(heard.round.get("strategy") or mixture.get("strategy") or strategy),
            mix=dict(heard.round.get("mix") or mixture.get("weights") or {}),
            merges_behind=max(0, merges - int(applied)) if applied is not None else None,
            bytes_up=heard.link[-1][1] if heard.link else None,
            bytes_down=heard.link[-1][2] if heard.link else None,
            up_bps=up_bps,
            down_bps=down_bps,
            seen_at=seen_at,
            incarnations=max(
                known.incarnations if known is not None else 0,
                heard.incarnation + 1,
                checkpoint["incarnation"] + 1 if checkpoint is not None else 0,
                joined["events"] if joined is not None else 0,
            ),
            # A message leaves once the round that it closes is on record.
            epsilon_spent=self._budget.spent(messages_told(self.run, checkpoint["round"] if checkpoint else 0))
            if self._budget is not None
            else None,
        )

    def _state(self, island: int, heard: _Heard, seen_at: float | None, *, has_step: bool) -> str:
        known = self._members.get(island)
        said = heard.state.get("state")
        if (known is not None and known.finished) or said == "finished":
            return "finished"
        if (known is not None and known.left) or said == "left":
            return "left"
        if seen_at is None:
            return "starting" if known is not None and known.incarnations else "expected"
        if self._event_at("island_died", island) > seen_at:
            return "died"
        step_time_s = _number(heard.steps, "step_time_s") or 0.0
        if self._clock() - seen_at > max(_SILENT_S, _SILENT_STEPS * step_time_s):
            return "silent"
        if said in ("waiting", "brought_back") and heard.state["time"] >= heard.steps.get("time", 0.0):
            return str(said)
        return "training" if has_step else "starting"


def _number(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# Showing.


def watch(store: Store, run_name: str, *, every_s: float, once: bool, out: Console, as_json: bool = False) -> None:
    """Shows a run until it has finished or the user has seen enough (Ctrl-C).

    Args:
        store: the store.
        run_name: name of the run.
        every_s: how often it's looked at, seconds.
        once: look once, show that, and end.
        out: where it's shown: a table that moves on a terminal, a line now and then elsewhere.
        as_json: a JSON document for each look instead.

    Raises:
        UserError: the store has no such run.
        Failure: the first look failed. Later ones are shown as such, and tried again.
    """
    with contextlib.suppress(KeyboardInterrupt):
        watcher = Watcher(store, run_name)
        if once:
            view = watcher.look()
            if as_json:
                _print_json(view, out)
            else:
                out.print(table(view, time.time()))
            return
        show = _Json(out) if as_json else _Table(out) if out.is_terminal else _Lines(out)
        looker = _Looker(watcher, every_s)
        looker.start()
        with show:
            while True:
                is_over = looker.is_over  # asked before: what comes with the end is shown
                if looker.view is not None:
                    show(looker.view, looker.error)
                if is_over:
                    break
                looker.news.wait(1.0)
                looker.news.clear()
        if looker.failure is not None:
            raise looker.failure


class _Looker(threading.Thread):
    """Looks now and then: a store that doesn't answer holds up this thread, and neither the picture nor Ctrl-C."""

    def __init__(self, watcher: Watcher, every_s: float) -> None:
        super().__init__(name="looker", daemon=True)
        self._watcher, self._every_s = watcher, every_s
        self.news = threading.Event()
        self.view: View | None = None
        self.error: AtollError | None = None
        """What the last look failed with."""
        self.failure: Exception | None = None
        self.is_over = False

    def run(self) -> None:
        """Looks until the run has finished."""
        try:
            while self.view is None or not self.view.has_finished:
                try:
                    self.view, self.error = self._watcher.look(), None
                except Failure as e:
                    if self.view is None:
                        raise
                    self.error = e
                self.news.set()
                if not self.view.has_finished:
                    time.sleep(self._every_s)
        except Exception as e:  # raised where it's waited for
            self.failure = e
        finally:
            self.is_over = True
            self.news.set()


class _Table:
    """A table that moves."""

    def __init__(self, out: Console) -> None:
        self._live = Live(console=out, auto_refresh=False)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, view: View, error: AtollError | None) -> None:
        self._live.update(table(view, time.time(), error), refresh=True)


class _Lines:
    """A line now and then, and one at the end."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._printed_at: float | None = None
        self._printed: View | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, view: View, error: AtollError | None) -> None:
        due = self._printed_at is None or time.monotonic() - self._printed_at >= _LINE_EVERY_S
        if due or (view.has_finished and view is not self._printed):
            self._printed_at, self._printed = time.monotonic(), view
            self._out.print(Text(line(view, time.time(), error)), soft_wrap=True)


class _Json:
    """A document for each look."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._printed: View | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, view: View, error: AtollError | None) -> None:
        if view is not self._printed:
            self._printed = view
            _print_json(view, self._out)


def _print_json(view: View, out: Console) -> None:
    print(json.dumps(document(view, time.time()), ensure_ascii=False), file=out.file, flush=True)


def document(view: View, now: float) -> dict[str, Any]:
    """The view as JSON has it; times are how long ago, in seconds."""
    found = _with_ages(asdict(view), now)
    found["islands"] = [_with_ages(island, now) for island in found["islands"]]
    return {"time": round(now, 3), **found}


def _with_ages(values: Mapping[str, Any], now: float) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if name.endswith("_at"):
            found[f"{name.removesuffix('_at')}_s_ago"] = round(max(0.0, now - value), 1) if value is not None else None
        else:
            found[name] = None if isinstance(value, float) and value != value else value
    return found


def table(view: View, now: float, error: AtollError | None = None) -> RenderableType:
    """The view as a table, and what there is to say of the whole under it."""
    has_tiers = all(set(island.mix) <= set(TIERS) for island in view.islands)
    has_link = any(island.bytes_up is not None for island in view.islands)
    shown = Table(title=Text(_headline(view, now)), title_justify="left")
    mix = f"mix {'/'.join(TIERS)}" if has_tiers else "mix"
    link = ("sent", "received") if has_link else ()
    budget = ("ε spent",) if view.feedback_epsilon is not None else ()
    for name in (
        "island",
        "state",
        "step",
        "loss",
        "tokens/s",
        "strategy",
        mix,
        "behind",
        *link,
        *budget,
        "seen",
        "starts",
    ):
        shown.add_column(name, justify="left" if name in ("state", "strategy", mix) else "right")
    for island in view.islands:
        has_rate = island.tokens_per_s is not None and island.state not in _WITHOUT_RATE
        carried = (_carried(island.bytes_up, island.up_bps), _carried(island.bytes_down, island.down_bps))
        cells = (
            str(island.island),
            island.state.replace("_", " "),
            f"{island.step}/{island.steps}",
            f"{island.loss:.3f}" if island.loss is not None else "",
            f"{island.tokens_per_s:,.0f}" if has_rate else "",
            island.strategy,
            _mix(island.mix, has_tiers=has_tiers),
            str(island.merges_behind) if island.merges_behind is not None else "",
            *(carried if has_link else ()),
            *((_spent(island, view),) if budget else ()),
            f"{_span(now - island.seen_at)} ago" if island.seen_at is not None else "",
            str(island.incarnations),
        )
        shown.add_row(*(Text(_printable(cell)) for cell in cells))
    remarks = [_syncer(view, now), *_remarks(view, error)]
    return Group(shown, *(Text(_printable(remark)) for remark in remarks))


def line(view: View, now: float, error: AtollError | None = None) -> str:
    """The view in a line."""
    parts = []
    for island in view.islands:
        state = "" if island.state == "training" else f" {island.state.replace('_', ' ')}"
        loss = f" loss {island.loss:.3f}" if island.loss is not None else ""
        spent = f" ε {_spent(island, view)}" if view.feedback_epsilon is not None else ""
        parts.append(f"island {island.island}{state} step {island.step}/{island.steps}{loss}{spent}")
    return _printable(" | ".join([_headline(view, now), "; ".join(parts), *_remarks(view, error)]))


def _headline(view: View, now: float) -> str:
    says = f"run {view.run} has finished" if view.has_finished else f"run {view.run}"
    holdout = ""
    if view.holdout_loss is not None and view.holdout_at is not None:
        holdout = f", global holdout loss {view.holdout_loss:.3f} ({_span(now - view.holdout_at)} ago)"
    return f"{says}: {view.merges} merges{holdout}"


def _syncer(view: View, now: float) -> str:
    parts = [] if view.has_finished else [_holder(view, now)]
    if view.merged_at is not None:
        parts.append(f"last merge {_span(now - view.merged_at)} ago")
    if view.merges_per_minute is not None:
        parts.append(f"{view.merges_per_minute:.3g} merges a minute")
    if view.participation is not None:
        parts.append(f"{view.participation:.0%} of the live islands in a merge")
    return f"syncer: {', '.join(parts) or 'none'}"


def _holder(view: View, now: float) -> str:
    if view.syncer is None:
        return "nobody holds the role"
    seen = f" (seen {_span(now - view.syncer_seen_at)} ago)" if view.syncer_seen_at is not None else ""
    return f"held by {view.syncer}{seen}"


def _spent(island: IslandView, view: View) -> str:
    spent = f"{island.epsilon_spent:.3g}" if island.epsilon_spent is not None else "?"
    return f"{spent}/{view.feedback_epsilon:g}"


def _remarks(view: View, error: AtollError | None) -> list[str]:
    remarks = []
    if view.feedback_epsilon is not None:
        said = (
            ""
            if all(island.epsilon_spent is not None for island in view.islands)
            else "; `pip install 'atoll[privacy]'` says how much is spent"
        )
        remarks.append(
            f"feedback: each island's may cost ε = {view.feedback_epsilon:g} at δ = {view.feedback_delta:g}{said}"
        )
    if view.kept_out:
        remarks.append(f"kept out of the last {min(view.merges, WINDOW)} merges: {view.kept_out} outer gradients")
    if view.refused:
        remarks.append(f"refused: {view.refused} objects that are no outer gradients, or damaged")
    if view.quarantined:
        remarks.append(f"in quarantine: island {', '.join(map(str, view.quarantined))}")
    if view.unreadable:
        remarks.append(f"metrics: {view.unreadable} lines can't be read")
    if error is not None:
        remarks.append(f"what is shown is old: {error}")
    return remarks


def _mix(weights: Mapping[str, float], *, has_tiers: bool) -> str:
    if not weights:
        return ""
    if has_tiers:
        return "/".join(f"{weights.get(tier, 0.0):.2f}" for tier in TIERS)
    return " ".join(f"{group} {weight:.2f}" for group, weight in weights.items() if weight > 0)


def _carried(total: int | None, bps: float | None) -> str:
    if total is None:
        return ""
    return _size(total) if bps is None else f"{_size(total)}, {_size(bps)}/s"


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, size_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _printable(text: str) -> str:
    """Names are whoever's: none of them steers the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
