"""The command `atoll distill`."""

from __future__ import annotations

from typing import Annotated

import typer

from tools.app import (
    DATA,
    DEFAULT_STORE,
    RayOption,
    SeedOption,
    StoreOption,
    app,
    configured,
    given,
    opened,
    print_summary,
)


@app.command(rich_help_panel=DATA)
def distill(
    store: StoreOption = DEFAULT_STORE,
    score_job: Annotated[
        str | None,
        typer.Option(help="Job whose direct scores are learned from; the newest score job that has any by default."),
    ] = None,
    max_fit: Annotated[int | None, typer.Option(help="Most documents to learn from.")] = None,
    seed: SeedOption = 0,
    ray: RayOption = None,
) -> None:
    """Predict the scores of the documents that a score job on a sample left out, at CPU cost.

    Says how well it orders documents that it hasn't seen: the rank correlation, out of sample.

    Example: atoll distill --store atoll-store
    """
    from pipeline.distill import DistillConfig
    from pipeline.distill import distill as run_distill
    from pipeline.engine import open_engine
    from tools.progress import progress_report

    config = configured(DistillConfig, seed=seed, **given(score_job=score_job, max_fit=max_fit))
    with open_engine(ray) as engine, progress_report() as report:
        summary = run_distill(opened(store), config=config, engine=engine, report=report)
    print_summary(summary)
