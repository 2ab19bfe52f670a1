"""Keeping tables in shape: compaction merges small files, vacuum deletes the files that nothing refers to any more.

Both are safe beside writers and readers. Only what a row says is kept for ever: a compaction moves rows, and a vacuum takes away the files of
versions that nobody can want to look back to.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from manifests.catalog import Catalog
from manifests.compaction import compact_table
from manifests.cut import all_committed, first_committed
from manifests.errors import UserError
from manifests.jobs import Report, report_nothing
from manifests.log import Commit, read_log
from manifests.schemas import TABLES
from manifests.store import ObjectInfo, Store
from manifests.table_errors import table_error
from manifests.tables import find_table, open_table

TARGET_BYTES = 128 << 20
RETENTION_HOURS = 7 * 24
SLOWEST_APPEND = timedelta(hours=1)
"""No append takes longer from the time in its rows, or from its first file, to its commit: it gives up after minutes."""
_LONGEST_RETENTION_HOURS = 100 * 365 * 24
_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Compacted:
    """What a compaction did to one table."""

    table: str
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stale:
    """One file that nothing refers to."""

    table: str
    path: str
    """Path below the store's root."""
    size_bytes: int
    modified_at: datetime


def compact(
    store: Store,
    names: Iterable[str] = tuple(TABLES),
    *,
    target_bytes: int = TARGET_BYTES,
    report: Report = report_nothing,
) -> list[Compacted]:
    """Merges the small files of tables, within each partition and in their order, and writes a checkpoint of the log.

    Rows, their order within a file and the writers' sequence numbers stay as they are. The old files stay for those who look at older
    versions, until a vacuum.

    Args:
        store: the store.
        names: the tables; one whose files are few or large already is left alone.
        target_bytes: about how large the files become.
        report: told of progress.

    Returns:
        What came of each table that the store has.

    Raises:
        UserError: the target size is not positive.
        Failure: a table is damaged.
        StoreUnreachable: no commit could be made beside the other writers.
    """
    if target_bytes <= 0:
        raise UserError(f"target size of {target_bytes} bytes: give a positive one, such as {TARGET_BYTES}")
    wanted = list(names)
    done = []
    for number, name in enumerate(wanted, start=1):
        table = find_table(store, name)
        if table is not None:
            files_before, bytes_before = _size(table)
            merged = compact_table(store, name, target_bytes=target_bytes)
            table = open_table(store, name)
            if merged:
                _write_checkpoint(store, name, table)
            files_after, bytes_after = _size(table)
            done.append(
                Compacted(
                    table=name,
                    files_before=files_before,
                    files_after=files_after,
                    bytes_before=bytes_before,
                    bytes_after=bytes_after,
                )
            )
        report("tables compacted", number, len(wanted))
    return done


