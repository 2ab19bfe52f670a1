"""Which fault strikes whom, when and for how long: a pure function of a seed and what was asked for. How a fault is done stands in faults.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from manifests.errors import UserError

GLOBAL = -1
"""The syncer, as a target; the trainer's own number for it."""
EVERYONE = -2
"""All processes at once, as a target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault."""

    name: str
    meaning: str
    seconds: tuple[float, float]
    """How long it lasts at least and at most."""
    targets: str = "island"
    """"island", "link" (an island or the syncer), "syncer" or "everyone"."""
    share: float = 0.0
    """Of an island's time meanwhile that isn't there to train in, however good the software is."""
    most: float | None = None
    """How strong it is at most; drawn from the upper half. None: it has no strength."""
    by_default: bool = True
    """Whether it strikes where no kinds are named."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="kill", meaning="SIGKILL of an island; its machine is away for a while", seconds=(0.5, 3), share=1),
        Kind(name="stop", meaning="SIGSTOP of an island, then SIGCONT", seconds=(1, 6), share=1),
        Kind(name="slow", meaning="an island's steps take up to four times as long", seconds=(4, 12), most=4),
        Kind(name="syncer", meaning="SIGKILL of the process that holds the syncer's role", seconds=(0.2, 0.5), targets="syncer"),
        Kind(name="errors", meaning="up to half of the requests of one process are answered with 503", seconds=(3, 10), targets="link", most=0.5),
        Kind(name="latency", meaning="up to 2 s between one process and the store", seconds=(3, 10), targets="link", most=2),
        Kind(name="partition", meaning="one process is cut off from the store", seconds=(2, 8), targets="link"),
        Kind(name="machine", meaning="SIGKILL of all processes at once", seconds=(0.5, 2), targets="everyone", share=1),
        Kind(name="replies", meaning="up to a third of what an island reads has a bit flipped: shards, and a run's objects", seconds=(3, 8), most=0.33),
        Kind(name="object", meaning="an island's next outer gradient is in the store before it, with a bit flipped or another island's", seconds=(0, 0)),
        Kind(name="disk", meaning="files can't grow: every write of an island to its local disk fails (RLIMIT_FSIZE)", seconds=(2, 8)),
        Kind(name="clock", meaning="an island's clock, as Python code sees it, jumps by up to a day, forwards or back", seconds=(3, 10), most=86_400),
        Kind(name="poison", meaning="an island trains on tokens in random order, and its ledger doesn't know", seconds=(4, 12), by_default=False),
    )
}  # fmt: skip
DEFAULT_KINDS = tuple(name for name, kind in KINDS.items() if kind.by_default)
_REST_S = 1.0
"""Between two faults of one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault."""

    at_s: float
    """Since all islands train."""
    kind: str
    target: int
    """Island, GLOBAL or EVERYONE."""
    seconds: float
    strength: float = 0.0

    @property
    def end_s(self) -> float:
        """When it's over."""
        return self.at_s + self.seconds


def parse_kinds(text: str) -> tuple[str, ...]:
    """The kinds of a `--kinds` option: names with commas between, `all`, or nothing for the usual ones.

    Raises:
        UserError: there is no such kind.
    """
    if not text.strip():
        return DEFAULT_KINDS
    if text.strip() == "all":
        return tuple(KINDS)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        raise UserError(
            f"--kinds {text!r}: {', '.join(unknown) or 'nothing'} is no kind of fault; there are {', '.join(KINDS)}, and all"
        )
    return names


def make_schedule(
    *, seed: int, minutes: float, faults_per_hour: float, kinds: Sequence[str] = DEFAULT_KINDS, islands: int = 4
) -> list[Fault]:
    """The faults of a run, by time; the same for the same arguments. Each kind comes as often as the others, give or take one.

    Raises:
        UserError: a number is out of range.
    """
    for name, value in (("minutes", minutes), ("faults per hour", faults_per_hour)):
        if not 0 < value < float("inf"):
            raise UserError(f"{name}: {value}; it must be above 0")
    if islands < 1:
        raise UserError(f"islands: {islands}; it must be 1 or more")
    chance = random.Random(f"{seed}/{minutes}/{faults_per_hour}/{','.join(kinds)}/{islands}")
    count = max(1, round(minutes * faults_per_hour / 60))
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += chance.sample(list(kinds), len(kinds))
    slot_s = minutes * 60 / count
    free_at = dict.fromkeys(range(GLOBAL, islands), 0.0)
    faults = [
        _fault(KINDS[name], (number + chance.random()) * slot_s, free_at, chance)
        for number, name in enumerate(drawn[:count])
    ]
    return sorted(faults, key=lambda fault: (fault.at_s, fault.target))


def _fault(kind: Kind, wanted_at_s: float, free_at: dict[int, float], chance: random.Random) -> Fault:
    """A fault of a target that is free then, or becomes free soonest; no two strike the same process at once."""
    if kind.targets == "everyone":
        target, strikes = EVERYONE, list(free_at)
    else:
        candidates = [
            process
            for process in free_at
            if {"island": process >= 0, "link": True, "syncer": process == GLOBAL}[kind.targets]
        ]
        idle = [process for process in candidates if free_at[process] <= wanted_at_s]
        target = chance.choice(idle) if idle else min(candidates, key=lambda process: free_at[process])
        strikes = [target]
    at_s = max(wanted_at_s, *(free_at[process] for process in strikes), 0.0)
    seconds = chance.uniform(*kind.seconds)
    for process in strikes:
        free_at[process] = at_s + seconds + _REST_S
    strength = chance.uniform(kind.most / 2, kind.most) if kind.most is not None else chance.random()
    if kind.name == "clock" and chance.random() < 0.5:
        strength = -strength
    return Fault(
        at_s=round(at_s, 3), kind=kind.name, target=target, seconds=round(seconds, 3), strength=round(strength, 3)
    )
