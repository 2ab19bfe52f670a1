"""What a store holds, as far as it must be the same whether or not a process was killed on the way: rows that count, and objects.

What may differ is named here, each with its reason; everything else is compared to the bit. Data files and logs of tables are not looked at:
only the rows that they make.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import obstore

from manifests.catalog import Catalog
from manifests.schemas import TABLES
from manifests.tables import open_store
from trainer.checkpoints import checkpoint_id
from trainer.run import GLOBAL
from trainer.wire import object_hash, pack, unpack

DIFFERING_COLUMNS = {
    "written_at": "a clock",
    "started_at": "a clock",
    "scored_at": "a clock",
    "step_time_s": "measured time",
    "upload_bps": "measured time",
    "latency_s": "measured time",
    "incarnation": "a killed island comes back as the next one",
}
DIFFERING_KEYS = {
    ("jobs", "summary", "seconds"): "measured time",
    ("events", "detail", "pid"): "the process itself",
}
"""Table, column and key within its JSON."""
DIFFERING_INPUTS = {
    "mixtures": "versions of the tables that were read: the commits of a killed attempt count, though its rows don't",
}
"""Tables whose column `inputs` is left out."""
OF_EVERY_INCARNATION = {
    ("mixtures", "reason", "as checkpointed"): "the mix that an incarnation takes over",
    ("events", "kind", "island_joined"): "it says that it begins",
}
"""Rows that every incarnation of an island writes: table, column and value."""
DIFFERING_OBJECTS = {
    r"probe/[0-9a-f]{32}/.+": "of a killed probe: the next one can't know that it is dead",
    r"runs/[^/]+/members/\d+-\d+\.json": "a process claims its incarnation by it",
}
DIFFERING_SAYINGS = {
    "feedback": "messages name their incarnation and measured times; what they say is in the table `feedback`",
    "mixes": "versions of the tables that were read, and the incarnation that was heard; the mixes are in `mixtures`",
    "talk": "both, as a snapshot keeps them",
}
"""Keys of what a run's objects say beside their tensors."""
_STEP_TIME = re.compile(r'"step_time_s": [0-9.e-]+')
"""Measured time, in what an island says of an outer gradient."""
_ISLAND_CHECKPOINT = re.compile(r"(runs/[^/]+/islands/\d+/checkpoint-\d+)-\d+\.safetensors")
"""Their names end with the incarnation. One that no row names is of an incarnation that was killed before its commit; nobody may delete it, since
nobody can know that it won't commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a store holds."""

    tables: dict[str, list[dict[str, Any]]]
    """Rows that count, in a fixed order."""
    objects: dict[str, str]
    """Path of each object outside of the tables → hash of what it says."""


def read_content(uri: str) -> Content:
    """All that counts in a store."""
    store = open_store(uri)
    catalog = Catalog(store)
    raw = {name: catalog.rows(f"SELECT * FROM {name}") for name in TABLES}
    names = _Names(raw["checkpoints"])
    tables = {name: _rows(name, rows, names) for name, rows in raw.items()}
    committed = {row["object"] for row in raw["checkpoints"]}
    paths = [item["path"] for chunk in obstore.list(store.objects) for item in chunk]
    objects = {
        names.plain(path): names.hash_of(path, store.get(path))
        for path in paths
        if not path.startswith("tables/")
        and not any(re.fullmatch(pattern, path) for pattern in DIFFERING_OBJECTS)
        and not (_ISLAND_CHECKPOINT.fullmatch(path) and path not in committed)
    }
    return Content(tables=tables, objects=objects)


class _Names:
    """Ids of checkpoints as they'd be if the island's first incarnation had written them: they're hashes of it, too."""

    def __init__(self, checkpoints: list[dict[str, Any]]) -> None:
        self._ids = {
            row["checkpoint"]: checkpoint_id(row["run"], row["island"], 0, row["round"])
            for row in checkpoints
            if row["incarnation"] > 0
        }
        self._texts = {old.hex(): new.hex() for old, new in self._ids.items()}

    def plain(self, value: Any) -> Any:
        """A value with the ids and names of first incarnations."""
        if isinstance(value, bytes):
            return self._ids.get(value, value)
        if isinstance(value, list):
            return [self.plain(item) for item in value]
        if isinstance(value, str):
            for old, new in self._texts.items():
                value = value.replace(old, new)
            return _ISLAND_CHECKPOINT.sub(r"\1.safetensors", value)
        return value

    def hash_of(self, path: str, data: bytes) -> str:
        """Hash of what an object says: of a run's tensors, the description with plain names."""
        if path.startswith("runs/") and path.endswith(".safetensors"):
            tensors, description = unpack(data, name=path)
            text = _STEP_TIME.sub('"step_time_s": 0', self.plain(json.dumps(_lasting(description))))
            data = pack(tensors, json.loads(text))
        elif path.startswith("runs/") and path.endswith(".json"):
            data = self.plain(json.dumps(_lasting(json.loads(data)))).encode()
        return object_hash(data)


def _lasting(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key not in DIFFERING_SAYINGS}


def _rows(table: str, rows: list[dict[str, Any]], names: _Names) -> list[dict[str, Any]]:
    left_out = {*DIFFERING_COLUMNS, *(["inputs"] if table in DIFFERING_INPUTS else [])}
    if table == "checkpoints":
        left_out.add("hash")  # of an object that names checkpoints; what it says is compared itself
    kept = [
        {
            column: _value(table, column, names.plain(value))
            for column, value in row.items()
            if column not in left_out and not (column == "size_bytes" and row["island"] == GLOBAL)  # DIFFERING_SAYINGS
        }
        for row in rows
        if not any(name == table and row[column] == value for name, column, value in OF_EVERY_INCARNATION)
    ]
    ordered = sorted(kept, key=repr)
    if table == "mixtures":
        # A decision whose round was never committed is taken anew by the next incarnation.
        return [row for row, before in zip(ordered, [None, *ordered], strict=False) if row != before]
    return ordered


def _value(table: str, column: str, value: Any) -> Any:
    keys = [key for name, of, key in DIFFERING_KEYS if (name, of) == (table, column)]
    if not keys:
        return value
    read: Mapping[str, Any] = json.loads(value)
    return {key: item for key, item in read.items() if key not in keys}
