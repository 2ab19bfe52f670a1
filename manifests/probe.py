"""The probe: does a store keep the promises that Atoll stands on? Asked of the real store, once, before anything is entrusted to it.

Promises: create-if-absent has one winner, a read sees the last write, a listing is complete. Some S3-like stores ignore `If-None-Match`, and
then two writers of one name both believe that they won. The probe's objects lie under `probe/<random>/` and are removed.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import AtollError, ObjectMissing, ObjectTaken, UserError
from manifests.store import Store

FOLDER = "probe"
_THREADS = 8
_RACES = 8
_RIVALS = 2
_ROUNDS = 3
_LISTED = 40
_ATTEMPTS = 10
_HONEST = "AWS S3, GCS, Azure, MinIO, SeaweedFS …"
_EXCLUSIVE_MEND = f"use a store that honours If-None-Match ({_HONEST}), or a folder on a local disk"
_CONSISTENT_MEND = (
    f"use a store that is strongly consistent ({_HONEST}) with no cache before it, or a folder on a local disk"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One promise, and whether the store kept it."""

    check: str
    """Name of the promise."""
    ok: bool
    detail: str
    """What was seen."""
    mend: str
    """What helps where the promise was broken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What the probe saw of one store."""

    findings: list[Finding]
    """In the order in which they were made."""
    latencies_s: dict[str, float]
    """Median time of one request, for each kind: put, get, exists, list, delete."""

    @property
    def failed(self) -> list[Finding]:
        """The promises that the store broke."""
        return [finding for finding in self.findings if not finding.ok]


def probe_store(store: Store) -> Probe:
    """Tries a store's promises on the store itself, and removes what it wrote for it.

    Raises:
        AtollError: the store can't be written, or doesn't answer; no promise could be tried.
    """
    probing = _Probing(store)
    try:
        probing.make_folder()
        probing.check_single_objects()
        probing.check_second_writer()
        probing.check_race()
        probing.check_listing()
    except BaseException:
        # What stopped the probe is what the caller must hear of.
        with suppress(AtollError):
            probing.clean()
        raise
    probing.clean()
    latencies_s = {operation: statistics.median(times_s) for operation, times_s in probing.times_s.items()}
    return Probe(findings=probing.findings, latencies_s=latencies_s)


def require_sound(store: Store) -> None:
    """Refuses a store that breaks a promise.

    Raises:
        UserError: it breaks one; the message says which, and what would help.
        AtollError: the store can't be written, or doesn't answer.
    """
    failed = probe_store(store).failed
    if failed:
        broken = "; ".join(f"{finding.check}: {finding.detail}" for finding in failed)
        mends = "; ".join(dict.fromkeys(finding.mend for finding in failed))
        raise UserError(f"store {store.uri} can't be trusted: {broken}; {mends}")


