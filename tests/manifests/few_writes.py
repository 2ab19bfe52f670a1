"""A few writes of each kind, for the tests of the fault tools: run again after a kill, it ends as if it had run once.

python -m tests.manifests.few_writes STORE
"""

from __future__ import annotations

import sys

from manifests.store import Store
from manifests.tables import append


def write(uri: str) -> None:
    """Three appends, two objects, and a temporary one that is deleted."""
    store = Store(uri)
    store.make_root()
    store.put_content("objects/temporary", b"to be deleted")
    for number in range(1, 4):
        if number < 3:
            store.put_content(f"objects/{number}", f"object {number}".encode() * 100)
        row = {"run": "r", "kind": "merge", "round": number, "detail": "{}"}
        append(store, "events", [row], writer="few-writes", sequence=number)
    store.delete("objects/temporary")


if __name__ == "__main__":
    write(sys.argv[1])
