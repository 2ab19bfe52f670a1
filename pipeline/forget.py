"""Erasure: takes documents out of every view and every shard, and leaves tombstones without their text.

A shard that holds one of them is written anew with their tokens gone and their places kept: so an island's cursor and its order stay what they
were, and a run goes on. The old shard is deleted once nothing points to it. What had been trained on stays on record: consumption, and which checkpoints saw it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from manifests.catalog import Catalog
from manifests.errors import ObjectMissing, UserError
from manifests.jobs import Job, Report, make_job, report_nothing
from manifests.mds import encode_shard, index_json, object_path, read_index
from manifests.predicates import NEWEST, documents_with_tiers
from manifests.shards import fetch_shard
from manifests.store import Store
from pipeline.bands import put_shard

_PART_SHARDS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Erasure:
    """What an erasure would do, or did."""

    job: Job
    predicate: str
    reason: str
    documents: pa.Table
    """doc_id, corpus, license, access of the documents."""
    shards: list[str]
    """Shards that hold one of them and stand in a view, by name."""
    rephrased: int
    """Documents that were rephrased from one of them and stay."""
    seen: pa.Table
    """run, island, checkpoints (that saw one of them), first_round."""

    @property
    def doc_ids(self) -> list[bytes]:
        """Ids of the documents."""
        return list(self.documents["doc_id"].to_pylist())


def plan_erasure(store: Store, predicate: str, *, reason: str, with_rephrased: bool = False) -> Erasure:
    """What forgetting the documents of a predicate means. Changes nothing.

    Args:
        store: the store.
        predicate: SQL condition over the columns of `documents`, and `tier` and `score` in the newest tier version.
        reason: why; goes into the tombstones.
        with_rephrased: also the documents that were rephrased from them.

    Raises:
        UserError: the condition isn't SQL, or matches nothing.
    """
    catalog = Catalog(store)
    config = {"predicate": predicate, "reason": reason, "with_rephrased": with_rephrased}
    ingests = catalog.query("SELECT job FROM jobs WHERE kind = 'ingest' ORDER BY job").column(0).to_pylist()
    job = make_job(store, "forget", config=config, inputs={"documents": ingests})
    documents = _begun(catalog, job)
    if documents.num_rows == 0:
        documents = _matching(catalog, predicate, with_rephrased=with_rephrased)
    if documents.num_rows == 0:
        raise UserError(
            f"no document matches {predicate!r}, or all that do are forgotten already; try it with `atoll sql`"
        )
    return Erasure(
        job=job,
        predicate=predicate,
        reason=reason,
        documents=documents,
        shards=_affected(catalog, documents),
        rephrased=_rephrased(catalog, documents),
        seen=_seen(catalog, documents),
    )


def forget(erasure: Erasure, *, report: Report = report_nothing) -> dict[str, Any]:
    """Does what the plan says. May be interrupted and done again.

    Returns:
        The summary: documents, shards rewritten, views rewritten, shards deleted; `already_done` where it was.

    Raises:
        Failure: a shard is damaged or missing; nothing has been deleted.
    """
    job, store = erasure.job, erasure.job.store
    summary = job.summary()
    done = summary is not None
    if summary is None:
        summary = _rewrite(erasure, report)
        job.commit(summary)
    # Only now does nothing point to them any more. Deleting is safe to repeat, so a death here is mended by doing it again.
    for number, shard in enumerate(summary["replaced"], start=1):
        store.delete(object_path(shard))
        report("old shards deleted", number, len(summary["replaced"]))
    return summary | {"already_done": done}


def _rewrite(erasure: Erasure, report: Report) -> dict[str, Any]:
    job = erasure.job
    columns = ("doc_id", "corpus", "license", "access")
    tombstones = [
        {name: row[name] for name in columns}
        | {"predicate": erasure.predicate, "reason": erasure.reason, "job": job.id}
        for row in erasure.documents.to_pylist()
    ]
    job.append("tombstones", tombstones, part=1)
    forgotten = frozenset(erasure.doc_ids)
    # A dead attempt has fixed which shards it writes in which part; the views still point to the old ones, so the list is the same.
    for part, start in enumerate(range(0, len(erasure.shards), _PART_SHARDS), start=1):
        if not job.has_part("shard_index", part):
            _rewrite_shards(job, erasure.shards[start : start + _PART_SHARDS], forgotten, part=part)
        report("shards rewritten", min(start + _PART_SHARDS, len(erasure.shards)), len(erasure.shards))
    views = _rewrite_views(job, forgotten)
    return {
        "documents": len(forgotten),
        "shards": len(erasure.shards),
        "views": views,
        "replaced": erasure.shards,
        "job": job.id,
    }


def _rewrite_shards(job: Job, shards: Sequence[str], forgotten: frozenset[bytes], *, part: int) -> None:
    catalog = Catalog(job.store, tables=["shard_index", "shards", "pools"])
    places: list[dict[str, Any]] = []
    index: list[dict[str, Any]] = []
    for row in _index_rows(catalog, shards):
        entry, dtype = json.loads(row["entry"]), np.dtype(row.pop("token_dtype"))
        old, _ = fetch_shard(job.store, entry, token_dtype=dtype)
        ids = [old.doc_id(position) for position in range(old.num_documents)]
        nothing = np.empty(0, dtype=dtype.newbyteorder("<"))
        tokens = [nothing if i in forgotten else old.tokens(position) for position, i in enumerate(ids)]
        encoded = encode_shard(ids, tokens, level=int(str(entry["compression"]).rpartition(":")[2]))
        new_entry, zip_bytes = put_shard(job.store, encoded, dtype)
        common = {"pool": row["pool"], "shard": encoded.name, "job": job.id}
        places += [
            common | {"position": position, "doc_id": doc_id, "tokens": len(tokens[position])}
            for position, doc_id in enumerate(ids)
        ]
        index.append(
            row
            | common
            | {
                "entry": json.dumps(new_entry, sort_keys=True),
                "replaces": row["shard"],
                "tokens": sum(len(t) for t in tokens),
                "raw_bytes": encoded.raw_bytes,
                "zip_bytes": zip_bytes,
            }
        )
    job.append("shards", places, part=part)
    job.append("shard_index", index, part=part)


def _rewrite_views(job: Job, forgotten: frozenset[bytes]) -> int:
    """Writes every view that names a replaced shard anew, with the new shards in the old ones' places."""
    catalog = Catalog(job.store)
    written = catalog.rows("SELECT shard, replaces, entry, tokens FROM raw.shard_index WHERE job = ?", [job.id])
    news = {row["replaces"]: (row["shard"], json.loads(row["entry"]), row["tokens"]) for row in written}
    lost = catalog.rows(
        "SELECT shard, count(*) AS n FROM shards WHERE doc_id IN (SELECT unnest(?::BLOB[])) AND shard IN (SELECT unnest(?)) GROUP BY shard",
        [sorted(forgotten), sorted(news)],
    )
    lost_by_shard = {row["shard"]: row["n"] for row in lost}
    rows, shard_rows = [], []
    for view in catalog.rows("SELECT * EXCLUDE (written_at) FROM views ORDER BY tier_version, pool, tier"):
        members = catalog.rows(
            "SELECT * FROM view_shards WHERE tier_version = ? AND pool = ? AND tier = ? AND job = ? ORDER BY position",
            [view["tier_version"], view["pool"], view["tier"], view["job"]],
        )
        old_entries = read_index(job.store.get(view["object"]))
        if not any(member["shard"] in news for member in members):
            continue
        index = []
        for member, entry in zip(members, old_entries, strict=True):
            if member["shard"] in news:
                old = member["shard"]
                member["shard"], entry, member["tokens"] = news[old]
                member["documents"] -= lost_by_shard.get(old, 0)
            index.append(entry)
            shard_rows.append(member | {"job": job.id})
        data = index_json(index)
        folder = f"views/{view['tier_version']:06d}/{view['pool']}"
        path = f"{folder}/{view['tier']}-{xxhash.xxh3_128_hexdigest(data)}/index.json"
        job.store.put_content(path, data)
        sums = {name: sum(member[name] for member in members) for name in ("documents", "tokens")}
        rows.append(view | sums | {"object": path, "job": job.id})
    job.append("view_shards", shard_rows, part=1)
    job.append("views", rows, part=1)
    return len(rows)