def vacuum(
    store: Store,
    names: Iterable[str] = tuple(TABLES),
    *,
    retention_hours: float = RETENTION_HOURS,
    dry_run: bool = True,
    now: datetime | None = None,
    report: Report = report_nothing,
) -> list[Stale]:
    """Finds the data files of tables that nothing refers to, and deletes them where it is no dry run.

    Kept are the files of the newest version; of every version of the last `retention_hours`, so that who reads now can read on; of the cuts at
    every tier version, pool of shards, run's creation, global checkpoint and anchor of an unfinished run (referred_moments.sql says why these); and
    of the versions that a decision or a job says it was computed from. And no file of the last hour is touched, however short the retention:
    an append's file lies there for a while before its commit tells of it.

    This is not left to delta-rs's vacuum, which knows versions to keep only as an experiment and judges files that its log checkpoints have
    forgotten by their age alone.

    Args:
        store: the store.
        names: the tables.
        retention_hours: how long every version stays readable; less than an hour is taken as an hour.
        dry_run: only find them.
        now: the time; None: the clock's.
        report: told of progress.

    Returns:
        The files, deleted or to be deleted.

    Raises:
        UserError: the retention is negative, or longer than a hundred years.
        Failure: a log is damaged; nothing was deleted.
    """
    if not 0 <= retention_hours <= _LONGEST_RETENTION_HOURS:
        raise UserError(f"retention of {retention_hours} hours: give 0 to {_LONGEST_RETENTION_HOURS:,}")
    now = now or datetime.now(UTC)
    since = now - max(timedelta(hours=retention_hours), SLOWEST_APPEND)
    catalog = Catalog(store, tables=("jobs", "mixtures", "runs", "checkpoints", "events"))
    moments = catalog.ask("referred_moments")["written_at"].to_pylist()
    read_versions = catalog.ask("referred_versions").to_pylist()
    stale = []
    wanted = list(names)
    for number, name in enumerate(wanted, start=1):
        # Listed before the log is read: what is committed in between is then known, not taken for litter.
        listed = [info for info in store.list(f"tables/{name}") if _is_data_file(info)]
        commits = read_log(store, name)
        keep = _kept_versions(
            name,
            commits,
            since=since,
            moments=moments,
            versions=[r["version"] for r in read_versions if r["name"] == name],
        )
        needed = {f"tables/{name}/{path}" for path in _files_of(commits, keep)}
        for info in listed:
            modified_at = datetime.fromtimestamp(info.modified_at, UTC)
            if info.path not in needed and modified_at <= since:
                stale.append(Stale(table=name, path=info.path, size_bytes=info.size_bytes, modified_at=modified_at))
        report("tables looked through", number, len(wanted))
    if not dry_run:
        with ThreadPoolExecutor(_THREADS) as pool:
            for number, _ in enumerate(pool.map(lambda file: store.delete(file.path), stale), start=1):
                report("files deleted", number, len(stale))
    return stale


def _write_checkpoint(store: Store, name: str, table: DeltaTable) -> None:
    try:
        table.create_checkpoint()
    except (DeltaError, OSError) as e:
        raise table_error(store, name, e) from e


def _size(table: DeltaTable) -> tuple[int, int]:
    sizes = pa.table(table.get_add_actions())["size_bytes"].to_pylist()
    return len(sizes), sum(sizes)


def _is_data_file(info: ObjectInfo) -> bool:
    return info.path.endswith(".parquet") and "/_delta_log/" not in info.path


def _kept_versions(
    name: str, commits: Sequence[Commit], *, since: datetime, moments: Iterable[datetime], versions: Iterable[int]
) -> list[int]:
    """Versions of a table whose files stay, in order; files of others that matter are among theirs."""
    if not commits:
        return []
    newest = commits[-1].version
    times = [commit.time for commit in commits]
    earliest, latest = all_committed(times), first_committed(times)
    removals = [commit.version for commit in commits if commit.removed]

    def stretch(first: datetime, last: int) -> set[int]:
        """Versions that hold the files of all from a moment up to a last one: the last, and the one before each removal on the way."""
        start = bisect_right(earliest, first) - 1
        on_the_way = removals[bisect_right(removals, start) : bisect_right(removals, last)]
        return {version for version in (last, *(removal - 1 for removal in on_the_way)) if version >= 0}

    kept = stretch(since, newest) | {version for version in versions if 0 <= version <= newest}
    for moment in moments:
        # The row was written before its commit, by the same clock, which the log cuts to milliseconds.
        kept |= stretch(moment - timedelta(milliseconds=1), bisect_right(latest, moment + SLOWEST_APPEND) - 1)
    return sorted(kept)


def _files_of(commits: Sequence[Commit], versions: Sequence[int]) -> set[str]:
    """Paths of the files that at least one of these versions has."""
    removed_at = {path: commit.version for commit in commits for path in commit.removed}
    found = set()
    for commit in commits:
        for file in commit.added:
            index = bisect_left(versions, commit.version)
            if index < len(versions) and versions[index] < removed_at.get(file.path, versions[index] + 1):
                found.add(file.path)
    return found
