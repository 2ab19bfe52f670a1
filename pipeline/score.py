"""The job `score`: the influence of every document of the train split on the holdout loss.

It trains a small scoring model on the corpus (scoring_model.py), keeps a few checkpoints of it, and at each compares every document's gradient with those of
folds of the holdout (influence.py). Documents are scored in partitions; an attempt after a crash goes on at the first partition that isn't there.
What the scores are made into is tier.py's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import UserError
from manifests.jobs import Job, Report, make_job, report_nothing
from manifests.policy import rights_inputs, that_may_be_read
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import open_table
from pipeline.scoring_texts import documents_of, draw_sample, encode_documents, holdout_folds
from pipeline.tokenizer import LoadedTokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

    from pipeline.scoring_model import Checkpoint

Tokens = npt.NDArray[Any]
METHODS = ("adam-cosine", "cosine", "adam-dot", "dot")
DEFAULT_MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_BATCH_TOKENS = 2048
_BYTES_PER_TOKEN = 8
"""More than a tokenizer ever makes of one token on average: how much text is enough for a number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreConfig:
    """How documents are scored. Everything but `device` is part of the job's identity."""

    model: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_MODEL))
    """Config of the scoring model, as transformers names it, with `model_type`."""
    model_path: str | None = None
    """Folder of a local model to start from, instead of `model`."""
    tokenizer: str | None = None
    """Id of the tokenizer; None: the only one of the store."""
    steps: int = 240
    """Training steps of the scoring model."""
    batch_size: int = 16
    seq_len: int = 128
    learning_rate: float = 3e-3
    seed: int = 0
    num_checkpoints: int = 2
    """Checkpoints at which documents are scored, evenly over the training."""
    method: str = "adam-cosine"
    """One of METHODS: cosine or dot product, with or without Adam's metric."""
    max_document_tokens: int = 64
    """Tokens of a document that one checkpoint looks at: of a longer one, another window at each checkpoint, from its beginning to its end."""
    num_folds: int = 4
    """Folds of the holdout, for the standard error."""
    max_holdout_documents: int = 1024
    partition_size: int = 2048
    """Documents scored between two commits."""
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method {self.method!r} is none of {', '.join(METHODS)}")
        for name in ("steps", "batch_size", "num_checkpoints", "partition_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("seq_len", "max_document_tokens", "num_folds"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 2 or more")
        if self.max_holdout_documents < self.num_folds:
            raise ValueError(f"max_holdout_documents is {self.max_holdout_documents}, less than num_folds")
        if self.steps < self.num_checkpoints:
            raise ValueError(f"num_checkpoints is {self.num_checkpoints}, more than the {self.steps} steps")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be between 0 and 1")
        if self.model_path is None and "model_type" not in self.model:
            raise ValueError("model has no model_type; name one, such as llama")

    def identity(self) -> dict[str, Any]:
        """What decides the scores: all but where they are computed."""
        return {name: value for name, value in asdict(self).items() if name != "device"}


def score(store: Store, *, config: ScoreConfig, report: Report = report_nothing) -> dict[str, Any]:
    """Scores all documents of the train split against the holdout.

    Returns:
        The job, the method, how many documents were scored and how many couldn't be (fewer than two tokens, or a loss that isn't a number), the share below zero,
        the scoring model's losses, seconds; and `already_done` where the same job was finished before and nothing was changed.

    Raises:
        UserError: there is nothing to score, no holdout, no tokenizer, or the model can't be built.
        Failure: the scoring model diverged, or the text of a document is gone.
    """
    catalog = Catalog(store, rights=rights_of(store, "job:score"))
    tokenizer = load_tokenizer(store, catalog, config.tokenizer)
    ingests = catalog.query("SELECT DISTINCT job FROM documents ORDER BY job").column(0).to_pylist()
    inputs = {"ingest": ingests, "tokenizer": tokenizer.id, "model_files": _fingerprint(config.model_path)}
    inputs |= rights_inputs(catalog.rights)
    job = make_job(store, "score", config=config.identity() | {"tokenizer": tokenizer.id}, inputs=inputs)
    if (done := job.summary()) is not None:
        return done | {"already_done": True}
    started = time.monotonic()
    documents = documents_of(catalog, "train")
    if not len(documents):
        raise UserError(
            f"{store.uri} has no documents to score{that_may_be_read(catalog.rights)}; `atoll ingest` brings them"
        )
    holdout = holdout_folds(catalog, tokenizer, num_folds=config.num_folds, max_documents=config.max_holdout_documents)
    scoring = _Scoring(job, catalog, tokenizer, config, holdout, report)
    scoring.run(documents)
    summary = {
        "job": job.id,
        "method": config.method,
        **_counts(store, job, num_documents=len(documents)),
        **scoring.facts,
        "seconds": round(time.monotonic() - started, 1),
    }
    job.commit(summary)
    return summary | {"already_done": False}


