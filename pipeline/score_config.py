"""What decides the scores: the configuration of the job `score`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ESTIMATORS = ("trajectory", "reverse")
METRICS = ("ekfac", "adam", "none")
FORMS = ("cosine", "layer-cosine", "dot")
LAYERS = ("blocks", "all")
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
OF_THE_MODEL = (
    "model",
    "model_path",
    "tokenizer",
    "steps",
    "batch_size",
    "seq_len",
    "learning_rate",
    "seed",
    "num_checkpoints",
)
"""Settings that belong to the scoring model and its training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreConfig:
    """How documents are scored. Everything but `device` is part of the job's identity."""

    estimator: str = "trajectory"
    """trajectory: agreement along a training; reverse: influence at a trained model, by its curvature."""
    form: str = "cosine"
    """cosine, layer-cosine or dot (the change of the holdout loss itself, which long steps and large gradients lead)."""
    metric: str | None = None
    """Of a trajectory: ekfac (the curvature at each checkpoint), adam or none; None: ekfac, or none with a projection."""
    layers: str = "blocks"
    """Linear layers whose gradients are compared: those of the blocks, or all, with the output head."""
    projection: int | None = None
    """Entries of each side of a layer that a gradient is cut down to, to save memory: random ones with metric none, the curvature's largest with ekfac."""
    damping: float = 0.1
    """Of the curvature, as a share of its mean eigenvalue."""
    curvature_documents: int = 512
    """Documents that the curvature is measured on."""
    probes: Mapping[str, float] | None = None
    """Weight of each corpus of the holdout in the score; those not named have none. None: by their documents."""
    model: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_MODEL))
    """Config of the scoring model, as transformers names it, with `model_type`."""
    model_path: str | None = None
    """Folder of a local model to start from, instead of `model`."""
    checkpoint_paths: tuple[str, ...] = ()
    """Folders of local models, the checkpoints of a training elsewhere in their order: nothing is trained here."""
    checkpoint_job: str | None = None
    """Job `score` whose scoring model is used, as it was trained there, with its tokenizer, checkpoints and seed: nothing is trained here."""
    base_path: str | None = None
    """Folder of the model before a fine-tuning: holdout documents count by how much their loss has changed since."""
    tokenizer: str | None = None
    """Id of the tokenizer; None: the only one of the store."""
    steps: int = 240
    """Training steps of the scoring model."""
    batch_size: int = 16
    seq_len: int = 128
    learning_rate: float = 3e-3
    seed: int = 0
    num_checkpoints: int = 2
    """Checkpoints at which documents are compared, evenly over the training; one, its end, for reverse."""
    max_document_tokens: int = 128
    """Tokens of a document that one checkpoint looks at: of a longer one, another window at each checkpoint, from its beginning to its end."""
    num_folds: int = 4
    """Folds of each probe, for the standard error."""
    max_holdout_documents: int = 1024
    source_documents: int = 64
    """Documents of each corpus whose mean gradients are compared with each other; 0: none."""
    sample: int | None = None
    """Score only so many documents, drawn evenly; `atoll distill` predicts the others. None: all."""
    partition_size: int = 2048
    """Documents scored between two commits."""
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, among in (("estimator", ESTIMATORS), ("form", FORMS), ("metric", METRICS), ("layers", LAYERS)):
            if (value := getattr(self, name)) is not None and value not in among:
                raise ValueError(f"{name} {value!r} is none of {', '.join(among)}")
        for name in ("steps", "batch_size", "num_checkpoints", "curvature_documents", "projection", "sample"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        for name in ("seq_len", "max_document_tokens", "num_folds"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 2 or more")
        if self.partition_size < 1 or self.partition_size % 64:
            raise ValueError(f"partition_size is {self.partition_size}; it must be a multiple of 64")
        if self.max_holdout_documents < self.num_folds:
            raise ValueError(f"max_holdout_documents is {self.max_holdout_documents}, less than num_folds")
        if self.steps < self.num_checkpoints:
            raise ValueError(f"num_checkpoints is {self.num_checkpoints}, more than the {self.steps} steps")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be between 0 and 1")
        if self.damping <= 0:
            raise ValueError(f"damping is {self.damping}; it must be above 0")
        if self.model_path is None and "model_type" not in self.model:
            raise ValueError("model has no model_type; name one, such as llama")
        if self.probes is not None and (
            not self.probes or min(self.probes.values()) < 0 or not sum(self.probes.values())
        ):
            raise ValueError("probes need weights of 0 or more, one of them above 0")
        if self.checkpoint_paths and self.checkpoint_job is not None:
            raise ValueError("give finished checkpoints, or a job that has some, not both")
        if self.checkpoint_paths and self.model_path is not None:
            raise ValueError("give a model to start from, or finished checkpoints, not both")
        if self.estimator == "reverse" and self.metric is not None:
            raise ValueError("metric goes with the trajectory estimator; reverse has the curvature as its metric")
        if self.base_path is not None and self.estimator != "reverse":
            raise ValueError("base_path goes with the reverse estimator")
        if self.metric == "adam" and self.projection is not None:
            raise ValueError("projection keeps no diagonal metric; choose metric none or ekfac with it")
        if self.metric == "adam" and self.checkpoint_paths:
            raise ValueError(
                "metric adam needs the optimizer's state, which finished checkpoints don't hold; choose none"
            )

    @property
    def resolved_metric(self) -> str:
        """The metric: adam, none, or the curvature's ekfac."""
        if self.estimator == "reverse":
            return "ekfac"
        return self.metric or ("none" if self.projection is not None else "ekfac")

    @property
    def resolved_num_checkpoints(self) -> int:
        """Checkpoints at which documents are compared."""
        if self.checkpoint_paths:
            return len(self.checkpoint_paths)
        return 1 if self.estimator == "reverse" else self.num_checkpoints

    @property
    def method(self) -> str:
        """Name of the estimator with what makes its scores differ, as in `trajectory/adam-cosine`."""
        return f"{self.estimator}/{self.resolved_metric}-{self.form}"

    def identity(self) -> dict[str, Any]:
        """What decides the scores: all but where they are computed."""
        return {name: value for name, value in asdict(self).items() if name != "device"}
