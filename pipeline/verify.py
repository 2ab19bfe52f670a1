"""Verifying a tier version's views: is every shard whole, every document where the tables say, and every token that of its text?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import ObjectMissing, UserError
from manifests.jobs import Report, report_nothing
from manifests.mds import CorruptShard, DecodedShard
from manifests.shards import fetch_shard
from manifests.store import Store
from pipeline.bands import tokenise
from pipeline.pool import find_tier_version, pool_of
from pipeline.tokenizer import LoadedTokenizer, load_tokenizer
from pipeline.views import Member, members_of

_BATCH_DOCUMENTS = 10_000
"""Documents whose tokens are held against their texts together: as many texts are read from a source in one go."""
_BATCH_SHARDS = 32
"""Shards whose rows are asked for together: each asking goes through the whole table."""
_MEND = "delete the object, then run `atoll shard` of a new tier version"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong."""

    shard: str
    position: int | None
    """The document's place in it; None: it's the shard."""
    finding: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was looked at."""

    tier_version: int
    shards: int
    documents: int
    compared: int
    """Documents whose tokens were held against their texts."""
    findings: list[Finding]


def verify(
    store: Store,
    *,
    tier_version: int | None = None,
    tokenizer: str | None = None,
    sample: int | None = None,
    report: Report = report_nothing,
) -> Verified:
    """Looks at every shard of a tier version's views.

    Args:
        tier_version: None: the newest.
        sample: hold only so many documents' tokens against their texts, chosen by their ids; None: all.

    Raises:
        UserError: no such tier version, or it has no views.
        Failure: a source of a text has changed or gone.
    """
    catalog = Catalog(store, rights=rights_of(store, "job:shard"))
    loaded = load_tokenizer(store, catalog, tokenizer)
    version = find_tier_version(catalog, tier_version)
    pool = pool_of(loaded)
    members = members_of(catalog, version, pool)
    if not members:
        raise UserError(
            f"tier version {version} has no views in pool {pool}; `atoll shard` or `atoll retier` writes them"
        )
    verifier = _Verifier(catalog, loaded, share=_share(members, sample))
    for start in range(0, len(members), _BATCH_SHARDS):
        verifier.look_at(members[start : start + _BATCH_SHARDS])
        report("shards verified", min(start + _BATCH_SHARDS, len(members)), len(members))
    verifier.compare_texts()
    verifier.findings += _misplaced(catalog, version, pool)
    return Verified(
        tier_version=version,
        shards=len(members),
        documents=verifier.documents,
        compared=verifier.compared,
        findings=verifier.findings,
    )


def _share(members: Sequence[Member], sample: int | None) -> float:
    return 1.0 if sample is None else min(1.0, sample / max(1, sum(member.documents for member in members)))


class _Verifier:
    def __init__(self, catalog: Catalog, tokenizer: LoadedTokenizer, *, share: float) -> None:
        self._catalog, self._tokenizer, self._share = catalog, tokenizer, share
        self._waiting: dict[bytes, tuple[str, int, npt.NDArray[Any]]] = {}
        self.documents = self.compared = 0
        self.findings: list[Finding] = []

    def look_at(self, members: Sequence[Member]) -> None:
        """The shards' bytes, and their documents against the tables."""
        sql = "SELECT DISTINCT shard, position, doc_id, tokens FROM shards WHERE shard IN (SELECT unnest(?::VARCHAR[])) ORDER BY shard, position"
        said: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self._catalog.rows(sql, [[member.shard for member in members]]):
            said[row["shard"]].append(row)
        for member in members:
            self._look_at_shard(member, said[member.shard])

    def _look_at_shard(self, member: Member, said: Sequence[dict[str, Any]]) -> None:
        try:
            decoded, _ = fetch_shard(self._catalog.store, member.entry, token_dtype=self._tokenizer.token_dtype)
        except ObjectMissing:
            self._find(member, None, f"the object is missing; {_MEND}")
            return
        except CorruptShard as e:
            self._find(member, None, f"{e}; {_MEND}")
            return
        if len(said) != decoded.num_documents:
            self._find(member, None, f"it holds {decoded.num_documents} documents, the table shards says {len(said)}")
            return
        self.documents += len(said)
        for row in said:
            self._look_at_document(member, decoded, row)
        if len(self._waiting) >= _BATCH_DOCUMENTS:
            self.compare_texts()

    def _look_at_document(self, member: Member, decoded: DecodedShard, row: dict[str, Any]) -> None:
        position, doc_id = row["position"], row["doc_id"]
        if (found := decoded.doc_id(position)) != doc_id:
            self._find(member, position, f"document {found.hex()} lies where the table shards says {doc_id.hex()}")
        elif (num := decoded.num_tokens(position)) != row["tokens"]:
            self._find(member, position, f"the document has {num} tokens, the table shards says {row['tokens']}")
        elif num and xxhash.xxh3_64_intdigest(doc_id, seed=1) < self._share * 2**64:
            # A forgotten document's place has no tokens, and nobody has its text.
            self._waiting[doc_id] = (member.shard, position, np.array(decoded.tokens(position)))

    def compare_texts(self) -> None:
        """Holds the tokens that wait against their texts."""
        if not self._waiting:
            return
        tokens = tokenise(self._catalog, self._tokenizer, pa.array(list(self._waiting), pa.binary()))
        for doc_id, (shard, position, stored) in self._waiting.items():
            if not np.array_equal(tokens[doc_id], stored):
                self.findings.append(
                    Finding(
                        shard=shard,
                        position=position,
                        finding=f"the tokens of document {doc_id.hex()} aren't those of its text",
                    )
                )
        self.compared += len(self._waiting)
        self._waiting.clear()

    def _find(self, member: Member, position: int | None, finding: str) -> None:
        self.findings.append(Finding(shard=member.shard, position=position, finding=finding))


def _misplaced(catalog: Catalog, version: int, pool: str) -> Iterator[Finding]:
    """Documents that stand in another tier's view than the tier version says, in several, or in none."""
    rows = catalog.ask("misplaced_documents", version=version, pool=pool).to_pylist()
    by_reason: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_reason[row["finding"]].append(row)
    for reason, documents in by_reason.items():
        first = documents[0]
        yield Finding(
            shard=first["shard"] or "",
            position=first["position"],
            finding=f"{len(documents):,} documents {reason}, such as {first['doc_id'].hex()}",
        )
