"""What comes of a run: its global model as a folder that others load, and its holdout loss by domain."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors import SafetensorError

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.jobs import code_version
from manifests.mds import read_index, shard_name
from manifests.policy import that_may_be_read
from manifests.schemas import TIERS
from manifests.store import Store, first_line
from trainer.feed import HOLDOUT
from trainer.model import build_model, holdout_loss, parameters_of, pick_device
from trainer.rights import ReadableShards, island_rights
from trainer.run import GLOBAL, Run, load_run
from trainer.stream import NEVER, GroupStream
from trainer.tape import Followed, anatomy_of, read_global, snapshots

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DOMAINS = """
WITH places AS (
    SELECT DISTINCT shard, position, doc_id, tokens FROM shards WHERE pool = ? AND shard IN (SELECT unnest(?))
),
named AS (
    SELECT doc_id, coalesce(CAST((
{by}
    ) AS VARCHAR), 'none') AS domain
    FROM documents WHERE doc_id IN (SELECT doc_id FROM places)
)
-- A text that the store holds under several labels is measured once.
SELECT p.shard, p.position, any_value(p.tokens) AS tokens, min(n.domain) AS domain
FROM places AS p JOIN named AS n USING (doc_id) GROUP BY p.shard, p.position
"""
"""Each holdout document's place, tokens and domain. Parameters: pool, shards."""


def export_model(store: Store, run_name: str, out: Path, *, merge: int | None = None, dtype: str = "float32") -> int:
    """Writes the global model after a merge as a Hugging Face folder, with its tokenizer and `atoll.json`, which says where it comes from.

    Args:
        store: the store.
        run_name: name of the run.
        out: the folder; it appears whole or not at all.
        merge: number of the merge; None: the newest.
        dtype: float32 or bfloat16.

    Returns:
        Number of the merge.

    Raises:
        UserError: the folder exists, there is no such run, it has not begun, or the dtype is another one.
        Failure: the run hasn't got to that merge, an object in the store is gone or damaged, or the folder can't be written.
    """
    if dtype not in _DTYPES:
        raise UserError(f"dtype is {dtype!r}; it is one of {', '.join(_DTYPES)}")
    if os.path.lexists(out):
        raise UserError(f"{out} exists and stays as it is; name another folder with --out, or remove it")
    run = load_run(store, run_name)
    model, followed = _global_model(run, merge)
    catalog = Catalog(store)
    tokenizer, eos_id = _load_tokenizer(run, catalog)
    _name_end_of_document(model, eos_id)
    origin = _origin(run, catalog, followed)
    with _written_whole(out) as folder:
        model.to(_DTYPES[dtype]).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "atoll.json").write_text(json.dumps(origin, indent=2) + "\n")
    return followed.merge


