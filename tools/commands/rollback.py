"""The commands `atoll rollback …`: what documents did to a run, and branches without them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tools.app import DEFAULT_STORE, TRAIN, FormatOption, StoreOption, app, catalog_of, opened
from tools.output import STDERR, Format, print_answer

rollback_app = typer.Typer(no_args_is_help=True, help="Take documents back out of a run: see the plan, then apply it.")
app.add_typer(rollback_app, name="rollback", rich_help_panel=TRAIN)

WhereOption = Annotated[str, typer.Option(help="SQL condition over the columns of documents, and tier and score.")]
RunArgument = Annotated[str | None, typer.Argument(help="Name of the run.", show_default=False)]
NamedRun = Annotated[str, typer.Option("--run", help="Name of the run, where it isn't given first.")]


@rollback_app.command("plan")
def plan(
    where: WhereOption,
    run: RunArgument = None,
    named: NamedRun = "main",
    store: StoreOption = DEFAULT_STORE,
    format_: FormatOption = Format.table,
    islands: Annotated[
        bool, typer.Option("--islands", help="A row for each island, not for each plan; a table shows both.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds ahead that a loss is predicted for.")] = 8,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Measure holdout losses on this machine; by default where the model is below 100 million parameters.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what documents touched, and what each of the four plans costs and gives. Changes nothing.

    continue: only leave them out from now on. damp: take away what they contributed, as far as the holdout bears it. replay: take the steps since the last clean
    state again without them. restore: go back there and lose the work since.

    Example: atoll rollback plan first --where "corpus = 'finephrase' and tier = 'C'"
    """
    from trainer.outlook import outlook_table
    from trainer.rollback import plan_rollback, plan_table

    its_store = opened(store)
    found = plan_rollback(its_store, run or named, where)
    _say_touched(found)
    # Rows of two kinds are nothing for a program to read.
    if islands or format_ is Format.table:
        print_answer(plan_table(found), format_)
    if not islands or format_ is Format.table:
        print_answer(outlook_table(its_store, found, rounds=rounds, measure=measure), format_)


@rollback_app.command("apply")
def apply(
    where: WhereOption,
    run: RunArgument = None,
    named: NamedRun = "main",
    remedy: Annotated[str, typer.Option("--plan", help="continue, damp, replay or restore.")] = "replay",
    store: StoreOption = DEFAULT_STORE,
    format_: FormatOption = Format.table,
    no_train: Annotated[
        bool, typer.Option("--no-train", help="Make the branch only; `atoll rollback apply` again trains it.")
    ] = False,
) -> None:
    """Make a new branch of the run that never reads the documents again, and train it; nothing old is deleted.

    Example: atoll rollback apply first --where "corpus = 'finephrase' and tier = 'C'" --plan damp
    """
    from tools.commands import train
    from trainer.remedies import apply_rollback
    from trainer.rollback import plan_rollback, plan_table

    its_store = opened(store)
    found = plan_rollback(its_store, run or named, where)
    branch = apply_rollback(its_store, found, remedy)
    _say_touched(found)
    print_answer(plan_table(found), format_)
    STDERR.print(f"branch: run {branch.name}", markup=False)
    if not no_train:
        train.launch_run(its_store, branch.name)


@rollback_app.command("undo")
def undo(
    branch: Annotated[str, typer.Argument(help="Name of the branch.")],
    lift: Annotated[bool, typer.Option("--lift", help="Take the branch up again.")] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Take a rollback back: mark its branch, so that the run before it is the one to go on with. Deletes nothing.

    Example: atoll rollback undo main-rollback-7735cfd4
    """
    from trainer.undo import undo_rollback

    go_on = undo_rollback(opened(store), branch, lift=lift)
    STDERR.print(f"{branch} is {'taken up again' if lift else 'taken back'}; the run to go on with is", markup=False)
    print(go_on)


@rollback_app.command("suspects")
def suspects(
    step: Annotated[int, typer.Option(min=1, help="Inner step at which the loss went up.")],
    run: RunArgument = None,
    named: NamedRun = "main",
    island: Annotated[int | None, typer.Option(help="Only of this island.", show_default=False)] = None,
    window: Annotated[int, typer.Option(min=1, help="Steps up to that one that are looked at.")] = 8,
    most: Annotated[int, typer.Option(min=1, help="Rows of each kind.")] = 20,
    store: StoreOption = DEFAULT_STORE,
    format_: FormatOption = Format.table,
) -> None:
    """Rank the documents and the batches read near a loss spike: how far their loss, or their measured harm, is from what is usual.

    Example: atoll rollback suspects first --step 1200 --island 2
    """
    from trainer.suspects import rank_suspects

    found = rank_suspects(catalog_of(store), run or named, step=step, island=island, window=window, most=most)
    print_answer(found, format_)
    STDERR.print("try: atoll rollback plan … --where \"doc_id = from_hex('…')\"", markup=False)


def _say_touched(plan: Any) -> None:
    touched = plan.touched
    STDERR.print(
        f"{len(plan.doc_ids):,} documents match; they touched {touched.steps:,} steps and {touched.merges} merges, with {touched.tokens:,} tokens, "
        f"{touched.share:.2%} of all; {plan.merges_undone} merges are undone, back to merge {plan.merge}; the new run is {plan.new_run}",
        markup=False,
    )