class _Scoring:
    """One attempt at a job."""

    def __init__(
        self,
        job: Job,
        catalog: Catalog,
        tokenizer: LoadedTokenizer,
        config: ScoreConfig,
        holdout: list[list[Tokens]],
        report: Report,
    ) -> None:
        from pipeline.scoring_model import build_model, choose_device, parameter_groups

        self._job, self._catalog, self._tokenizer, self._config = job, catalog, tokenizer, config
        self._holdout, self._report = holdout, report
        self._device = choose_device(config.device)
        self._model: Any = build_model(
            config.model,
            config.model_path,
            vocab_size=tokenizer.vocab_size,
            longest=max(config.seq_len, config.max_document_tokens),
            seed=config.seed,
            device=self._device,
        )
        self._groups = parameter_groups([name for name, _ in self._model.named_parameters()], self._model)
        self.facts: dict[str, Any] = {
            "holdout_documents": sum(len(fold) for fold in holdout),
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "checkpoints": [],
        }

    def run(self, documents: pa.Table) -> None:
        """Appends all partitions that aren't there yet."""
        checkpoints = self._checkpoints(documents)
        targets = [self._targets(k, checkpoint) for k, checkpoint in enumerate(checkpoints)]
        size = self._config.partition_size
        parts = range(1, -(-len(documents) // size) + 1)
        finished = open_table(self._job.store, "influence").transaction_version(f"job/{self._job.id}/influence") or 0
        for part in parts:
            self._report("score", min((part - 1) * size, len(documents)), len(documents))
            if part > finished:
                rows = self._score_part(documents.slice((part - 1) * size, size), checkpoints, targets)
                self._job.append("influence", rows, part=part)
        self._report("score", len(documents), len(documents))

    def _checkpoints(self, documents: pa.Table) -> list[Checkpoint]:
        """From the store; trained first where they aren't all there."""
        from pipeline.scoring_model import Checkpoint, pack, train

        config, store = self._config, self._job.store
        paths = [f"scoring/{self._job.id}/checkpoint-{k}.safetensors" for k in range(config.num_checkpoints)]
        if not all(store.exists(path) for path in paths):
            num_tokens = config.steps * config.batch_size * config.seq_len
            sample = draw_sample(documents, num_bytes=num_tokens * _BYTES_PER_TOKEN, seed=config.seed)
            trained = train(
                self._model,
                pack(
                    list(encode_documents(self._catalog, self._tokenizer, sample).values()),
                    num_tokens=num_tokens,
                    seed=config.seed,
                ),
                batch_size=config.batch_size,
                seq_len=config.seq_len,
                learning_rate=config.learning_rate,
                num_checkpoints=config.num_checkpoints,
                report=self._report,
            )
            for path, checkpoint in zip(paths, trained, strict=True):
                store.put_content(path, checkpoint.to_bytes())
        # What lies there counts, also where another attempt wrote it: all partitions are scored by the same checkpoints.
        return [Checkpoint.from_bytes(store.get(path)).to(self._device) for path in paths]

    def _targets(self, k: int, checkpoint: Checkpoint) -> list[dict[str, torch.Tensor]]:
        """The holdout gradient of each fold at a checkpoint."""
        from pipeline.influence import mean_gradient, pad

        folds, losses = [], []
        for fold in self._holdout:
            batches = (pad(windows, device=self._device) for _, windows in self._windows(fold, k))
            gradient, loss = mean_gradient(self._model, checkpoint.parameters, batches)
            folds.append(gradient)
            losses.append(loss)
        self.facts["checkpoints"].append(
            {
                "step": checkpoint.step,
                "learning_rate": checkpoint.learning_rate,
                "train_loss": round(checkpoint.train_loss, 4),
                "holdout_loss": round(float(np.mean(losses)), 4),
            }
        )
        return folds

    def _score_part(
        self, documents: pa.Table, checkpoints: Sequence[Checkpoint], targets: list[list[dict[str, torch.Tensor]]]
    ) -> pa.Table:
        import torch

        from pipeline.influence import adam_preconditioner, agreement, combine, document_gradients, pad

        ids = documents["doc_id"].combine_chunks()
        encoded = encode_documents(self._catalog, self._tokenizer, ids)
        sequences = [encoded[doc_id] for doc_id in ids.to_pylist()]
        adam, form = "adam" in self._config.method, "cosine" if "cosine" in self._config.method else "dot"
        scores_DKF = torch.full((len(sequences), len(checkpoints), len(self._holdout)), torch.nan)
        for k, checkpoint in enumerate(checkpoints):
            scale = adam_preconditioner(checkpoint.second_moments) if adam else None
            for places, windows in self._windows(sequences, k):
                gradients, _ = document_gradients(
                    self._model, checkpoint.parameters, *pad(windows, device=self._device)
                )
                found = agreement(gradients, targets[k], form=form, preconditioner=scale, groups=self._groups)  # type: ignore[arg-type]
                scores_DKF[places, k] = found.float().cpu()
        score_D, stderr_D = combine(scores_DKF, [checkpoint.learning_rate for checkpoint in checkpoints])
        kept = torch.isfinite(score_D) & torch.isfinite(stderr_D)
        return self._rows(ids.filter(pa.array(kept.numpy())), score_D[kept].numpy(), stderr_D[kept].numpy())

    def _rows(self, ids: Any, scores: npt.NDArray[np.float64], stderrs: npt.NDArray[np.float64]) -> pa.Table:
        same = {
            "method": self._config.method,
            "checkpoint": f"scoring/{self._job.id}",
            "probe": f"holdout, {sum(map(len, self._holdout))} documents in {len(self._holdout)} folds",
            "scored_at": datetime.now(UTC),
            "direct": True,
            "job": self._job.id,
        }
        own = {"doc_id": ids, "score": pa.array(scores), "stderr": pa.array(stderrs)}
        schema = TABLES["influence"].schema
        columns = [own[f.name] if f.name in own else pa.array([same[f.name]] * len(ids), f.type) for f in schema]
        return pa.Table.from_arrays(columns, schema=schema)

    def _windows(self, sequences: Sequence[Tokens], k: int) -> Iterator[tuple[list[int], list[Tokens]]]:
        """Places and windows of the documents at checkpoint k, batch by batch."""
        from pipeline.influence import batches_by_length, window

        longest, last = self._config.max_document_tokens, self._config.num_checkpoints - 1
        windows = [window(tokens, longest=longest, at=k / last if last else 0.0) for tokens in sequences]
        for places in batches_by_length([len(w) for w in windows], size=max(1, _BATCH_TOKENS // longest)):
            yield places, [windows[place] for place in places]


def _counts(store: Store, job: Job, *, num_documents: int) -> dict[str, Any]:
    sql = "SELECT count(*) AS scored, coalesce(avg((score < 0)::INT), 0) AS share_negative FROM raw.influence WHERE job = ?"
    row = Catalog(store).rows(sql, [job.id])[0]
    return {
        "documents": row["scored"],
        "unscored": num_documents - row["scored"],
        "share_negative": round(row["share_negative"], 4),
    }


def _fingerprint(model_path: str | None) -> list[list[Any]]:
    """Name, size and time of change of each file of a local model."""
    files = sorted(path for path in Path(model_path).glob("*") if path.is_file()) if model_path is not None else []
    return [[path.name, (stat := path.stat()).st_size, stat.st_mtime_ns] for path in files]
