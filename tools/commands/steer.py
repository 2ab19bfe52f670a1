"""Commands that change what islands may read from now on: forgotten documents, and edited strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from manifests.errors import UserError
from manifests.schemas import TIERS
from tools.app import ASK, DEFAULT_STORE, KEEP, TRAIN, FormatOption, StoreOption, app, catalog_of, opened, parse_weights
from tools.output import STDERR, Format, print_answer

WhereOption = Annotated[
    str,
    typer.Option(help="SQL condition over the columns of documents, and tier and score in the newest tier version."),
]


@app.command(rich_help_panel=KEEP)
def forget(
    where: WhereOption,
    reason: Annotated[str, typer.Option(help="Why; goes into the tombstones.")],
    store: StoreOption = DEFAULT_STORE,
    with_rephrased: Annotated[
        bool, typer.Option("--with-rephrased", help="Also the documents that were rephrased from them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be done.")] = False,
    format_: FormatOption = Format.table,
) -> None:
    """Erase documents: out of every view and every shard, for good. Tombstones without text stay, and what had been trained on them stays on record.

    Example: atoll forget --where "source_uri like '%/leaked.parquet'" --reason "ticket 4711" --yes
    """
    from pipeline.forget import erasure_table, plan_erasure
    from pipeline.forget import forget as run_forget
    from tools.progress import progress_report

    erasure = plan_erasure(opened(store), where, reason=reason, with_rephrased=with_rephrased)
    print_answer(erasure_table(erasure), format_, title="documents")
    if erasure.rephrased:
        STDERR.print(
            f"  {erasure.rephrased:,} documents were rephrased from these and stay; --with-rephrased takes them, too"
        )
    if erasure.seen.num_rows:
        print_answer(erasure.seen, format_, title="checkpoints that saw them; `atoll rollback` takes them out of a run")
    else:
        STDERR.print("  no checkpoint saw them")
    if not yes:
        STDERR.print(
            f"  {len(erasure.shards):,} shards would be written anew, and the old ones deleted; nothing was changed: --yes does it"
        )
        return
    with progress_report() as report:
        summary = run_forget(erasure, report=report)
    if summary["already_done"]:
        STDERR.print("  forgotten before; nothing changed")
    STDERR.print(
        f"  {summary['documents']:,} documents forgotten: {summary['shards']:,} shards and {summary['views']:,} views written anew. "
        "Copies of the old shards in caches of other machines ($ATOLL_CACHE) and the sources themselves are yours to delete",
        markup=False,
    )


@app.command(rich_help_panel=KEEP)
def flag(
    where: WhereOption,
    reason: Annotated[str, typer.Option(help="Why; kept beside the flag.")],
    store: StoreOption = DEFAULT_STORE,
    lift: Annotated[bool, typer.Option("--lift", help="Take the flags of these documents back.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say how many documents there are.")] = False,
) -> None:
    """Flag documents as harmful: running islands pass them over from their next round on. `atoll rollback` undoes what they have done, `atoll forget` erases them.

    Example: atoll flag --where "generator = 'old-model' and prompt = 'math'" --reason "wrong sums" --yes
    """
    from manifests.flags import matching, set_flags

    doc_ids = matching(catalog_of(store), where, flagged=lift)
    told = f"{len(doc_ids):,} documents that are {'' if lift else 'not '}flagged match"
    if not doc_ids:
        raise UserError(f"{told} {where!r}; try it with `atoll sql`")
    if not yes:
        STDERR.print(f"  {told}; nothing was changed: --yes {'takes their flags back' if lift else 'flags them'}")
        return
    set_flags(opened(store), doc_ids, flagged=not lift, predicate=where, reason=reason)
    done = "may be read again" if lift else "are flagged"
    STDERR.print(f"  {len(doc_ids):,} documents {done}, from the islands' next round on", markup=False)


strategies_app = typer.Typer(invoke_without_command=True, help="Show the strategies, or edit one.")
app.add_typer(strategies_app, name="strategies", rich_help_panel=TRAIN)


@strategies_app.callback()
def strategies(
    context: typer.Context, store: StoreOption = DEFAULT_STORE, format_: FormatOption = Format.table
) -> None:
    """Show the strategies as they count now.

    Example: atoll strategies
    """
    if context.invoked_subcommand is None:
        print_answer(catalog_of(store).query("SELECT * FROM strategies ORDER BY strategy"), format_)


@strategies_app.command("explain")
def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    store: StoreOption = DEFAULT_STORE,
    format_: FormatOption = Format.table,
) -> None:
    """Show what each island reads by and why, and what the rules of `--strategies auto` would say.

    Example: atoll strategies explain main
    """
    from trainer.assignment import RULES, assign, trouble
    from trainer.choice import newest_mixes, read_histories
    from trainer.run import load_run

    catalog = catalog_of(store)
    config = load_run(opened(store), run, catalog=catalog).config
    if config.group_by:
        raise UserError(f"run {run} mixes by {config.group_by}: its islands have the weights that it was given")
    mixes, histories = newest_mixes(catalog, run), read_histories(catalog, run)
    if not mixes:
        raise UserError(f"run {run} has no island yet; `atoll train --run {run}` starts them")
    rows = []
    for island, mix in sorted(mixes.items()):
        said = assign(island, histories)
        history = histories.get(island, [])
        rows.append(
            {
                "island": island,
                "reads": mix.strategy,
                "mix": "/".join(f"{mix.weights[tier]:.2f}".removeprefix("0") for tier in TIERS),
                "since_round": mix.round,
                "because": mix.reason,
                "step_time_s": history[-1].step_time_s if history else None,
                "rules_say": said.strategy,
                "rule": said.why,
                "held_still": trouble(history) or "",
            }
        )
    STDERR.print(RULES, markup=False)
    print_answer(pa.Table.from_pylist(rows), format_)


@strategies_app.command("set")
def set_strategy(
    name: Annotated[str, typer.Argument(help="A new name, or one that there is.")],
    reason: Annotated[str, typer.Option(help="Why; kept beside the edition.")],
    weights: Annotated[
        str | None,
        typer.Option(help="Weights to start with, as S=.4,A=.4,B=.2,C=0; every tier by its size where not given."),
    ] = None,
    learning_rate: Annotated[
        float,
        typer.Option(
            help="How fast effectiveness moves the weights: about the exponent of a tier that is certainly better; 0: they stay."
        ),
    ] = 0.0,
    weight_floor: Annotated[float, typer.Option(help="Least weight of a tier that has any.")] = 0.02,
    step_cap: Annotated[
        float, typer.Option(help="Largest change of a weight in one decision, as a share of it.")
    ] = 0.25,
    exploration: Annotated[
        float, typer.Option(help="Standard errors by which a tier is taken for better than it's known to be.")
    ] = 0.0,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Set a strategy: a new edition that counts from the islands' next decision on. Earlier ones stay on record.

    Example: atoll strategies set careful --weights S=.1,A=.5,B=.4,C=0 --reason "C hurts the maths holdout"
    """
    from manifests.strategies import strategy_row
    from manifests.tables import append

    row = strategy_row(
        name,
        weights=_of_tiers(parse_weights("--weights", weights)) if weights is not None else None,
        learning_rate=learning_rate,
        weight_floor=weight_floor,
        step_cap=step_cap,
        exploration=exploration,
        reason=reason,
    )
    append(opened(store), "strategies", [row])
    print_answer(catalog_of(store).query("SELECT * FROM strategies WHERE strategy = ?", [name]), Format.table)


def _of_tiers(weights: dict[str, float]) -> dict[str, float]:
    return {tier.upper(): weight for tier, weight in weights.items()}


@app.command(rich_help_panel=ASK)
def trajectories(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of runs.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write the course of runs as Parquet files with a data card: mixes and their reasons, feedback, losses, events. No document is in it.

    Example: atoll trajectories first second --out course
    """
    from tools.trajectories import export_trajectories

    its_store = opened(store)
    rows = export_trajectories(its_store, runs, out, about=f"From {its_store.uri}.")
    STDERR.print(f"  {out}: " + ", ".join(f"{count:,} rows of {name}" for name, count in rows.items()), markup=False)
