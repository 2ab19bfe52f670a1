"""The tables: what a row is and what its columns mean. Everything that reads or writes a table follows from here.

Ids are 16-byte xxh3-128 hashes. Times are UTC microseconds. A row of a batch table carries the `job` that wrote it and
counts once that job's row stands in `jobs`; a row of `consumption` carries the `checkpoint` that closed its segment and counts
once that checkpoint's row stands in `checkpoints`. So half a job is never seen: the views (catalog.py) hide it.

A table carries the version of its schema. A version may only add columns that can be null, at the end: then older rows read as null there,
and an older Atoll refuses the table instead of misreading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

SCHEMA_VERSION = 2
"""Version of the store as a whole. 1 had no pool places in `consumption`."""
TIERS = ("S", "A", "B", "C")
Encoding = Literal["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"]

_ID = pa.binary()
_TEXT = pa.string()
_TIME = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """One table: its columns, and which rows count."""

    name: str
    row: str
    """What one row is."""
    schema: pa.Schema
    counts_with: Literal["job", "checkpoint"] | None
    """The column whose committed parent makes a row count; None: every row counts once it is appended."""
    version: int = 1
    """Version of this table's schema; goes up by one with every column that is added."""
    partition_by: tuple[str, ...] = ()
    """Columns that part the files: what most questions name one value of."""
    sort_by: tuple[str, ...] = ()
    """Order of the rows within an append; none: as they come."""
    newest_by: tuple[str, ...] = ()
    """Columns that name a thing of which only the newest row counts; none: every row does."""
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    """Parquet encoding of columns that the default one (dictionary) stores badly."""


def _field(
    name: str, type_: pa.DataType, meaning: str, *, null: bool = False, unit: str | None = None
) -> pa.Field[pa.DataType]:
    metadata = {"meaning": meaning} | ({"unit": unit} if unit else {})
    return pa.field(name, type_, nullable=null, metadata=metadata)


_JOB = _field("job", _TEXT, "the job that wrote the row")
_RUN = _field("run", _TEXT, "name of the run")
_ISLAND = _field("island", pa.int32(), "number of the island, from 0; -1 is the global state")
_INCARNATION = _field("incarnation", pa.int32(), "how often this island had been started before")
_DOC = _field("doc_id", _ID, "xxh3-128 of the normalised text")
_TIER = _field("tier", _TEXT, "S, A, B or C")
_AT = _field("written_at", _TIME, "when the row was written")


def _per_tier(
    prefix: str, type_: pa.DataType, meaning: str, *, unit: str | None = None, null: bool = False
) -> list[pa.Field[pa.DataType]]:
    return [
        _field(f"{prefix}_{tier.lower()}", type_, f"{meaning}, tier {tier}", unit=unit, null=null) for tier in TIERS
    ]


def _spec(
    name: str,
    row: str,
    fields: list[pa.Field[pa.DataType]],
    counts_with: Literal["job", "checkpoint"] | None = None,
    *,
    partition_by: tuple[str, ...] = (),
    sort_by: tuple[str, ...] = (),
    newest_by: tuple[str, ...] = (),
    encodings: Mapping[str, Encoding] | None = None,
    version: int = 1,
) -> TableSpec:
    return TableSpec(
        name=name,
        version=version,
        row=row,
        schema=pa.schema(fields),
        counts_with=counts_with,
        partition_by=partition_by,
        sort_by=sort_by,
        newest_by=newest_by,
        encodings=encodings or {},
    )


_SHARD = _field("shard", _TEXT, "xxh3-128 of the raw shard, hex")
# All documents of a shard share these: so a question by corpus or licence needs no join with documents, and what an island may not read is left
# out of its index as whole shards.
_KIND = [
    _field("corpus", _TEXT, "name of the corpus"),
    _field("origin", _TEXT, "real or synthetic"),
    _field("generator", _TEXT, "model or program that wrote a synthetic document", null=True),
    _field("prompt", _TEXT, "kind of a synthetic document: faq, math, table, tutorial, …", null=True),
    _field("license", _TEXT, "licence, `unknown` where the source names none"),
    _field("access", _TEXT, "policy label"),
]