def _matching(catalog: Catalog, predicate: str, *, with_rephrased: bool) -> pa.Table:
    chosen = f"SELECT doc_id FROM ({documents_with_tiers(NEWEST)}) WHERE (\n{predicate}\n)"
    if with_rephrased:
        chosen = f"WITH c AS ({chosen}) SELECT doc_id FROM c UNION SELECT doc_id FROM documents WHERE parent_id IN (SELECT doc_id FROM c)"
    return catalog.query(
        f"SELECT doc_id, corpus, license, access FROM documents WHERE doc_id IN ({chosen}) ORDER BY doc_id"
    )


def _begun(catalog: Catalog, job: Job) -> pa.Table:
    """The documents that an earlier attempt of the job wrote tombstones of."""
    return catalog.query(
        "SELECT doc_id, corpus, license, access FROM raw.tombstones WHERE job = ? ORDER BY doc_id", [job.id]
    )


def _ids(documents: pa.Table) -> list[bytes]:
    return list(documents["doc_id"].to_pylist())


def _affected(catalog: Catalog, documents: pa.Table) -> list[str]:
    sql = """
        SELECT DISTINCT shard FROM shards
        WHERE doc_id IN (SELECT unnest(?::BLOB[])) AND tokens > 0
            AND shard IN (SELECT shard FROM view_shards JOIN views USING (tier_version, pool, tier, job))
        ORDER BY shard
    """
    return [row["shard"] for row in catalog.rows(sql, [_ids(documents)])]


