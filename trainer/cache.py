"""Shards of remote stores on this machine's disk: shared by all islands of a host, bounded, and only ever a copy of what the store has.

A file appears whole or not at all, and may go at any moment: who reads one has read it whole, and who finds none fetches it again. What a file holds is checked by
its reader (reader.py), for disks rot.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manifests.catalog import cache_root, write_whole
from manifests.errors import UserError

LIMIT_VARIABLE = "ATOLL_CACHE_BYTES"
_DEFAULT_LIMIT_BYTES = 64 << 30
_FREED_SHARE = 0.1
"""Share of the limit that is freed when it's reached: so that not every file pays for a look at all."""


class ShardCache:
    """The cache's folder of shards, with a limit on their size."""

    def __init__(self, folder: Path | None = None, *, limit_bytes: int | None = None) -> None:
        """
        Args:
            folder: where the shards lie; None: below $ATOLL_CACHE.
            limit_bytes: largest size of all of them together; None: $ATOLL_CACHE_BYTES, or 64 GiB.

        Raises:
            UserError: the variable is no number.
        """
        self._folder = folder if folder is not None else cache_root() / "pool"
        self._limit_bytes = limit_bytes if limit_bytes is not None else _limit_from_environment()
        self._warned = False
        self._lock = threading.Lock()

    def get(self, path: str) -> bytes | None:
        """The cached object; None where there is none."""
        file = self._folder / path
        try:
            data = file.read_bytes()
            os.utime(file)  # the files that weren't read for longest are the first to go
        except OSError:
            return None
        return data

    def put(self, path: str, data: bytes) -> None:
        """Keeps an object, if there's room; a full or failing disk costs fetching again, and a warning, but nothing else."""
        if len(data) > self._limit_bytes:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # One writer at a time, of all islands: or each would think that the room is its own.
            with self._lock, _locked(self._folder / ".lock"):
                self._write(path, data)
        except OSError as e:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the cache {self._folder} takes no more shards ({e.strerror or e}): they are fetched each time they're needed; "
                    "free its disk, or name another with ATOLL_CACHE",
                    stacklevel=2,
                )

    def drop(self, path: str) -> None:
        """Deletes a file that turned out to be damaged."""
        (self._folder / path).unlink(missing_ok=True)

    def _write(self, path: str, data: bytes) -> None:
        ledger = self._folder / ".bytes"
        held = _number_in(ledger)
        if held is None or held + len(data) > self._limit_bytes:
            held = self._evict(self._limit_bytes - len(data))
        try:
            write_whole(self._folder / path, data)
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            held = self._evict(self._limit_bytes // 2)
            write_whole(self._folder / path, data)
        # Written over itself, it would count twice: too high a count only brings the next look at the files forward.
        write_whole(ledger, str(held + len(data)).encode())

    def _evict(self, target_bytes: int) -> int:
        """Deletes the files that weren't read for longest, if all are above the target, to a margin below it; returns the bytes that are left."""
        files = sorted(self._files())
        left = sum(size for _, size, _ in files)
        if left > target_bytes:
            target_bytes -= int(_FREED_SHARE * target_bytes)
            for _, size, file in files:
                if left <= target_bytes:
                    break
                file.unlink(missing_ok=True)
                left -= size
        return left

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for file in self._folder.rglob("*.zstd"):
            try:
                found = file.stat()
            except FileNotFoundError:
                continue
            yield found.st_mtime, found.st_size, file


def _limit_from_environment() -> int:
    text = os.environ.get(LIMIT_VARIABLE)
    if not text:
        return _DEFAULT_LIMIT_BYTES
    if not text.isdigit():
        raise UserError(f"{LIMIT_VARIABLE} is {text!r}; it is a number of bytes")
    return int(text)


def _number_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
