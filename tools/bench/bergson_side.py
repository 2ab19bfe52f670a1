"""bergson's side of the influence benchmark: its scores and its speed on the documents and the model that ours get.

`PYTHON tools/bench/bergson_side.py SPEC.json OUT.json` runs under an interpreter that has bergson and imports nothing of Atoll. bergson wants
transformers 5 and we are held at 4, so it has an environment of its own, which borrows torch, datasets and the rest from ours:

    python3.11 -m venv BERGSON && echo OURS/lib/python3.11/site-packages > BERGSON/lib/python3.11/site-packages/shared.pth
    BERGSON/bin/pip install --no-deps bergson==2.5.1 transformers==5.0.0 huggingface_hub==1.13.0 httpx anyio sniffio jaxtyping wadler-lindig \\
        ml_dtypes natsort peft petname simple-parsing docstring-parser torchopt optree graphviz

Its bitsandbytes and torchaudio are not needed on CPU.

SPEC: `model` (folder of a causal language model and its tokenizer), `documents` (JSONL of {"input_ids": [...]}), `queries` (likewise, each with "group"),
`methods`, `max_tokens`, `seed`, `device`; optional: `batch_tokens`, the padded tokens of a batch (default 4096), and `threads` (default 2).
A method is a name of `METHODS`, or a name with settings of its own: `ekfac:damping=0.001,reduction=mean`.

OUT: `scores` (for each method and document one score per group, groups in ascending order: positive where training on the document lowers the group's mean loss),
`seconds` (for each method its phases; `load` is the loading of model and data, which bergson does anew for each phase), `cpu_seconds` (likewise, for a machine that
others use too), `documents_per_s` (all phases but
`load`), `documents_per_s_scoring` (the pass over the documents alone, query and curvature given), `startup_s`, `peak_rss_bytes`, `groups`, `settings`, `version`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One method of bergson's and its settings."""

    pipeline: str
    """`similarity`, `trackstar`, `trak`, or a Kronecker-factored curvature: `kfac`, `tkfac`, `shampoo`."""
    cosine: bool = False
    """`similarity`: cosine, not dot product."""
    reduction: str = "sum"
    """A document's loss is the `sum` (bergson's default) or the `mean` of its tokens'."""
    projection: int = 0
    """Side of each layer's projected gradient, for `trak` the length of the whole projected gradient; 0: unprojected."""
    damping: float = 0.1
    """Added to the curvature's eigenvalues, as a share of their mean. Scores depend on it much in small models."""
    corrected: bool = True
    """Kronecker-factored: with corrected eigenvalues (the E of EK-FAC)."""
    mix: int = 1000
    """`trackstar`: components that count less because they are common to the queries; 0: curvature of the documents alone."""
    steps: int = 0
    """Kronecker-factored: conjugate gradient steps that refine the solution."""
    step_documents: int = 64
    """Documents whose curvature these steps see."""


METHODS = {
    "dot": Method(pipeline="similarity"),
    "cosine": Method(pipeline="similarity", cosine=True),
    "cosine_projected": Method(pipeline="similarity", cosine=True, projection=16),
    "trackstar": Method(pipeline="trackstar", projection=16),
    "trak": Method(pipeline="trak", projection=1024),
    "ekfac": Method(pipeline="kfac"),
    "shampoo": Method(pipeline="shampoo"),
    "ekfac_cg": Method(pipeline="kfac", steps=5),
}


def read_method(text: str) -> Method:
    """A method as the spec writes it: a name, or `name:setting=value,setting=value`."""
    name, _, settings = text.partition(":")
    if name not in METHODS:
        raise ValueError(f"method {name!r}: none of {', '.join(METHODS)}")
    method = METHODS[name]
    changes: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in asdict(method):
            raise ValueError(f"method {text!r}: no setting {key!r}; there are {', '.join(asdict(method))}")
        kind = type(getattr(method, key))
        changes[key] = value.lower() in ("1", "true") if kind is bool else kind(value)
    return replace(method, **changes)


class Clock:
    """Seconds by phase; a phase within a phase counts for itself alone."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = self._cpu_since = 0.0

    def _book(self) -> None:
        now, cpu_now = time.perf_counter(), time.process_time()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
            self.cpu_seconds[self._running[-1]] += cpu_now - self._cpu_since
        self._since, self._cpu_since = now, cpu_now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time of the body to `name`."""
        self._book()
        self._running.append(name)
        try:
            yield
        finally:
            self._book()
            self._running.pop()

    def watch(self, module: str, function: str, phase: str) -> None:
        """Book every call that `module` makes of `function` to `phase`."""
        owner = import_module(module)
        inner: Callable[..., Any] = getattr(owner, function)

        @wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return inner(*args, **kwargs)

        setattr(owner, function, timed)