_SPECS = [
    _spec(
        "jobs",
        "one finished batch job",
        [
            _JOB,
            _field("kind", _TEXT, "ingest, tokenizer, score, tier, shard or forget"),
            _field("command", _TEXT, "the command line that ran it"),
            _field("config", _TEXT, "its resolved configuration, JSON"),
            _field("inputs", _TEXT, "versions of the tables that it read, JSON"),
            _field("summary", _TEXT, "what came out, JSON"),
            _field("code_version", _TEXT, "version of Atoll"),
            _field("started_at", _TIME, "start of the attempt that finished it"),
            _AT,
        ],
    ),
    _spec(
        "sources",
        "one file or data set that was ingested",
        [
            _field("source_uri", _TEXT, "where it lies"),
            _field("format", _TEXT, "finephrase, cosmopedia, parquet, jsonl or datasets"),
            _field("options", _TEXT, "column map and reader options, JSON"),
            _field("corpus", _TEXT, "name of the corpus"),
            _field("rows", pa.int64(), "rows read"),
            _field("documents", pa.int64(), "new documents"),
            _field("duplicates", pa.int64(), "documents dropped since the store had their text"),
            _field("rejected", pa.int64(), "rows without usable text"),
            _JOB,
        ],
        "job",
    ),
    _spec(
        "documents",
        "one document",
        [
            _DOC,
            _field("corpus", _TEXT, "name of the corpus"),
            _field("origin", _TEXT, "real or synthetic"),
            _field("generator", _TEXT, "model or program that wrote a synthetic document", null=True),
            _field("prompt", _TEXT, "kind of a synthetic document: faq, math, table, tutorial, …", null=True),
            _field("parent_id", _ID, "doc_id of the document that it was rephrased from", null=True),
            _field("license", _TEXT, "licence, `unknown` where the source names none"),
            _field("access", _TEXT, "policy label"),
            _field(
                "split",
                _TEXT,
                "train, holdout, or holdout_derived (rephrased from a holdout document; never trained on)",
            ),
            _field(
                "label", _TEXT, "truth about the document, where the source carries one; for evaluation only", null=True
            ),
            _field("finish_reason", _TEXT, "why the generator stopped; `length` means cut off", null=True),
            _field("text_bytes", pa.int64(), "size of the UTF-8 text", unit="bytes"),
            _field("tokens", pa.int64(), "tokens by the source's own count", null=True, unit="tokens"),
            _field("source_uri", _TEXT, "the source that holds the text"),
            _field("source_row", pa.int64(), "row in that source, from 0"),
            _JOB,
        ],
        "job",
    ),
    _spec(
        "tokenizers",
        "one tokenizer",
        [
            _field("tokenizer", _TEXT, "xxh3-128 of its tokenizer.json"),
            _field("object", _TEXT, "where the tokenizer.json lies in the store"),
            _field("vocab_size", pa.int32(), "number of tokens"),
            _field("eos_id", pa.int32(), "token that ends a document"),
            _field("origin", _TEXT, "trained here, or the path or name that it was loaded from"),
            _JOB,
        ],
        "job",
    ),
    _spec(
        "influence",
        "one score of one document",
        [
            _DOC,
            _field("method", _TEXT, "name of the estimator"),
            _field("score", pa.float64(), "influence; positive lowers the holdout loss"),
            _field("stderr", pa.float64(), "standard error of the score"),
            _field("checkpoint", _TEXT, "scoring model and its checkpoints"),
            _field("probe", _TEXT, "holdout that it was held against"),
            _field("scored_at", _TIME, "when"),
            _field("direct", pa.bool_(), "measured; false: predicted by the distilled scorer"),
            _JOB,
        ],
        "job",
    ),
    _spec(
        "tier_versions",
        "one assignment of all scored documents to tiers",
        [
            _field("tier_version", pa.int32(), "number, from 1"),
            _field("method", _TEXT, "estimator whose scores were used"),
            _field("parameters", _TEXT, "share of S, confidence of C, …, JSON"),
            _field("thresholds", _TEXT, "what came out of the scores, JSON"),
            _JOB,
        ],
        "job",
    ),
    _spec(
        "tiers",
        "one document in one tier version",
        [
            _field("tier_version", pa.int32(), "number, from 1"),
            _DOC,
            _TIER,
            _field("score", pa.float64(), "the score that decided"),
            _field("method", _TEXT, "estimator"),
            _JOB,
        ],
        "job",
        partition_by=("tier_version",),
        sort_by=("tier", "doc_id"),
    ),
    _spec(
        "pools",
        "one pool of shards: the corpus under one tokenizer",
        [
            _field("pool", _TEXT, "name, made of tokenizer and token type"),
            _field("tokenizer", _TEXT, "xxh3-128 of the tokenizer.json"),
            _field("token_dtype", _TEXT, "uint16 or uint32, little-endian"),
            _JOB,
        ],
        "job",
    ),
    _spec(
        "shards",
        "one document's place in the pool",
        [
            _field("pool", _TEXT, "name of the pool"),
            _SHARD,
            _field("position", pa.int32(), "place within the shard, from 0"),
            _DOC,
            _field("tokens", pa.int32(), "tokens, the closing end-of-document token included", unit="tokens"),
            _JOB,
        ],
        "job",
        sort_by=("shard", "position"),
    ),
    _spec(
        "shard_index",
        "one shard and its entry for an MDS index.json",
        [
            _field("pool", _TEXT, "name of the pool"),
            _SHARD,
            _field("tier", _TEXT, "tier of its documents when it was written, or holdout"),
            *_KIND,
            _field("entry", _TEXT, "MDS index entry, JSON"),
            _field("documents", pa.int32(), "documents in the shard"),
            _field("tokens", pa.int64(), "tokens in the shard", unit="tokens"),
            _field("raw_bytes", pa.int64(), "uncompressed size", unit="bytes"),
            _field("zip_bytes", pa.int64(), "size in the pool", unit="bytes"),
            _field("score_low", pa.float64(), "lowest score of the band when it was written"),
            _field("score_high", pa.float64(), "highest score of the band when it was written"),
            _field(
                "replaces", _TEXT, "shard that this one was written in the place of, to forget documents", null=True
            ),
            _JOB,
        ],
        "job",
    ),
    _spec(
        "views",
        "one tier of one tier version, as an MDS index over pool shards",
        [
            _field("tier_version", pa.int32(), "number, from 1"),
            _field("pool", _TEXT, "name of the pool"),
            _TIER,
            _field("object", _TEXT, "where the index.json lies in the store"),
            _field("shards", pa.int32(), "shards in the view"),
            _field("documents", pa.int64(), "documents in the view"),
            _field("tokens", pa.int64(), "tokens in the view", unit="tokens"),
            _JOB,
            _AT,
        ],
        "job",
        newest_by=("tier_version", "pool", "tier"),
    ),
    _spec(
        "view_shards",
        "one shard of a view",
        [
            _field("tier_version", pa.int32(), "number, from 1"),
            _field("pool", _TEXT, "name of the pool"),
            _TIER,
            _SHARD,
            _field("position", pa.int32(), "place within the view's index, from 0"),
            _field("documents", pa.int32(), "documents in the shard"),
            _field("tokens", pa.int64(), "tokens in the shard", unit="tokens"),
            _JOB,
        ],
        "job",
    ),
    _spec(
        "runs",
        "one training run, or one branch of a run",
        [
            _RUN,
            _field("parent_run", _TEXT, "the run that this one branches from", null=True),
            _field("config", _TEXT, "its whole configuration, JSON"),
            _field("branch", _TEXT, "what a rollback took back and where it starts from, JSON", null=True),
            _field("command", _TEXT, "the command line that made it"),
            _field("code_version", _TEXT, "version of Atoll"),
            _AT,
        ],
    ),
    _spec(
        "mixtures",
        "one decision on an island's mix",
        [
            _RUN,
            _ISLAND,
            _INCARNATION,
            _field("round", pa.int32(), "first round that uses it"),
            _field("strategy", _TEXT, "aggressive, balanced, conservative, adaptive or uniform"),
            *_per_tier("weight", pa.float64(), "share of the sequences"),
            _field("reason", _TEXT, "why"),
            _field("tier_version", pa.int32(), "number, from 1"),
            _field("query", _TEXT, "the SQL that computed the weights"),
            _field("parameters", _TEXT, "what it was asked with, JSON"),
            _field("inputs", _TEXT, "versions of the tables that it read, JSON"),
            _AT,
            _field(
                "weights",
                _TEXT,
                "share of the sequences by group, JSON; the tiers' are in the columns, too, which hold NaN where the groups are others",
                null=True,
            ),
        ],
        version=2,
    ),
    _spec(
        "flags",
        "one edition of a document's flag; the newest one counts",
        [
            _DOC,
            _field("flagged", pa.bool_(), "whether islands pass the document over from their next round on"),
            _field("predicate", _TEXT, "SQL condition that it was chosen by"),
            _field("reason", _TEXT, "why"),
            _AT,
        ],
        newest_by=("doc_id",),
    ),
    _spec(
        "strategies",
        "one edition of a strategy; the newest one of a name counts",
        [
            _field("strategy", _TEXT, "its name"),
            *_per_tier("weight", pa.float64(), "share of the sequences to start with", null=True),
            _field("learning_rate", pa.float64(), "how fast effectiveness moves the weights; 0: they stay"),
            _field("weight_floor", pa.float64(), "least weight of a tier that has any"),
            _field("step_cap", pa.float64(), "largest change of a weight in one decision, as a share of it"),
            _field("reason", _TEXT, "why it was set so"),
            _AT,
            _field(
                "exploration",
                pa.float64(),
                "standard errors by which a tier is taken for better than it's known to be",
                null=True,
            ),
        ],
        newest_by=("strategy",),
        version=2,
    ),
    _spec(
        "consumption",
        "one span of one document in one step",
        [
            _RUN,
            _ISLAND,
            _INCARNATION,
            _field("step", pa.int64(), "inner step of the island, from 1"),
            _field("position", pa.int32(), "first token's place in the step's batch", unit="tokens"),
            # The document by its place in the pool: 16 bytes of a hash would be more than all other columns together.
            _SHARD,
            _field("shard_position", pa.int32(), "the document's place within the shard, from 0"),
            _TIER,
            _field("origin", _TEXT, "real or synthetic"),
            _field("token_start", pa.int32(), "first token's place in the document", unit="tokens"),
            _field("tokens", pa.int32(), "length of the span", unit="tokens"),
            _field("loss", pa.float32(), "mean loss of the span's tokens", null=True, unit="nats per token"),
            _field("checkpoint", _ID, "the checkpoint that closes the segment"),
            _field(
                "contribution",
                pa.float32(),
                "first-order contribution of the span to the drop of the holdout loss at that step; null where not measured",
                null=True,
                unit="nats per token",
            ),
        ],
        "checkpoint",
        version=2,
        partition_by=("run",),
        encodings={
            "step": "DELTA_BINARY_PACKED",
            "position": "DELTA_BINARY_PACKED",
            "loss": "BYTE_STREAM_SPLIT",
            "contribution": "BYTE_STREAM_SPLIT",
        },
    ),
    _spec(
        "consumption_rounds",
        "the spans of one shard in one segment, summed up; derived from consumption",
        [
            _RUN,
            _ISLAND,
            _field("checkpoint", _ID, "the checkpoint that closes the segment"),
            _SHARD,
            _TIER,
            _field("origin", _TEXT, "real or synthetic"),
            _field("first_step", pa.int64(), "first step of these spans"),
            _field("last_step", pa.int64(), "last step of these spans"),
            _field("spans", pa.int64(), "number of spans"),
            _field("tokens", pa.int64(), "tokens of the spans", unit="tokens"),
            _field("loss_tokens", pa.int64(), "tokens of the spans that have a loss", unit="tokens"),
            _field("loss_sum", pa.float64(), "sum of tokens times loss over these", unit="nats"),
        ],
        "checkpoint",
        partition_by=("run",),
        sort_by=("tier", "shard"),
    ),
    _spec(
        "feedback",
        "one island's message",
        [
            _RUN,
            _ISLAND,
            _field("sequence", pa.int64(), "number of the message, from 1, in this run and island"),
            _field("round", pa.int32(), "round that it closes"),
            _field(
                "loss_trend",
                pa.float64(),
                "change of the mean training loss against the message before; 0 in the first",
            ),
            _field(
                "convergence_rate",
                pa.float64(),
                "slope of the training loss' logarithm over the sequences; of the loss itself where convergence_error is null",
                unit="1/sequence",
            ),
            _field("generalization_gap", pa.float64(), "holdout loss less training loss", unit="nats"),
            *_per_tier(
                "effectiveness",
                pa.float64(),
                "descent of the training loss since the message before",
                unit="nats",
                null=True,
            ),
            _field("step_time_s", pa.float64(), "median time of an inner step", unit="seconds"),
            _AT,
            _field("convergence_error", pa.float64(), "standard error of convergence_rate", null=True),
            *_per_tier("effectiveness_error", pa.float64(), "standard error", unit="nats", null=True),
            _field(
                "upload_bps", pa.float64(), "median rate of the outer gradients sent", unit="bits/second", null=True
            ),
            _field("latency_s", pa.float64(), "median time of a small request to the store", unit="seconds", null=True),
        ],
        version=2,
    ),
    _spec(
        "checkpoints",
        "one recoverable point of an island, or of the global state (island -1)",
        [
            _field("checkpoint", _ID, "its id"),
            _RUN,
            _ISLAND,
            _INCARNATION,
            _field("round", pa.int32(), "rounds finished"),
            _field("step", pa.int64(), "inner steps taken; for the global state, the sum over what was merged"),
            _field("tokens", pa.int64(), "tokens trained on up to here, by the island's own counter", unit="tokens"),
            *_per_tier(
                "tokens", pa.int64(), "tokens trained on up to here, by the island's own counter", unit="tokens"
            ),
            _field("clock", pa.list_(pa.int32()), "version seen of every fragment"),
            _field("parent", _ID, "the checkpoint before, null for the first", null=True),
            _field("merged", pa.list_(_ID), "for the global state: last island checkpoints that went into it"),
            _field(
                "object",
                _TEXT,
                "where the parameters lie in the store; empty: nowhere, they follow from the checkpoint before by its stream and `inputs`",
            ),
            _field("hash", _TEXT, "xxh3-128 of that object, hex"),
            _field("size_bytes", pa.int64(), "size of that object", unit="bytes"),
            _field("stream", _TEXT, "cursor of the stream, JSON"),
            _field("mixture", _TEXT, "strategy and weights, JSON"),
            _field("anchor", pa.bool_(), "kept for rollback; other checkpoints give up their object to the next one"),
            _field("loss", pa.float64(), "mean training loss of the segment", null=True, unit="nats per token"),
            _field("holdout_loss", pa.float64(), "loss on the holdout", null=True, unit="nats per token"),
            _AT,
            _field(
                "inputs",
                _TEXT,
                "what came from outside in the round: merges received, by step, and noise in what was told, JSON",
                null=True,
            ),
        ],
        version=2,
    ),
    _spec(
        "events",
        "one thing that happened",
        [
            _RUN,
            _field("kind", _TEXT, "island_joined, island_died, merge, switch, branch, finished, …"),
            _field("island", pa.int32(), "number of the island", null=True),
            _field("fragment", pa.int32(), "number of the fragment", null=True),
            _field("version", pa.int32(), "version of the fragment", null=True),
            _field("round", pa.int32(), "round of the island", null=True),
            _field("detail", _TEXT, "what else is known, JSON"),
            _AT,
        ],
    ),
    _spec(
        "policies",
        "one edition of the policy; the newest one counts",
        [
            _field("policy", _TEXT, "xxh3-128 of its text"),
            _field("text", _TEXT, "the policy, TOML"),
            _field("reason", _TEXT, "why it was set"),
            _AT,
        ],
    ),
    _spec(
        "tombstones",
        "one document that was forgotten",
        [
            _DOC,
            _field("corpus", _TEXT, "name of the corpus"),
            _field("license", _TEXT, "licence that it had"),
            _field("access", _TEXT, "policy label that it had"),
            _field("predicate", _TEXT, "SQL condition that it was forgotten by"),
            _field("reason", _TEXT, "why"),
            _JOB,
            _AT,
        ],
        "job",
    ),
]

TABLES: dict[str, TableSpec] = {spec.name: spec for spec in _SPECS}
