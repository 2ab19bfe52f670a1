"""Tokenizers of a store: trained on its own texts, or taken from elsewhere; kept by content, loaded by id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-untyped]

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.jobs import Job, Report, make_job, report_nothing
from manifests.policy import rights_inputs, that_may_be_read
from manifests.store import Store, first_line
from pipeline.texts import read_texts

EOS = "<|endoftext|>"
EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
"""Tokens that end a document in one family of models or another, the likeliest first."""
MAX_TRAIN_BYTES = 20_000_000
_SMALLEST = 257  # every byte, and the end of a document
_FILE = "tokenizer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTokenizer:
    """A tokenizer, ready to turn documents into token arrays."""

    tokenizer: Tokenizer
    id: str
    """xxh3-128 of its tokenizer.json, hex."""
    eos_id: int
    vocab_size: int

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """The narrowest of uint16 and uint32 (little-endian) that holds every token."""
        return np.dtype("<u2") if self.vocab_size <= 65536 else np.dtype("<u4")

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """The tokens of each text, with the end-of-document token behind them and nowhere else."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, self.eos_id], self.token_dtype) for encoding in encodings]


def train_tokenizer(
    store: Store,
    catalog: Catalog,
    *,
    vocab_size: int,
    report: Report = report_nothing,
    max_bytes: int = MAX_TRAIN_BYTES,
) -> str:
    """Trains a byte-level BPE tokenizer on texts of the train split, and returns its id. The same texts give the same tokenizer.

    Where there is more text than `max_bytes`, the documents of the lowest ids are taken: by the hash, a random sample that is always the same.

    Raises:
        UserError: the vocabulary is too small, or there is nothing to train on.
    """
    if vocab_size < _SMALLEST:
        raise UserError(
            f"vocabulary size {vocab_size} is too small; the bytes and the end of a document take {_SMALLEST}"
        )
    jobs = catalog.query("SELECT DISTINCT job FROM documents ORDER BY job").column(0).to_pylist()
    config = {"vocab_size": vocab_size, "max_bytes": max_bytes}
    job = make_job(store, "tokenizer", config=config, inputs={"jobs": jobs} | rights_inputs(catalog.rights))
    if (done := job.summary()) is not None:
        return str(done["tokenizer"])
    sample = catalog.query(
        """
        SELECT doc_id FROM (SELECT doc_id, text_bytes, sum(text_bytes) OVER (ORDER BY doc_id) AS so_far FROM documents
                            WHERE split = 'train')
        WHERE so_far <= ? OR so_far = text_bytes
        """,
        [max_bytes],
    )
    if not len(sample):
        raise UserError(
            f"{store.uri} has no documents to train a tokenizer on{that_may_be_read(catalog.rights)}; `atoll ingest` brings them"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for done, (_, text) in enumerate(read_texts(catalog, doc_ids=sample.column(0)), 1):
            yield text
            if done % 1000 == 0 or done == len(sample):
                report("tokenizer", done, len(sample))

    tokenizer.train_from_iterator(texts(), trainer)
    return _save(job, tokenizer.to_str().encode(), eos_id=0, origin="trained here")


def adopt_tokenizer(store: Store, path_or_name: str, *, eos: str | None = None) -> str:
    """Takes over a tokenizer: a tokenizer.json, a folder that has one, or a name on the Hugging Face hub. Returns its id.

    Args:
        eos: the token that ends a document; None: the one that its tokenizer_config.json names, or else the first of EOS_NAMES that it has.

    Raises:
        UserError: there is no tokenizer, or no token to end a document.
    """
    data, config = _fetch(path_or_name)
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as e:  # tokenizers raises Exception itself
        raise UserError(f"tokenizer {path_or_name}: {first_line(e)}; give the path of a tokenizer.json") from e
    named = config.get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    candidates = [eos] if eos else [*([named] if named else []), *EOS_NAMES]
    eos_ids = [number for name in candidates if (number := tokenizer.token_to_id(name)) is not None]
    if not eos_ids:
        raise UserError(
            f"tokenizer {path_or_name} has no token {' or '.join(candidates)} to end a document; name one of its tokens"
        )
    # The job is the content, wherever it came from: the same tokenizer twice is one.
    hash_ = xxhash.xxh3_128_hexdigest(data)
    job = make_job(store, "tokenizer", config={"eos_id": eos_ids[0]}, inputs={"tokenizer": hash_})
    if job.summary() is None:
        _save(job, data, eos_id=eos_ids[0], origin=path_or_name)
    return hash_


def load_tokenizer(store: Store, catalog: Catalog, tokenizer: str | None = None) -> LoadedTokenizer:
    """Loads a tokenizer by its id or the beginning of it; None: the only one that the store has.

    Raises:
        UserError: there is none, there are several to choose from, or none of this id.
        Failure: the object in the store is damaged.
    """
    known = catalog.rows("SELECT DISTINCT ON (tokenizer) * FROM tokenizers ORDER BY tokenizer, job")
    if not known:
        raise UserError(f"{store.uri} has no tokenizer; `atoll tokenizer` makes one")
    found = [row for row in known if row["tokenizer"].startswith(tokenizer or "")]
    if len(found) != 1:
        listed = "; ".join(f"{row['tokenizer']} ({row['vocab_size']} tokens, {row['origin']})" for row in known)
        which = f"no single tokenizer {tokenizer!r}" if tokenizer else f"{len(known)} tokenizers"
        raise UserError(f"{store.uri} has {which}; choose one by its id: {listed}")
    row = found[0]
    data = store.get(row["object"])
    if xxhash.xxh3_128_hexdigest(data) != row["tokenizer"]:
        raise Failure(
            f"{store.uri}/{row['object']} is damaged: its content isn't its name; put back the tokenizer from {row['origin']}"
        )
    loaded = Tokenizer.from_str(data.decode())
    # A text that spells out a special token must not end its document: special tokens in texts are plain text.
    loaded.encode_special_tokens = True
    loaded.no_truncation()
    loaded.no_padding()
    return LoadedTokenizer(tokenizer=loaded, id=row["tokenizer"], eos_id=row["eos_id"], vocab_size=row["vocab_size"])


def _save(job: Job, data: bytes, *, eos_id: int, origin: str) -> str:
    hash_ = xxhash.xxh3_128_hexdigest(data)
    path = f"tokenizers/{hash_}/{_FILE}"
    # One more than the highest id: some vocabularies have holes.
    vocab_size = max(Tokenizer.from_str(data.decode()).get_vocab(with_added_tokens=True).values()) + 1
    row = {
        "tokenizer": hash_,
        "object": path,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "origin": origin,
        "job": job.id,
    }
    job.store.put_content(path, data)
    job.append("tokenizers", [row], part=1)
    job.commit({"tokenizer": hash_, "vocab_size": vocab_size, "eos_id": eos_id})
    return hash_


def _fetch(path_or_name: str) -> tuple[bytes, dict[str, Any]]:
    """Content of the tokenizer.json, and the tokenizer_config.json beside it, where there is one."""
    path = Path(path_or_name)
    if path.is_dir():
        path = path / _FILE
    if path.is_file():
        beside = path.with_name("tokenizer_config.json")
        return path.read_bytes(), _config(beside)
    if path_or_name.startswith((".", "/", "~")) or path_or_name.endswith(".json"):
        raise UserError(
            f"tokenizer {path}: there is no such file; give a tokenizer.json, its folder, or a name on the hub"
        )
    return _fetch_from_hub(path_or_name)


def _fetch_from_hub(name: str) -> tuple[bytes, dict[str, Any]]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    try:
        data = Path(hf_hub_download(name, _FILE)).read_bytes()
    except (EntryNotFoundError, HFValidationError, RepositoryNotFoundError) as e:
        raise UserError(
            f"tokenizer {name}: neither a file here nor on the hub with a {_FILE} ({first_line(e)}); check the name"
        ) from e
    except Exception as e:  # no network, in one of many shapes
        raise Failure(
            f"tokenizer {name}: the hub can't be reached ({first_line(e)}); give a local tokenizer.json"
        ) from e
    try:
        return data, _config(Path(hf_hub_download(name, "tokenizer_config.json")))
    except EntryNotFoundError:
        return data, {}


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as e:
        raise UserError(f"{path} is not JSON ({e}); mend it, or take it away") from e
