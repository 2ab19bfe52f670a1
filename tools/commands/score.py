"""The command `atoll score`."""

from __future__ import annotations

from typing import Annotated

import typer

from tools.app import (
    DATA,
    DEFAULT_STORE,
    DeviceOption,
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


@app.command(rich_help_panel=DATA)
def score(
    store: StoreOption = DEFAULT_STORE,
    steps: Annotated[int | None, typer.Option(help="Training steps of the scoring model.")] = None,
    checkpoints: Annotated[
        int | None, typer.Option(help="Checkpoints along them that gradients are compared at.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face model configuration: a JSON file, or a local model folder.")
    ] = None,
    tokenizer: TokenizerOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Score every document's influence on the holdout loss.

    Example: atoll score --steps 300
    """
    from pipeline.score import ScoreConfig
    from pipeline.score import score as run_score
    from tools.progress import progress_report

    spec = model_of(model) or {}
    described = {"model_path": spec["path"]} if "path" in spec else {"model": spec or None}
    options = given(steps=steps, num_checkpoints=checkpoints, tokenizer=tokenizer, **described)
    config = configured(ScoreConfig, seed=seed, device=device, **options)
    with progress_report() as report:
        summary = run_score(opened(store), config=config, report=report)
    print_summary(summary)
