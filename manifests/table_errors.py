"""What delta-rs's errors about a table mean, and what helps."""

from __future__ import annotations

from manifests.errors import AtollError, Failure, StoreUnreachable, UserError
from manifests.store import Store, first_line

_NETWORK_SIGNS = (
    "error sending request",
    "connection",
    "timed out",
    "timeout",
    "retries",
    "access denied",
    "forbidden",
    "dns",
)
_LONGEST_TEXT = 200
"""Characters of an error that are passed on: some hold a whole listing."""


def table_error(store: Store, name: str, error: Exception) -> AtollError:
    """The error to raise for one of delta-rs or pyarrow: the store is unreachable, or the table is damaged."""
    where = f"table {name} of {store.uri}"
    whole = first_line(error)
    text = whole if len(whole) <= _LONGEST_TEXT else f"{whole[:_LONGEST_TEXT]}…"
    if isinstance(error, OSError) and not store.is_local:
        return StoreUnreachable(f"{where}: {text}")
    if not store.is_local and any(sign in whole.lower() for sign in _NETWORK_SIGNS):
        return StoreUnreachable(f"{where}: {text}")
    return Failure(
        f"{where} is damaged: {text}; restore {store.table_uri(f'tables/{name}')} from a backup, "
        f"or look at an older version with --at {name}=VERSION"
    )


def no_version(store: Store, name: str, version: int) -> UserError:
    """The error to raise for a version that a table doesn't have."""
    return UserError(f"table {name} of {store.uri} has no version {version}; see `atoll tables history {name}`")
