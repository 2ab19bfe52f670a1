"""`atoll chaos`: a run of its own under faults, and whether everything holds. The harness stands in tools/chaos/."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
import typer

from manifests.errors import AtollError, Failure, UserError
from tools.app import TRAIN, FormatOption, SeedOption, app
from tools.output import STDERR, Format, print_answer


class Interrupted(AtollError):
    """The user has ended it."""

    exit_code = 130


@app.command(rich_help_panel=TRAIN)
def chaos(
    minutes: Annotated[
        float, typer.Option(help="How long faults strike; the same run without faults comes before, as long again.")
    ] = 5,
    faults_per_hour: Annotated[float, typer.Option(help="How many faults there are.")] = 125,
    islands: Annotated[int, typer.Option(help="Island processes.")] = 4,
    seed: SeedOption = 0,
    kinds: Annotated[
        str,
        typer.Option(
            help="Kinds of faults, with commas between: kill, stop, slow, syncer, errors, latency, partition, machine, replies, object, "
            "disk, clock, poison, or all; all but poison by default."
        ),
    ] = "",
    hosted: Annotated[
        bool,
        typer.Option("--hosted", help="No process of its own for the syncer: the islands' processes hold the role."),
    ] = False,
    step_s: Annotated[
        float, typer.Option(help="How long an inner step lasts, seconds: as on an accelerator of its own.")
    ] = 0.1,
    format_: FormatOption = Format.table,
) -> None:
    """Break a small run on purpose, seeded and with real processes, and check what must hold. Exit code 1 where it doesn't.

    Trains on code of Python's standard library in a store of its own behind an S3 server (pip install 'atoll\\[test]'); nothing of yours is touched.

    Example: atoll chaos --minutes 30 --faults-per-hour 125
    """
    from tools.chaos.harness import Plan, run_chaos
    from tools.chaos.report import figures_of
    from tools.chaos.schedule import parse_kinds
    from tools.progress import progress_report

    for name, value, least in (("minutes", minutes, 0.05), ("islands", islands, 1), ("step-s", step_s, 0.001)):
        if not least <= value < float("inf"):
            raise UserError(f"--{name} is {value:g}; it must be {least:g} or more")
    plan = Plan(
        minutes=minutes,
        faults_per_hour=faults_per_hour,
        islands=islands,
        seed=seed,
        kinds=parse_kinds(kinds),
        has_syncer=not hosted,
        step_s=step_s,
    )
    try:
        with progress_report() as report:
            result = run_chaos(plan, report=report)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing is left of the runs") from None
    rows: list[dict[str, Any]] = [
        {"figure": name, "value": figure.median, "unit": figure.unit, "meaning": figure.meaning}
        for name, figure in figures_of(result).items()
    ]
    print_answer(pa.Table.from_pylist(rows), format_)
    for role, how in result.struck.deaths:
        STDERR.print(
            f"  died of itself, and came back: {'the syncer' if role < 0 else f'island {role}'}: {how}", markup=False
        )
    for finding in result.findings:
        STDERR.print(f"  broken: {finding.invariant}: {finding.what}", markup=False)
    if result.findings:
        raise Failure(
            f"invariants broken: {len(result.findings)}, with seed {seed}; the same options make the same faults again"
        )
    STDERR.print(f"{len(result.struck.struck)} faults: every invariant holds")
