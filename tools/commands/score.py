"""The command `atoll score`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from manifests.errors import UserError
from tools.app import (
    DATA,
    DEFAULT_STORE,
    DeviceOption,
    RayOption,
    SeedOption,
    StoreOption,
    TokenizerOption,
    app,
    configured,
    given,
    model_of,
    opened,
    print_summary,
)
from tools.output import STDERR


@app.command(rich_help_panel=DATA)
def score(
    store: StoreOption = DEFAULT_STORE,
    estimator: Annotated[
        str,
        typer.Option(
            help="trajectory (along a training), reverse (at a trained model, by its curvature) or online (what --run measured)."
        ),
    ] = "trajectory",
    steps: Annotated[int | None, typer.Option(help="Training steps of the scoring model.")] = None,
    checkpoints: Annotated[
        int | None, typer.Option(help="Checkpoints along them that gradients are compared at.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face model configuration: a JSON file, or a local model folder.")
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="A finished checkpoint, a local model folder; repeat it. Nothing is trained then."),
    ] = None,
    checkpoints_of: Annotated[
        str | None,
        typer.Option(
            help="An earlier score job: its scoring model is used as it was trained there. Nothing is trained then."
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The model before a fine-tuning: holdout texts count by how much their loss changed."),
    ] = None,
    probe: Annotated[
        list[str] | None,
        typer.Option(
            help="CORPUS=WEIGHT: how much this corpus of the holdout counts; repeat it. By its documents if none is named."
        ),
    ] = None,
    form: Annotated[str | None, typer.Option(help="cosine, layer-cosine or dot.")] = None,
    metric: Annotated[str | None, typer.Option(help="Of a trajectory: ekfac, adam or none.")] = None,
    layers: Annotated[str | None, typer.Option(help="blocks, or all: the output head's gradient as well.")] = None,
    projection: Annotated[
        int | None, typer.Option(help="Cut gradients down to so many entries a side of each layer, to save memory.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Score only so many documents, evenly drawn; `atoll distill` predicts the others."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="With --estimator online: the run that measured.")] = None,
    tokenizer: TokenizerOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    ray: RayOption = None,
) -> None:
    """Score the documents' influence on the holdout loss.

    Example: atoll score --steps 300 --probe wikipedia=2 --probe python=1
    """
    from pipeline.engine import open_engine
    from pipeline.score import score as run_score
    from pipeline.score_config import ScoreConfig
    from tools.progress import progress_report

    if estimator == "online":
        from pipeline.online import OnlineConfig, score_online

        if run is None:
            raise UserError("--estimator online needs --run; name a run trained with --online-influence")
        with progress_report() as report:
            print_summary(score_online(opened(store), config=OnlineConfig(run=run), report=report))
        return
    if run is not None:
        raise UserError("--run goes with --estimator online")
    if checkpoints_of is not None:
        for name, value in (("--model", model), ("--steps", steps), ("--checkpoints", checkpoints)):
            if value is not None:
                raise UserError(
                    f"{name} belongs to the training of a scoring model, and --checkpoints-of brings one that is trained; give one of them"
                )
    spec = model_of(model) or {}
    described: dict[str, Any] = {"model_path": spec["path"]} if "path" in spec else {"model": spec or None}
    options = given(
        steps=steps,
        num_checkpoints=checkpoints,
        tokenizer=tokenizer,
        checkpoint_paths=tuple(checkpoint) if checkpoint else None,
        checkpoint_job=checkpoints_of,
        base_path=base,
        probes=_weights(probe) if probe else None,
        form=form,
        metric=metric,
        layers=layers,
        projection=projection,
        sample=sample,
        **described,
    )
    config = configured(ScoreConfig, estimator=estimator, seed=seed, device=device, **options)
    with open_engine(ray, gpu=device.startswith("cuda")) as engine, progress_report() as report:
        summary = run_score(opened(store), config=config, engine=engine, report=report)
    _print_score(summary)


def _print_score(summary: dict[str, Any]) -> None:
    print_summary({name: value for name, value in summary.items() if name != "checkpoints"})
    for checkpoint in summary["checkpoints"]:
        losses = ", ".join(f"{name} {loss}" for name, loss in checkpoint["holdout_loss"].items())
        STDERR.print(f"  checkpoint at step {checkpoint['step']}: holdout loss {losses}", markup=False)
        for name, row in zip(checkpoint.get("sources", []), checkpoint.get("source_cosines", []), strict=True):
            STDERR.print(f"    {name}: its gradient's cosine to the others {row}", markup=False)


def _weights(options: list[str]) -> dict[str, float]:
    weights = {}
    for option in options:
        name, _, weight = option.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            name = ""
        if not name:
            raise UserError(f"--probe {option!r}: write CORPUS=WEIGHT, as in --probe wikipedia=2")
    return weights