def _rephrased(catalog: Catalog, documents: pa.Table) -> int:
    sql = """
        SELECT count(*) AS n FROM documents
        WHERE parent_id IN (SELECT unnest($ids::BLOB[])) AND doc_id NOT IN (SELECT unnest($ids::BLOB[]))
    """
    return int(catalog.rows(sql, {"ids": _ids(documents)})[0]["n"])


def _seen(catalog: Catalog, documents: pa.Table) -> pa.Table:
    sql = """
        WITH places AS MATERIALIZED (
            SELECT DISTINCT shard, position AS shard_position FROM shards WHERE doc_id IN (SELECT unnest(?::BLOB[]))
        ),
        segments AS (
            SELECT list(DISTINCT c.checkpoint) AS ids
            FROM consumption AS c
            JOIN places USING (shard, shard_position)
            WHERE c.shard IN (SELECT shard FROM places)  -- lets the scan pass over the rows of all other shards
        )
        SELECT run, island, count(*) AS checkpoints, min(round) AS first_round, max(round) AS last_round
        FROM descendants((SELECT coalesce(ids, []) FROM segments))
        GROUP BY run, island
        ORDER BY run, island
    """
    return catalog.query(sql, [_ids(documents)])


def _index_rows(catalog: Catalog, shards: Sequence[str]) -> list[dict[str, Any]]:
    """One index row for each shard, with its pool's token type."""
    sql = """
        SELECT i.* EXCLUDE (job), p.token_dtype
        FROM shard_index AS i
        JOIN (SELECT pool, any_value(token_dtype) AS token_dtype FROM pools GROUP BY pool) AS p USING (pool)
        WHERE i.shard IN (SELECT unnest(?))
        QUALIFY row_number() OVER (PARTITION BY i.shard ORDER BY i.job) = 1
        ORDER BY i.shard
    """
    rows = catalog.rows(sql, [list(shards)])
    missing = sorted(set(shards) - {row["shard"] for row in rows})
    if missing:
        raise ObjectMissing(f"shard {missing[0]} stands in a view but not in shard_index of {catalog.store.uri}")
    return rows


def erasure_table(erasure: Erasure) -> pa.Table:
    """The documents to be forgotten, counted by corpus and licence."""
    return (
        erasure.documents.group_by(["corpus", "license", "access"])
        .aggregate([("doc_id", "count")])
        .rename_columns(["corpus", "license", "access", "documents"])
    )
