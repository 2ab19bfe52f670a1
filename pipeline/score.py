"""The job `score`: the influence of every document of the train split on the holdout loss.

It trains a small scoring model on the corpus (scoring_model.py) or takes checkpoints as they are, makes of each the direction in which the holdout loss falls
(estimators.py), and compares every document's gradient with it (influence.py), partition by partition (scoring.py) on an engine (engine.py). An attempt after a crash
goes on at the first partition that isn't there. What the scores are made into is tier.py's.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import UserError
from manifests.jobs import Job, Report, canonical_json, make_parted_job, report_nothing
from manifests.policy import rights_inputs, that_may_be_read
from manifests.store import Store
from manifests.tables import open_table
from pipeline.engine import Engine, InProcess
from pipeline.score_config import OF_THE_MODEL, ScoreConfig
from pipeline.scoring_texts import (
    Partition,
    Probes,
    count_documents,
    draw_by_corpus,
    draw_sample,
    encode_documents,
    holdout_probes,
    partitions,
)
from pipeline.tokenizer import LoadedTokenizer, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.influence import Direction, Form
    from pipeline.scoring import Task
    from pipeline.scoring_model import Checkpoint

Tokens = npt.NDArray[Any]
_BYTES_PER_TOKEN = 8
"""More than a tokenizer ever makes of one token on average: how much text is enough for a number of tokens."""
_MAX_SOURCES = 16
"""Corpora whose gradients are compared with each other."""


def score(
    store: Store, *, config: ScoreConfig, engine: Engine | None = None, report: Report = report_nothing
) -> dict[str, Any]:
    """Scores the documents of the train split against the holdout.

    Args:
        engine: where partitions are worked on; None: in this process. The scores are the same bit for bit on the same kind of processor.

    Returns:
        The job, the method, how many documents were scored and how many weren't, by reason (too short, a repetition of the holdout, a loss that isn't a number), the share
        below zero, the probes with their weights, the scoring model's losses, how far the corpora's gradients agree, seconds; and `already_done` where the same
        job was finished before and nothing was changed.

    Raises:
        UserError: there is nothing to score, no holdout, no such probe, no tokenizer, or the model can't be built or doesn't fit the tokenizer.
        Failure: the scoring model diverged, or the text of a document is gone.
    """
    catalog = Catalog(store, rights=rights_of(store, "job:score"))
    if config.checkpoint_job is not None:
        config = _as_trained_by(catalog, config, config.checkpoint_job)
    tokenizer = load_tokenizer(store, catalog, config.tokenizer)
    ingests = catalog.query("SELECT DISTINCT job FROM documents ORDER BY job").column(0).to_pylist()
    models = [config.model_path, *config.checkpoint_paths, config.base_path]
    inputs = {"ingest": ingests, "tokenizer": tokenizer.id, "model_files": [_fingerprint(path) for path in models]}
    inputs |= rights_inputs(catalog.rights)
    job = make_parted_job(store, "score", config=config.identity() | {"tokenizer": tokenizer.id}, inputs=inputs)
    if (done := job.summary()) is not None:
        return done | {"already_done": True}
    started = time.monotonic()
    num_documents = count_documents(catalog, "train")
    if not num_documents:
        raise UserError(
            f"{store.uri} has no documents to score{that_may_be_read(catalog.rights)}; `atoll ingest` brings them"
        )
    probes, too_small = holdout_probes(
        catalog, tokenizer, num_folds=config.num_folds, max_documents=config.max_holdout_documents
    )
    weights = _probe_weights(probes, config.probes)
    scoring = _Scoring(job, catalog, tokenizer, config, {name: probes[name] for name in weights}, weights, report)
    num_wanted = min(num_documents, config.sample or num_documents)
    scoring.run(engine or InProcess(), num_wanted)
    summary = {
        "job": job.id,
        "method": config.method,
        **score_counts(store, job, num_wanted=num_wanted),
        "left_out": scoring.left_out(),
        "probes": {name: round(weight, 4) for name, weight in weights.items()},
        "corpora_without_probe": too_small,
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
        probes: Probes,
        weights: Mapping[str, float],
        report: Report,
    ) -> None:
        from pipeline.gradients import linear_layers
        from pipeline.scoring_model import build_model, choose_device

        self._job, self._catalog, self._tokenizer, self._config = job, catalog, tokenizer, config
        self._probes, self._weights, self._report = probes, weights, report
        self._device = choose_device(config.device)
        self._model_path = config.checkpoint_paths[0] if config.checkpoint_paths else config.model_path
        self._longest = max(config.seq_len, config.max_document_tokens)
        self._model: Any = build_model(
            config.model,
            self._model_path,
            vocab_size=tokenizer.vocab_size,
            longest=self._longest,
            seed=config.seed,
            device=self._device,
        )
        try:
            self._layers = linear_layers(self._model, config.layers)
        except ValueError as e:
            raise UserError(f"scoring model {self._model_path or dict(config.model)}: {e}; choose another") from e
        self.facts: dict[str, Any] = {
            "holdout_documents": sum(len(fold) for folds in probes.values() for fold in folds),
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
        }

    def run(self, engine: Engine, num_wanted: int) -> None:
        """Appends all partitions that aren't there yet."""
        from pipeline.scoring import score_partition

        task, store = self._prepare(), self._job.store
        finished = open_table(store, "influence").transaction_version(f"job/{self._job.id}/influence") or 0
        done = 0

        def missing() -> Iterator[Partition]:
            nonlocal done
            for part in partitions(
                Catalog(store, rights=self._catalog.rights),
                size=self._config.partition_size,
                sample=self._config.sample,
                seed=self._config.seed,
            ):
                if part.number > finished:
                    yield part
                else:
                    done += len(part.ids)

        self._report("score", 0, num_wanted)
        for scored in engine.map(partial(score_partition, task), missing(), name=lambda part: part.name):
            # Before the rows: a partition that lies there is never counted again.
            store.put_content(self._left_out_path(scored.number), canonical_json(scored.left_out).encode())
            self._job.append("influence", scored.rows, part=scored.number)
            done += scored.rows.num_rows + sum(scored.left_out.values())
            self._report("score", done, num_wanted)

    def left_out(self) -> dict[str, int]:
        """Documents without a score, by reason, over all partitions."""
        total: Counter[str] = Counter()
        for info in self._job.store.list(f"scoring/{self._job.id}/left-out/"):
            total.update(json.loads(self._job.store.get(info.path)))
        return dict(sorted(total.items()))

    def _left_out_path(self, number: int) -> str:
        return f"scoring/{self._job.id}/left-out/{number:08d}.json"

    def _prepare(self) -> Task:
        """All that workers find in the store, made where it isn't there; what lies there counts, so that all partitions are scored alike."""
        import safetensors.numpy

        from pipeline.comparer import default_threads
        from pipeline.overlap import holdout_hashes, ngrams_path
        from pipeline.scoring import Task, direction_path

        config, store, job = self._config, self._job.store, self._job.id
        checkpoints = self._checkpoints()
        facts_path = f"scoring/{job}/facts.json"
        names = [direction_path(job, k) for k in range(len(checkpoints))]
        if not all(store.exists(path) for path in [*names, ngrams_path(job), facts_path]):
            documents = [tokens for folds in self._probes.values() for fold in folds for tokens in fold]
            store.put_content(ngrams_path(job), safetensors.numpy.save({"ngrams": holdout_hashes(documents)}))
            facts = []
            for k, (path, checkpoint) in enumerate(zip(names, checkpoints, strict=True)):
                self._report("compare with the holdout", k, len(checkpoints))
                direction, found = self._direction(k, checkpoint)
                store.put_content(path, direction.to_bytes())
                facts.append(found)
            store.put_content(facts_path, canonical_json(facts).encode())
        self.facts["checkpoints"] = json.loads(store.get(facts_path))
        count = sum(len(fold) for folds in self._probes.values() for fold in folds)
        return Task(
            store=store.uri,
            job=job,
            tokenizer=self._tokenizer.id,
            model=json.dumps(dict(config.model), sort_keys=True),
            model_path=self._model_path,
            seed=config.seed,
            num_checkpoints=len(checkpoints),
            num_folds=config.num_folds,
            form=_form(config),
            method=config.method,
            probe=f"holdout, {count} documents: " + ", ".join(f"{name} {w:.3g}" for name, w in self._weights.items()),
            probe_weights=tuple(self._weights.values()),
            longest=config.max_document_tokens,
            sequence_length=self._longest,
            device=config.device,
            num_threads=default_threads(self._device),
        )

    def _checkpoints(self) -> list[Checkpoint]:
        """From the store; made first where they aren't all there."""
        from pipeline.scoring import checkpoint_path
        from pipeline.scoring_model import Checkpoint

        store, number = self._job.store, self._config.resolved_num_checkpoints
        paths = [checkpoint_path(self._job.id, k) for k in range(number)]
        if not all(store.exists(path) for path in paths):
            for path, checkpoint in zip(paths, self._make_checkpoints(number), strict=True):
                store.put_content(path, checkpoint.to_bytes())
        return [Checkpoint.from_bytes(store.get(path)).to(self._device) for path in paths]

    def _make_checkpoints(self, number: int) -> Iterator[Checkpoint]:
        from pipeline.scoring import checkpoint_path
        from pipeline.scoring_model import Checkpoint, finished_checkpoint, pack, train

        config = self._config
        if config.checkpoint_job is not None:
            paths = [checkpoint_path(config.checkpoint_job, k) for k in range(config.num_checkpoints)]
            yield from (Checkpoint.from_bytes(self._job.store.get(path)) for path in paths[-number:])
            return
        if config.checkpoint_paths:
            yield from (finished_checkpoint(path, like=self._model) for path in config.checkpoint_paths)
            return
        num_tokens = config.steps * config.batch_size * config.seq_len
        sample = draw_sample(self._catalog, num_bytes=num_tokens * _BYTES_PER_TOKEN, seed=config.seed)
        documents = list(encode_documents(self._catalog, self._tokenizer, sample).values())
        yield from train(
            self._model,
            pack(documents, num_tokens=num_tokens, seed=config.seed),
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            learning_rate=config.learning_rate,
            num_checkpoints=number,
            report=self._report,
        )

    def _direction(self, k: int, checkpoint: Checkpoint) -> tuple[Direction, dict[str, Any]]:
        """What documents are compared with at a checkpoint, and what is to be told of it."""
        from pipeline.estimators import curved_direction, fit_curvature, trajectory_direction
        from pipeline.gradients import mean_gradient

        config = self._config
        gradients, losses = [], {}
        for name, folds in self._probes.items():
            found = []
            for fold in folds:
                batches = self._batches(fold, k)
                weights = self._changes(batches, checkpoint)
                gradient, losses_D = mean_gradient(self._model, checkpoint.parameters, self._layers, batches, weights)
                gradients.append(gradient)
                found.append(float(losses_D.mean()))
            losses[name] = round(float(np.mean(found)), 4)
        facts: dict[str, Any] = {
            "step": checkpoint.step,
            "learning_rate": checkpoint.learning_rate,
            "train_loss": round(checkpoint.train_loss, 4) if np.isfinite(checkpoint.train_loss) else None,
            "holdout_loss": losses,
        } | self._agreement(k, checkpoint, gradients)
        if config.resolved_metric == "ekfac":
            sample = draw_sample(
                self._catalog,
                num_bytes=config.curvature_documents * 4 * _BYTES_PER_TOKEN * config.max_document_tokens,
                seed=config.seed,
            )[: config.curvature_documents]
            documents = list(encode_documents(self._catalog, self._tokenizer, sample).values())
            curvature = fit_curvature(
                self._model, checkpoint.parameters, self._layers, self._batches(documents, k), rank=config.projection, seed=config.seed
            )  # fmt: skip
            return curved_direction(checkpoint.learning_rate, gradients, curvature, damping=config.damping), facts
        return trajectory_direction(
            self._model,
            gradients,
            learning_rate=checkpoint.learning_rate,
            second_moments=checkpoint.second_moments if config.resolved_metric == "adam" else None,
            rank=config.projection,
            seed=config.seed,
        ), facts

    def _agreement(self, k: int, checkpoint: Checkpoint, columns: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Cosines between the mean gradients of the corpora, and of the holdout's probes."""
        from pipeline.gradients import mean_gradient
        from pipeline.influence import cosines

        config = self._config
        if not config.source_documents:
            return {}
        drawn = draw_by_corpus(
            self._catalog, num_each=config.source_documents, max_corpora=_MAX_SOURCES, seed=config.seed
        )
        named = {}
        for corpus, ids in drawn.items():
            batches = self._batches(list(encode_documents(self._catalog, self._tokenizer, ids).values()), k)
            if batches:
                named[corpus] = mean_gradient(self._model, checkpoint.parameters, self._layers, batches)[0]
        folds = config.num_folds
        for number, probe in enumerate(self._probes):
            own = columns[number * folds : (number + 1) * folds]
            named[f"holdout: {probe}"] = {layer: sum(c[layer] for c in own) / folds for layer in own[0]}  # type: ignore[misc]
        return {"sources": list(named), "source_cosines": cosines(list(named.values()))}

    def _changes(self, batches: Sequence[tuple[Tensor, Tensor]], checkpoint: Checkpoint) -> list[Tensor] | None:
        """How much each holdout document's loss has changed since the base model, where there is one."""
        import torch

        from pipeline.gradients import document_losses
        from pipeline.scoring_model import finished_checkpoint

        if self._config.base_path is None:
            return None
        base = finished_checkpoint(self._config.base_path, like=self._model).to(self._device)
        with torch.no_grad():
            return [
                (
                    document_losses(self._model, base.parameters, *batch)
                    - document_losses(self._model, checkpoint.parameters, *batch)
                ).abs()
                for batch in batches
            ]

    def _batches(self, documents: Sequence[Tokens], k: int) -> list[tuple[Tensor, Tensor]]:
        from pipeline.comparer import windows_at
        from pipeline.gradients import pad

        config = self._config
        windows = windows_at(
            documents, k, num_checkpoints=config.resolved_num_checkpoints, longest=config.max_document_tokens
        )
        return [pad(batch, device=self._device) for _, batch in windows]


def _as_trained_by(catalog: Catalog, config: ScoreConfig, job: str) -> ScoreConfig:
    """The configuration with all that concerns the scoring model taken from an earlier job."""
    rows = catalog.rows("SELECT job, config FROM jobs WHERE kind = 'score' AND starts_with(job, ?)", [job])
    if len(rows) != 1:
        raise UserError(
            f"score job {job!r}: {'there is no such finished job' if not rows else 'several begin so'}; "
            "`atoll sql \"SELECT job FROM jobs WHERE kind = 'score'\"` lists them"
        )
    (row,) = rows
    told = json.loads(row["config"])
    if told.get("checkpoint_paths") or "steps" not in told:
        raise UserError(f"score job {row['job']} trained no model; name its checkpoints' folders instead")
    # A job that took its model from another has copies of the checkpoints that it used, not always of all.
    if told.get("checkpoint_job"):
        return _as_trained_by(catalog, config, told["checkpoint_job"])
    if told["estimator"] == "reverse":
        told["num_checkpoints"] = 1
    taken = {name: told[name] for name in OF_THE_MODEL}
    return replace(config, checkpoint_job=row["job"], **taken)


def _form(config: ScoreConfig) -> Form:
    return config.form  # type: ignore[return-value]


def _probe_weights(probes: Probes, wanted: Mapping[str, float] | None) -> dict[str, float]:
    """Weight of each probe, summing to 1; only those that have any."""
    given = wanted if wanted is not None else {name: sum(map(len, folds)) for name, folds in probes.items()}
    unknown = sorted(set(given) - set(probes))
    if unknown:
        raise UserError(
            f"probe {unknown[0]!r} is no corpus of the holdout with enough documents; there are: {', '.join(probes)}"
        )
    total = sum(given.values())
    return {name: given[name] / total for name in probes if given.get(name)}


def score_counts(store: Store, job: Job, *, num_wanted: int) -> dict[str, Any]:
    """How many of the documents wanted a job has scored and not scored, and the share of its scores below zero."""
    sql = "SELECT count(*) AS scored, coalesce(avg((score < 0)::INT), 0) AS share_negative FROM raw.influence WHERE job = ?"
    row = Catalog(store).rows(sql, [job.id])[0]
    return {
        "documents": row["scored"],
        "unscored": num_wanted - row["scored"],
        "share_negative": round(row["share_negative"], 4),
    }


def _fingerprint(model_path: str | None) -> list[list[Any]]:
    """Name, size and time of change of each file of a local model."""
    files = sorted(path for path in Path(model_path).glob("*") if path.is_file()) if model_path is not None else []
    return [[path.name, (stat := path.stat()).st_size, stat.st_mtime_ns] for path in files]