WATCHED = (
    *(
        (f"bergson.{name}", "setup_model_and_peft", "load")
        for name in ("build", "score.score", "hessians.hessian_approximations", "cli.trak", "hessians.astra")
    ),
    *(
        (f"bergson.{name}", "setup_data_pipeline", "load")
        for name in ("build", "score.score", "hessians.hessian_approximations", "cli.trak", "hessians.astra")
    ),
    *(
        (f"bergson.{name}", "approximate_hessians", "curvature")
        for name in ("cli.trackstar", "cli.trak", "hessians.pipeline")
    ),
    *((f"bergson.{name}", "score_dataset", "score") for name in ("cli.trackstar", "cli.trak", "hessians.pipeline")),
)
"""Who calls what, and the phase that it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is the same for all methods of a run."""

    model: str
    documents: Path
    queries: Mapping[int, Path]
    """Data set of each group's queries."""
    all_queries: Path
    batch_tokens: int
    seed: int


def read_rows(path: str, max_tokens: int) -> list[dict[str, Any]]:
    """The rows of a JSONL of token sequences.

    Raises:
        ValueError: one is too long.
    """
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for number, row in enumerate(rows, start=1):
        if len(row["input_ids"]) > max_tokens:
            raise ValueError(f"{path}, row {number}: {len(row['input_ids'])} tokens, and max_tokens is {max_tokens}")
    return rows


def save_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write rows as a data set that bergson takes without tokenising."""
    from datasets import Dataset

    ids = [row["input_ids"] for row in rows]
    Dataset.from_dict({"input_ids": ids, "length": [len(row) for row in ids]}).save_to_disk(str(path))
    return path


def index_config(job: Job, method: Method, run: Path, data: Path) -> Any:
    """bergson's description of one pass over `data`."""
    from bergson.config.config import DataConfig, DistributedConfig, IndexConfig

    whole = method.pipeline == "trak"
    return IndexConfig(
        run_path=str(run),
        overwrite=True,
        model=job.model,
        precision="fp32",
        data=DataConfig(dataset=str(data)),
        distributed=DistributedConfig(nnode=1, nproc_per_node=1),
        token_batch_size=job.batch_tokens,
        loss_reduction=method.reduction,
        loss_fn="log_odds" if whole else "ce",
        projection_dim=method.projection,
        projection_target="global" if whole else "per_module",
        projection_seed=job.seed,
    )


def build_queries(job: Job, method: Method, run: Path) -> Path:
    """An index with one row per group, its queries' mean gradient.

    bergson builds one mean per call; the rows are put together in its own format.
    """
    import numpy as np
    from bergson.build import build
    from bergson.cli.commands import Build
    from bergson.config.config import PreprocessConfig
    from bergson.config.config_io import save_run_config
    from bergson.data import load_gradients

    parts = []
    for group, data in job.queries.items():
        part = run / f"query_{group}"
        config = index_config(job, method, part, data)
        mean = PreprocessConfig(aggregation="mean")
        save_run_config(Build(config, mean), config.partial_run_path)
        build(config, mean)
        parts.append(part)
    first = parts[0]
    rows = np.concatenate([np.array(load_gradients(part)) for part in parts])
    rows.tofile(first / "gradients.bin")
    info = json.loads((first / "info.json").read_text())
    (first / "info.json").write_text(json.dumps(info | {"num_grads": len(rows)}))
    return first


def run_similarity(job: Job, method: Method, run: Path, query: Path, clock: Clock) -> None:
    """Dot products or cosines of gradients."""
    from bergson.cli.commands import Score
    from bergson.config.config import PreprocessConfig, ScoreConfig
    from bergson.config.config_io import save_run_config
    from bergson.score.score import score_dataset

    config = index_config(job, method, run / "scores", job.documents)
    score = ScoreConfig(query_path=str(query))
    preprocess = PreprocessConfig(unit_normalize=method.cosine)
    with clock.phase("score"):
        save_run_config(Score(score, config, preprocess), config.partial_run_path)
        score_dataset(config, score, preprocess)


def run_preconditioned(job: Job, method: Method, run: Path, query: Path) -> None:
    """TrackStar, TRAK, or one of the Kronecker-factored curvatures."""
    from bergson.cli.trackstar import trackstar
    from bergson.cli.trak import trak
    from bergson.config.config import (
        AstraConfig,
        HessianConfig,
        HessianPipelineConfig,
        InversionConfig,
        PreprocessConfig,
        QuerySetConfig,
        ScoreConfig,
        TrackstarConfig,
        TrakConfig,
    )
    from bergson.hessians.pipeline import hessian_pipeline

    config = index_config(job, method, run, job.documents)
    given = QuerySetConfig(dataset=str(job.all_queries), path=str(query))
    inversion = InversionConfig(damping_factor=method.damping)
    if method.pipeline == "trackstar":
        preprocess = PreprocessConfig(unit_normalize=True, inversion_cfg=inversion)
        trackstar(
            config,
            TrackstarConfig(
                query=given,
                preprocess_cfg=preprocess,
                target_downweight_components=method.mix,
                mix_hessians=method.mix > 0,
            ),
        )
    elif method.pipeline == "trak":
        trak(config, TrakConfig(query=given, preprocess_cfg=PreprocessConfig(inversion_cfg=inversion)))
    else:
        hessian_pipeline(
            config,
            HessianConfig(method=method.pipeline, ev_correction=method.corrected),
            ScoreConfig(),
            PreprocessConfig(),
            HessianPipelineConfig(
                query=given,
                inversion_cfg=inversion,
                astra=AstraConfig(num_steps=method.steps, solver="cg", batch_size=method.step_documents, seed=job.seed),
            ),
        )


