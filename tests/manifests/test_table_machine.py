"""A table against a model in memory: appends that are repeated, that die and that are slow, compaction, vacuum, and looking back."""

from __future__ import annotations

import itertools
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from manifests.catalog import Catalog
from manifests.cut import At, pin
from manifests.errors import Failure
from manifests.store import Store
from manifests.tables import append, open_table, read
from manifests.upkeep import vacuum
from tests.manifests.handmade import Story, checkpoint, checkpoint_id, event, job, mixture, run

HOUR = timedelta(hours=1)
STORED = ("events", "checkpoints", "jobs", "runs", "mixtures")


@dataclass(frozen=True)
class Seen:
    """What a point shows."""

    at: At
    kinds: list[str]
    until: datetime
    """When something else could be seen first; the far future: never yet."""
    version: int
    referred: bool = False
    """Whether it stays for ever, since something refers to it."""
    kept: bool = True
    """Whether no vacuum has been free to take it."""


class TableMachine(RuleBasedStateMachine):
    """The table `events`, and the tables that refer to versions of it."""

    template: Path
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp(dir=self.folder)) / "store"
        shutil.copytree(self.template, self.root)
        self.store = Store(str(self.root))
        self.story = Story(self.store, dated=True)
        self.numbers = itertools.count(1)
        self.kinds: list[str] = []
        self.sequences = {"a": 0, "b": 0}
        self.seen: list[Seen] = []

    def teardown(self) -> None:
        shutil.rmtree(self.root.parent)

    # The model

    def _new_rows(self, count: int) -> list[dict[str, Any]]:
        return [event(kind=f"{next(self.numbers):03d}") for _ in range(count)]

    def _happened(self, kinds: list[str]) -> None:
        self.kinds += kinds
        self._note()

    def _note(self) -> None:
        """Remembers what can be seen now: at this time and at this version."""
        version = open_table(self.store, "events").version()
        now = self.story.now
        self.seen = [
            replace(seen, until=min(seen.until, now)) if seen.version < version else seen for seen in self.seen
        ]
        never = datetime.max.replace(tzinfo=now.tzinfo)
        for at in (now, {"events": version}):
            self.seen.append(Seen(at=at, kinds=sorted(self.kinds), until=never, version=version))

    def _look(self, at: At) -> list[str]:
        catalog = Catalog(self.store, at=at, tables=["events"], threads=1)
        return [row["kind"] for row in catalog.rows("SELECT kind FROM events ORDER BY kind")]

    # What writers do

    @rule(writer=st.sampled_from("ab"), count=st.integers(1, 3))
    def append_rows(self, writer: str, count: int) -> None:
        rows = self._new_rows(count)
        self.sequences[writer] += 1
        assert self.story.add("events", *rows, writer=writer, sequence=self.sequences[writer])
        self._happened([row["kind"] for row in rows])

    @rule(writer=st.sampled_from("ab"), back=st.integers(0, 2))
    def repeat_an_append(self, writer: str, back: int) -> None:
        sequence = self.sequences[writer] - back
        if sequence > 0:
            assert not append(self.store, "events", self._new_rows(1), writer=writer, sequence=sequence)

    @rule(writer=st.sampled_from("ab"))
    def die_after_the_commit_and_append_again(self, writer: str) -> None:
        rows = self._new_rows(2)
        self.sequences[writer] += 1
        for expected in (True, False):
            assert (
                self.story.add("events", *rows, writer=writer, sequence=self.sequences[writer]) is not None
            ) == expected
            if expected:
                self._happened([row["kind"] for row in rows])

    @rule()
    def die_before_the_commit(self) -> None:
        self.story.leave_file("events")

    @precondition(lambda self: self.kinds)
    @rule(minutes=st.integers(0, 59))
    def append_slowly_beside_a_vacuum(self, minutes: int) -> None:
        path = self.story.leave_file("events")
        if path is not None:  # else a vacuum has left nothing to copy
            kinds = pq.read_table(path, columns=["kind"])["kind"].to_pylist()
            self.vacuum_tables(minutes, 0)
            self.story.commit_file("events", path)
            self._happened(kinds)

    # What refers to the past

    @rule(what=st.sampled_from(["checkpoint", "tier", "run", "decision"]))
    def refer(self, what: str) -> None:
        number = next(self.numbers)
        version = open_table(self.store, "events").version()
        at: At
        if what == "checkpoint":
            self.story.add("checkpoints", checkpoint(number, island=-1))
            at = checkpoint_id(number)
        elif what == "tier":
            at = self.story.add("jobs", job(str(number))) or {}
        elif what == "run":
            at = self.story.add("runs", run(str(number))) or {}
        else:
            self.story.add("mixtures", mixture(inputs=f'{{"events":{version}}}'))
            at = {"events": version}
        self.seen.append(Seen(at=at, kinds=sorted(self.kinds), until=self.story.now, version=version, referred=True))

    # What the keeper does

    @rule()
    def compact_tables(self) -> None:
        version = open_table(self.store, "events").version()
        self.story.compact(*STORED)
        if open_table(self.store, "events").version() > version:
            self._note()

    @rule(minutes=st.sampled_from([0, 60, 600, 60_000]), retention_hours=st.sampled_from([0, 5, 168]))
    def compact_and_vacuum_tables(self, minutes: int, retention_hours: int) -> None:
        self.compact_tables()
        self.vacuum_tables(minutes, retention_hours)

    @rule(minutes=st.sampled_from([0, 60, 600, 60_000]), retention_hours=st.sampled_from([0, 5, 168]))
    def vacuum_tables(self, minutes: int, retention_hours: int) -> None:
        self.story.now += timedelta(minutes=minutes)
        vacuum(self.store, STORED, retention_hours=retention_hours, dry_run=False, now=self.story.now)
        since = self.story.now - max(retention_hours * HOUR, HOUR)
        self.seen = [replace(seen, kept=seen.kept and (seen.referred or seen.until > since)) for seen in self.seen]
        for version in {seen.version for seen in self.seen if seen.kept}:
            for path in open_table(self.store, "events", version=version).file_uris():
                assert Path(path).is_file()
        for seen in self.seen:
            if seen.referred:
                table = pin(self.store, ["events"], seen.at)["events"]
                assert table is not None
                assert table.version() == seen.version

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def look_back(self, data: st.DataObject) -> None:
        seen = self.seen[data.draw(st.integers(0, len(self.seen) - 1))]
        if seen.kept:
            assert self._look(seen.at) == seen.kinds
            return
        with suppress(Failure):
            assert self._look(seen.at) == seen.kinds

    @invariant()
    def the_newest_shows_every_row_once(self) -> None:
        assert sorted(read(self.store, "events", columns=["kind"])["kind"].to_pylist()) == sorted(self.kinds)


def test_a_table_agrees_with_its_model_whatever_happens(new_store: Path, tmp_path: Path) -> None:
    template = Story(Store(str(shutil.copytree(new_store, tmp_path / "template"))))

    class Machine(TableMachine):
        pass

    Machine.template, Machine.folder = template.store.root, tmp_path
    checks = settings(
        max_examples=12,
        stateful_step_count=16,
        deadline=None,
        derandomize=True,
        database=None,
        # A failing story is shown as it is: making it shorter would take minutes.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(Machine, settings=checks)


pytestmark = pytest.mark.timeout(120)