class _Probing:
    """One pass over one store: its folder, and what was seen so far."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.folder = f"{FOLDER}/{uuid.uuid4().hex}"
        self.findings: list[Finding] = []
        self.times_s: dict[str, list[float]] = {}
        self._written: list[str] = []

    def make_folder(self) -> None:
        """Makes the probe's folder in a local store, so that another probe that ends just now can't remove `probe` under our first write."""
        self.store.exists(FOLDER)  # raises where there is no store, or no answer
        if not self.store.is_local:
            return
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._local_folder.mkdir(parents=True)
                return
            except OSError as e:
                if not isinstance(e, FileNotFoundError) or attempt == _ATTEMPTS:
                    where = f"store {self.store.uri} can't be written: {e.strerror}"
                    raise UserError(f"{where}; name another folder with --store") from e

    def check_single_objects(self) -> None:
        """One object after another: absent, written, deleted, written anew. Each answer must fit the last write."""
        stale: list[str] = []
        undead: list[str] = []
        for number in range(_ROUNDS):
            path = f"{self.folder}/single-{number}"
            # Asked before the write: a cache that remembers the absence is found out after it.
            if self._exists(path) or self._get(path) is not None:
                stale.append("an object that nobody wrote exists")
            for content in (b"first", b"second, longer"):
                # Refused by its own object: a reply was lost on the way, and the request was sent again.
                if not self._put(path, content) and self._get(path) != content:
                    undead.append("a name can't be taken anew after its object was deleted")
                    continue
                if (seen := self._get(path)) != content:
                    stale.append(f"get shows {seen!r} after {content!r} was written")
                if not self._exists(path):
                    stale.append("exists denies an object that was just written")
                if path not in self._list(self.folder):
                    stale.append("list lacks an object that was just written")
                with self._timed("delete"):
                    self.store.delete(path)
                for operation, denies in (
                    ("get", self._get(path) is None),
                    ("exists", not self._exists(path)),
                    ("list", path not in self._list(self.folder)),
                ):
                    if not denies:
                        undead.append(f"{operation} still shows an object that was just deleted")
        requests = f"{2 * _ROUNDS} times"
        self._find("read after write", stale, f"seen by get, exists and list, {requests}", _CONSISTENT_MEND)
        self._find("read after delete", undead, f"gone for get, exists and list, {requests}", _CONSISTENT_MEND)

    def check_second_writer(self) -> None:
        """A name that was taken a moment ago."""
        path = f"{self.folder}/taken"
        broken = []
        self._put(path, b"first")
        if self._put(path, b"second"):
            broken.append("create-if-absent is ignored: a second writer of a name was not refused")
        elif (seen := self._get(path)) != b"first":
            broken.append(f"a second writer was refused, and the object holds {seen!r} instead of the first one's")
        self._find("second writer", broken, "refused, and the object is the first one's", _EXCLUSIVE_MEND)

    def check_race(self) -> None:
        """Pairs of writers, each pair after one name, all at the same moment.

        Pairs of several names and not a crowd of one: a store that queues the writers of a name may take a second for each of them.
        """
        contents = [f"writer {writer}".encode() for writer in range(_RIVALS)]
        start = threading.Barrier(_RACES * _RIVALS)

        def write(race: int, writer: int) -> bool:
            start.wait()
            return self._put(f"{self.folder}/race-{race}", contents[writer], timed=False)

        with ThreadPoolExecutor(_RACES * _RIVALS) as pool:
            runs = [[pool.submit(write, race, writer) for writer in range(_RIVALS)] for race in range(_RACES)]
            won = [[run.result() for run in rivals] for rivals in runs]
        both = sum(all(rivals) for rivals in won)
        wrong = 0
        for race, rivals in enumerate(won):
            winners = [content for content, has_won in zip(contents, rivals, strict=True) if has_won]
            # No winner at all: lost replies again.
            wrong += self._get(f"{self.folder}/race-{race}") not in (winners or contents)
        broken = []
        if both:
            broken.append(f"create-if-absent is ignored: two writers of one name both won, in {both} of {_RACES} races")
        if wrong:
            broken.append(f"two writers of one name, and the object isn't the winner's, in {wrong} of {_RACES} races")
        kept = f"two writers of one name, one winner, in {_RACES} races"
        self._find("racing writers", broken, kept, _EXCLUSIVE_MEND)

    def check_listing(self) -> None:
        """Many objects in nested folders, listed right after they were written."""
        top = f"{self.folder}/listed"
        paths = sorted(f"{top}/{n % 4}/{n % 3}/{n:03d}" for n in range(_LISTED))
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda path: self._put(path, b"x", timed=False), paths))
        middle = paths[_LISTED // 2]
        broken = []
        for what, prefix, after in (
            ("list", top, None),
            ("list", f"{top}/1", None),
            ("list after an offset", top, middle),
        ):
            expected = {path for path in paths if path.startswith(prefix + "/") and path > (after or "")}
            listed = self._list(prefix, after=after)
            if expected - set(listed):
                broken.append(f"{what} lacks {len(expected - set(listed))} of {len(expected)} objects just written")
            if set(listed) - expected or len(listed) > len(set(listed)):
                broken.append(f"{what} shows {len(listed)} objects where there are {len(expected)}")
        self._find("listing", broken, f"{_LISTED} objects in nested folders, all there", _CONSISTENT_MEND)

    def clean(self) -> None:
        """Removes what the probe wrote; by name, since the listing is one of the things on trial."""
        if self.store.is_local:
            shutil.rmtree(self._local_folder, ignore_errors=True)
            with suppress(OSError):
                self._local_folder.parent.rmdir()  # another probe's folder may lie there
        elif self._written:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(self.store.delete, dict.fromkeys(self._written)))

    @property
    def _local_folder(self) -> Path:
        return self.store.root / self.folder

    def _find(self, check: str, broken: list[str], kept: str, mend: str) -> None:
        detail = "; ".join(dict.fromkeys(broken)) or kept
        self.findings.append(Finding(check=check, ok=not broken, detail=detail, mend=mend))

    def _put(self, path: str, content: bytes, *, timed: bool = True) -> bool:
        self._written.append(path)
        with self._timed("put" if timed else None):
            try:
                self.store.put_new(path, content)
            except ObjectTaken:
                return False
        return True

    def _get(self, path: str) -> bytes | None:
        with self._timed("get"):
            try:
                return self.store.get(path)
            except ObjectMissing:
                return None

    def _exists(self, path: str) -> bool:
        with self._timed("exists"):
            return self.store.exists(path)

    def _list(self, prefix: str, *, after: str | None = None) -> list[str]:
        with self._timed("list"):
            return [info.path for info in self.store.list(prefix, after=after)]

    @contextmanager
    def _timed(self, operation: str | None) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        if operation is not None:
            self.times_s.setdefault(operation, []).append(time.perf_counter() - start_s)
