"""Who takes part in a run: small objects in one folder, so that one listing tells. Islands come and go as they like; nobody hands out places."""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from dataclasses import dataclass
from pathlib import PurePosixPath

from manifests.errors import ObjectTaken, UserError
from trainer.run import Run

MAX_ISLANDS = 1024
_NAME = re.compile(r"(\d{4})-(?:(\d{3})(-left)?|(finished))\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """An island as the run knows it."""

    island: int
    incarnations: int
    """Times that it was started; 0: it was expected and never came."""
    finished: bool
    """It has done all its steps and sent all that it had."""
    left: bool
    """It has left for good, unless it is started again."""

    @property
    def is_awaited(self) -> bool:
        """Whether the run goes on for its sake."""
        return not (self.finished or self.left)


def members(run: Run) -> dict[int, Member]:
    """The islands that the run was planned for and those that came besides, by number."""
    incarnations: dict[int, set[int]] = {island: set() for island in range(run.config.num_islands)}
    left: set[tuple[int, int]] = set()
    finished: set[int] = set()
    for info in run.store.list(run.members_folder):
        found = _NAME.fullmatch(PurePosixPath(info.path).name)
        if not found:
            continue
        island = int(found[1])
        known = incarnations.setdefault(island, set())
        if found[4]:
            finished.add(island)
        elif found[3]:
            left.add((island, int(found[2])))
        else:
            known.add(int(found[2]))
    return {
        island: Member(
            island=island,
            incarnations=len(numbers),
            finished=island in finished,
            left=(island, len(numbers)) in left,
        )
        for island, numbers in sorted(incarnations.items())
    }


def claim_incarnation(run: Run, island: int) -> int:
    """Takes the island's next incarnation, from 0; no two processes ever have the same.

    Raises:
        UserError: the number is none that an island may have.
    """
    if not 0 <= island < MAX_ISLANDS:
        raise UserError(f"island {island}: islands are numbered from 0 to {MAX_ISLANDS - 1}")
    claim = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "nonce": uuid.uuid4().hex}).encode()
    known = members(run).get(island)
    incarnation = known.incarnations if known is not None else 0
    while True:
        try:
            run.store.put_new(f"{run.members_folder}/{island:04d}-{incarnation:03d}.json", claim)
            return incarnation
        except ObjectTaken:
            incarnation += 1


def say_finished(run: Run, island: int, *, step: int) -> None:
    """Says that an island has done all its steps and sent all that it had."""
    run.store.put_content(f"{run.members_folder}/{island:04d}-finished.json", json.dumps({"step": step}).encode())


def say_left(run: Run, island: int) -> None:
    """Says that an island has left: the others don't wait for it, nor does the run's end. Started again, it's there again.

    Raises:
        UserError: the run knows no such island.
    """
    known = members(run)
    if island not in known:
        raise UserError(f"run {run.name} has no island {island}; it has {', '.join(str(number) for number in known)}")
    run.store.put_content(_left_path(run, island, known[island].incarnations), b"{}")


def is_told_to_leave(run: Run, island: int, incarnation: int) -> bool:
    """Whether somebody has said of this incarnation that it leaves."""
    return run.store.exists(_left_path(run, island, incarnation + 1))


def _left_path(run: Run, island: int, incarnations: int) -> str:
    """The next incarnation's start takes it back."""
    return f"{run.members_folder}/{island:04d}-{incarnations:03d}-left.json"