def evaluate_domains(
    store: Store, run_name: str, *, merge: int | None, sequences: int, by: str, device: str
) -> pa.Table:
    """The holdout loss of the global parameters after a merge, domain by domain. A domain's sequences are made of its own documents alone.

    Args:
        store: the store.
        run_name: name of the run.
        merge: number of the merge; None: the newest.
        sequences: sequences that are measured of each domain, at most.
        by: SQL expression over the columns of documents that names the domain of each; where it's NULL, the domain is `none`.
        device: cpu, cuda, cuda:N or auto.

    Returns:
        One row for each domain, in the order of their names, and the last for all of them: documents and tokens that the holdout has of it, sequences that were
        measured, loss in nats per token, perplexity. The loss of all weighs each domain by its tokens, however many of them were measured.
        Of a domain with fewer tokens than a sequence's the loss is null, and none that counts for all.

    Raises:
        UserError: there is no such run, it has not begun, its holdout can't be read, or an option is wrong.
        Failure: the run hasn't got to that merge, or an object in the store is gone or damaged.
    """
    if sequences < 1:
        raise UserError(f"sequences is {sequences}; it must be 1 or more")
    run = load_run(store, run_name)
    config = dataclasses.replace(run.config, device=device)
    holdout = _read_holdout(run, Catalog(store), by)
    model, followed = _global_model(run, merge)
    on = pick_device(config.device)
    model.to(on)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(holdout.domains):
        which = holdout.domain_of == number
        tokens = int(holdout.tokens[which].sum())
        count = min(sequences, tokens // config.seq_len)
        loss = None
        if count:
            loss = holdout_loss(model, _take(run, holdout, which, count).to(on))
        rows.append({"domain": name, "documents": int(which.sum()), "sequences": count, "tokens": tokens, "loss": loss})
    measured = [row for row in rows if row["loss"] is not None]
    weight = sum(row["tokens"] for row in measured)
    loss = sum(row["loss"] * row["tokens"] for row in measured) / weight if measured else None
    sums = {name: sum(row[name] for row in rows) for name in ("documents", "sequences", "tokens")}
    rows.append({"domain": "all", **sums, "loss": loss})
    known = {"run": run.name, "merge": followed.merge}
    table = pa.Table.from_pylist([known | row for row in rows], schema=_EVALUATION)
    return table.append_column("perplexity", pc.exp(table["loss"]))


_EVALUATION = pa.schema(
    [
        ("run", pa.string()),
        ("merge", pa.int64()),
        ("domain", pa.string()),
        ("documents", pa.int64()),
        ("sequences", pa.int64()),
        ("tokens", pa.int64()),
        ("loss", pa.float64()),
    ]
)


def _global_model(run: Run, merge: int | None) -> tuple[Any, Followed]:
    """The run's model with the global parameters after a merge in it."""
    if not snapshots(run):
        raise UserError(f"run {run.name} has not begun; `atoll train --run {run.name}` begins it")
    model = build_model(run.config)
    followed = read_global(run, anatomy_of(run, model), merge=merge)
    own = parameters_of(model)
    for fragment in followed.parameters:
        for name, value in fragment.items():
            own[name].copy_(value)
    return model, followed


# Export.


@contextmanager
def _written_whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name at the end, or is gone where it doesn't come to that."""
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except (OSError, SafetensorError) as e:
        raise Failure(f"{out} can't be written: {first_line(e)}; mend it, or name another folder with --out") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _load_tokenizer(run: Run, catalog: Catalog) -> tuple[PreTrainedTokenizerFast, int]:
    """The tokenizer of the run's pool, and the number of its token that ends a document."""
    from tokenizers import Tokenizer  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    sql = "SELECT object, eos_id, origin FROM pools JOIN tokenizers USING (tokenizer) WHERE pool = ? LIMIT 1"
    rows = catalog.rows(sql, [run.config.pool])
    assert rows, "a run is configured by its pool's tokenizer"
    path, eos_id, origin = (rows[0][name] for name in ("object", "eos_id", "origin"))
    data = run.store.get(path)
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as e:  # tokenizers raises Exception itself
        raise Failure(
            f"{run.store.uri}/{path} is damaged: {first_line(e)}; put back the tokenizer from {origin}"
        ) from e
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokenizer.id_to_token(eos_id)), eos_id


def _name_end_of_document(model: Any, eos_id: int) -> None:
    """Tells the model's configurations which token ends a document: one that was made here carries numbers of transformers' own, which mean other tokens."""
    for config in (model.config, model.generation_config):
        known = config.eos_token_id
        if eos_id not in (known if isinstance(known, list) else [known]):
            config.bos_token_id = config.eos_token_id = eos_id


def _origin(run: Run, catalog: Catalog, followed: Followed) -> dict[str, Any]:
    """Where an exported model comes from."""
    return {
        "run": run.name,
        "parent_run": run.branch.parent_run if run.branch is not None else None,
        "store": run.store.uri,
        "merge": followed.merge,
        "clock": followed.versions,
        "last_checkpoint": _last_checkpoint(run, catalog, followed.merge),
        "code_version": code_version(),
    }