def read_scores(path: Path) -> list[list[float]]:
    """One score per group for each document, as bergson stored them."""
    import numpy as np

    info = json.loads((path / "info.json").read_text())
    stored = np.memmap(path / "scores.bin", dtype=np.dtype(info["dtype"]), mode="r", shape=(info["num_rows"],))
    columns = [np.asarray(stored[f"score_{column}"], dtype=np.float64) for column in range(info["num_scores"])]
    return [[float(score) for score in row] for row in np.stack(columns, axis=1)]


def run_method(job: Job, method: Method, run: Path, clock: Clock) -> list[list[float]]:
    """Scores of one method, from queries to the end."""
    import torch

    torch.manual_seed(job.seed)  # EK-FAC draws labels from the model
    run.mkdir(parents=True)
    with clock.phase("queries"):
        query = build_queries(job, method, run)
    if method.pipeline == "similarity":
        run_similarity(job, method, run, query, clock)
    else:
        with clock.phase("other"):
            run_preconditioned(job, method, run, query)
    return read_scores(run / "scores")


def mend_read_row() -> None:
    """Give bergson's conjugate gradients copies: on CPU they write into arrays mapped read-only, and the process dies."""
    from bergson.hessians.astra import Astra

    read = Astra._read_row

    def read_copy(self: Any, *args: Any) -> dict[str, Any]:
        return {name: row.clone() for name, row in read(self, *args).items()}

    Astra._read_row = read_copy


def peak_rss_bytes() -> int:
    """Highest resident memory of this process so far; getrusage would count the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def measure(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the spec's methods one after the other; after each, all results so far."""
    started = time.perf_counter()
    if spec["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["TQDM_DISABLE"] = "1"
    import bergson
    import torch
    from bergson.utils import worker_utils

    methods = {text: read_method(text) for text in spec["methods"]}
    torch.set_num_threads(spec.get("threads", 2))
    for name in (
        "bergson.cli.commands",
        "bergson.cli.trackstar",
        "bergson.cli.trak",
        "bergson.hessians.pipeline",
        "transformers.models.llama",
    ):
        import_module(name)
    # bergson refuses batches of more tokens than the model's context, though a batch holds many documents; larger ones are faster
    worker_utils.max_tokens_for_model = lambda *_, **__: worker_utils.BIG_NUM
    mend_read_row()
    imported = time.perf_counter()

    documents = read_rows(spec["documents"], spec["max_tokens"])
    queries = read_rows(spec["queries"], spec["max_tokens"])
    groups = sorted({query["group"] for query in queries})
    scores: dict[str, Any] = {}
    seconds: dict[str, dict[str, float]] = {}
    cpu_seconds: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bergson-") as folder:
        place = Path(folder)
        job = Job(
            model=spec["model"],
            documents=save_rows(documents, place / "documents"),
            queries={
                group: save_rows([query for query in queries if query["group"] == group], place / f"queries_{group}")
                for group in groups
            },
            all_queries=save_rows(queries, place / "queries"),
            batch_tokens=max(spec["max_tokens"], spec.get("batch_tokens", 4096)),
            seed=spec["seed"],
        )
        ready = time.perf_counter()
        clock = Clock()
        for watched in WATCHED:
            clock.watch(*watched)
        for number, (text, method) in enumerate(methods.items()):
            clock.seconds.clear()
            clock.cpu_seconds.clear()
            scores[text] = run_method(job, method, place / f"run_{number}", clock)
            seconds[text] = dict(clock.seconds)
            cpu_seconds[text] = dict(clock.cpu_seconds)
            yield {
                "scores": scores,
                "groups": groups,
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "documents_per_s": {
                    text: len(documents) / sum(value for phase, value in phases.items() if phase != "load")
                    for text, phases in seconds.items()
                },
                "documents_per_s_scoring": {text: len(documents) / phases["score"] for text, phases in seconds.items()},
                "startup_s": {"imports": imported - started, "data": ready - imported},
                "peak_rss_bytes": peak_rss_bytes(),
                "settings": {text: asdict(methods[text]) for text in scores}
                | {"batch_tokens": job.batch_tokens, "threads": torch.get_num_threads()},
                "version": bergson.__version__,
            }


def main() -> None:
    """Read the spec, write the result."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: PYTHON tools/bench/bergson_side.py SPEC.json OUT.json")
    spec, out = map(Path, sys.argv[1:])
    for result in measure(json.loads(spec.read_text())):
        out.write_text(json.dumps(result))  # after each method: one that crashes takes nothing with it


if __name__ == "__main__":
    main()
