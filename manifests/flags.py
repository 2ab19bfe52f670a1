"""Flags: documents that islands pass over from their next round on. A flag takes nothing out of the store, and can be taken back.

To erase documents is pipeline/forget.py's; to take out of a run what it has learnt from them, trainer/rollback.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.predicates import NEWEST, documents_with_tiers
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import append

_MATCHING = """
SELECT d.doc_id
FROM ({documents}) AS d
LEFT JOIN flags AS f USING (doc_id)
WHERE coalesce(f.flagged, false) = {flagged} AND (
{predicate}
)
ORDER BY doc_id
"""


def matching(catalog: Catalog, predicate: str, *, flagged: bool) -> list[bytes]:
    """Documents of a predicate that are flagged, or not.

    Args:
        catalog: pins the store's tables.
        predicate: SQL condition over the columns of documents, and `tier` and `score` in the newest tier version.
        flagged: which of them.

    Raises:
        UserError: the condition isn't SQL.
    """
    sql = _MATCHING.format(documents=documents_with_tiers(NEWEST), predicate=predicate, flagged=str(flagged).lower())
    return list(catalog.query(sql).column(0).to_pylist())


def set_flags(store: Store, doc_ids: Sequence[bytes], *, flagged: bool, predicate: str, reason: str) -> None:
    """Flags documents, or takes their flags back, in one commit.

    Raises:
        UserError: no reason is given.
    """
    if not reason.strip():
        raise UserError("a flag needs a reason; give --reason")
    count = len(doc_ids)
    schema = TABLES["flags"].schema
    now = pa.scalar(datetime.now(UTC), schema.field("written_at").type)
    columns = {
        "doc_id": pa.array(doc_ids, pa.binary()),
        "flagged": pa.repeat(pa.scalar(flagged), count),
        "predicate": pa.repeat(pa.scalar(predicate), count),
        "reason": pa.repeat(pa.scalar(reason), count),
        "written_at": pa.repeat(now, count),
    }
    append(store, "flags", pa.table(columns, schema=schema))