def _last_checkpoint(run: Run, catalog: Catalog, merge: int) -> dict[str, Any] | None:
    """The last global checkpoint up to a merge, with what had been trained on by then; a branch has those before it from its parent."""
    counts = ["step", "tokens", *(f"tokens_{tier.lower()}" for tier in TIERS)]
    # The objects' names hold the numbers of their merges, and so come in their order.
    sql = f"""
        SELECT lower(hex(checkpoint)) AS checkpoint, object, {", ".join(counts)}, holdout_loss FROM checkpoints
        WHERE run = ? AND island = {GLOBAL} AND object <= ? ORDER BY object DESC LIMIT 1
    """
    while True:
        rows = catalog.rows(sql, [run.name, run.snapshot_path(merge)])
        if rows:
            found = rows[0]
            path = PurePosixPath(found.pop("object"))
            return {"run": run.name, "merge": int(path.stem)} | found
        if run.branch is None:
            return None
        merge = min(merge, run.branch.merge)
        run = load_run(run.store, run.branch.parent_run, catalog=catalog)


# Evaluation.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holdout:
    """The holdout documents that every island of a run may read. The columns have a row for each document."""

    entries: list[dict[str, Any]]
    """Index entries of the shards."""
    forbidden: frozenset[str]
    """Shards that are passed over."""
    domains: list[str]
    """Names of the domains, ascending."""
    domain_of: npt.NDArray[np.int64]
    """Number of each document's domain."""
    places: npt.NDArray[np.int64]
    """Each document's place in the shards, one after the other."""
    tokens: npt.NDArray[np.int64]


def _read_holdout(run: Run, catalog: Catalog, by: str) -> _Holdout:
    """What the run measures itself on (feed.py's holdout_tokens), cut into domains."""
    config = run.config
    rights = island_rights(config, catalog, *range(config.num_islands))
    views = catalog.rows(
        "SELECT object FROM views WHERE tier_version = ? AND pool = ? AND tier = ?",
        [config.tier_version, config.pool, HOLDOUT],
    )
    view = read_index(run.store.get(views[0]["object"])) if views else []
    entries, forbidden = ReadableShards(config, catalog, rights).select(view)
    names = [shard_name(entry) for entry in entries]
    try:
        found = catalog.query(_DOMAINS.format(by=by), [config.pool, [name for name in names if name not in forbidden]])
    except UserError as e:
        raise UserError(f"by {by!r} must be an SQL expression over the columns of documents: {e}") from e
    if found.num_rows == 0:
        may = that_may_be_read(rights.both)
        mend = "widen a rule of the policy" if may else "ingest with --holdout-share"
        raise UserError(f"tier version {config.tier_version} has no holdout documents{may}; {mend}")
    starts = np.cumsum([0, *(int(entry["samples"]) for entry in entries)])
    start_of = dict(zip(names, starts[:-1].tolist(), strict=True))
    start = np.array([start_of[name] for name in found["shard"].to_pylist()], dtype=np.int64)
    domains, domain_of = np.unique(np.array(found["domain"].to_pylist(), dtype=object), return_inverse=True)
    return _Holdout(
        entries=entries,
        forbidden=forbidden,
        domains=domains.tolist(),
        domain_of=domain_of,
        places=start + found["position"].to_numpy(),
        tokens=found["tokens"].to_numpy().astype(np.int64),
    )


def _take(run: Run, holdout: _Holdout, which: npt.NDArray[np.bool_], count: int) -> torch.Tensor:
    """The first sequences of some documents, (count, seq_len): of all of them those that the run measures itself on."""
    config = run.config
    seen = np.full(sum(int(entry["samples"]) for entry in holdout.entries), NEVER, dtype=np.uint8)
    seen[holdout.places[which]] = 0
    nowhere = dict.fromkeys((shard_name(entry) for entry in holdout.entries), HOLDOUT)
    stream = GroupStream(
        run.store,
        holdout.entries,
        name=HOLDOUT,
        token_dtype=np.dtype(config.token_dtype),
        key="holdout",
        origins=nowhere,  # spans aren't looked at
        tiers=nowhere,
        seen=seen,
        forbidden=holdout.forbidden,
    )
    with closing(stream):
        sequences = [stream.take(config.seq_len).tokens for _ in range(count)]
    return torch.from_numpy(np.stack(sequences).astype(np.int64))
