"""The `atoll` command: a thin layer over the packages. Heavy imports (torch, datasets, transformers) happen inside the commands that need them.

Errors of ours become one line on stderr: exit code 2 for what the user can mend, 1 for work that failed, 130 for an interrupt.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
import typer.exceptions

from manifests.errors import AtollError, Failure, UserError
from tools.app import (
    ASK,
    DATA,
    DEFAULT_STORE,
    FormatOption,
    RayOption,
    RunOption,
    SeedOption,
    StoreOption,
    TokenizerOption,
    WorkersOption,
    app,
    catalog_of,
    opened,
    print_summary,
    print_views,
    say_done_before,
)
from tools.commands import ask, chaos, distill, keep, policy, retier, rollback, score, steer, tier, train, watch
from tools.output import STDERR, Format, print_answer

if TYPE_CHECKING:
    from manifests.store import Store

COMMANDS = (ask, chaos, distill, keep, policy, retier, rollback, score, steer, tier, train, watch)
"""Modules that add their commands by being imported."""

_INTERRUPTED = 130


@app.command(rich_help_panel=DATA)
def ingest(
    source: Annotated[
        str, typer.Argument(help="A file, a folder, a glob, or the name of a data set for --format datasets.")
    ],
    corpus: Annotated[str, typer.Option(help="Name of the corpus that the documents belong to.")],
    format_: Annotated[
        str, typer.Option("--format", help="parquet, jsonl, finephrase, cosmopedia or datasets.")
    ] = "parquet",
    store: StoreOption = DEFAULT_STORE,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=COLUMN: where text, license, prompt, generator, access, label, tokens … stand; repeat it."
        ),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(help="real or synthetic; real where not said, finephrase and cosmopedia are synthetic."),
    ] = None,
    license_: Annotated[
        str | None, typer.Option("--license", help="Licence of documents that name none; `unknown` by default.")
    ] = None,
    access: Annotated[str, typer.Option(help="Policy label of documents that have none.")] = "public",
    generator: Annotated[str | None, typer.Option(help="What wrote the synthetic documents.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Kind of the synthetic documents: faq, math, table, tutorial, …")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a --format datasets source.")] = "train",
    subset: Annotated[
        str | None, typer.Option(help="Configuration of a --format datasets source, such as sample-10BT.")
    ] = None,
    holdout_share: Annotated[float, typer.Option(help="Share of the real documents kept aside as the holdout.")] = 0.02,
    ray: RayOption = None,
) -> None:
    """Read documents into the store; makes the store where there is none.

    Example: atoll ingest wiki.parquet --corpus wikipedia --license CC-BY-SA-4.0
    """
    from manifests.tables import create_store
    from pipeline.engine import open_engine
    from pipeline.ingest import ingest as run_ingest
    from pipeline.sources import SourceSpec
    from tools.progress import progress_report

    spec = SourceSpec(
        uri=source,
        format=format_,
        corpus=corpus,
        columns=_pairs(column or []),
        origin=origin,
        license=license_,
        access=access,
        generator=generator,
        prompt=prompt,
        split=split,
        subset=subset,
    )
    with open_engine(ray) as engine, progress_report() as report:
        summary = run_ingest(create_store(store), [spec], holdout_share=holdout_share, engine=engine, report=report)
    say_done_before(summary)
    for name, counts in summary["corpora"].items():
        STDERR.print(
            f"  {name}: {counts['documents']:,} new documents ({counts['bytes']:,} bytes) of {counts['rows']:,} rows; "
            f"{counts['holdout']:,} held out, {counts['holdout_derived']:,} left out as rephrased from those, "
            f"{counts['duplicates']:,} duplicates, {counts['rejected']:,} rejected",
            markup=False,
        )
    for reason, rows in summary["rejected_because"].items():
        STDERR.print(f"  rejected: {reason}: {rows}", markup=False)


@app.command(rich_help_panel=DATA)
def tokenizer(
    store: StoreOption = DEFAULT_STORE,
    vocab_size: Annotated[
        int, typer.Option(help="Tokens of a byte-level BPE trained on the store's documents.")
    ] = 4096,
    adopt: Annotated[
        str | None,
        typer.Option(help="Take a tokenizer.json, a local model folder, or a name on the Hugging Face hub instead."),
    ] = None,
) -> None:
    """Train a tokenizer on the documents, or adopt one.

    Example: atoll tokenizer --vocab-size 4096
    """
    from manifests.catalog import Catalog
    from manifests.editions import rights_of
    from pipeline.tokenizer import adopt_tokenizer, train_tokenizer
    from tools.progress import progress_report

    its_store = opened(store)
    if adopt is not None:
        identity = adopt_tokenizer(its_store, adopt)
    else:
        with progress_report() as report:
            catalog = Catalog(its_store, rights=rights_of(its_store, "job:tokenizer"))
            identity = train_tokenizer(its_store, catalog, vocab_size=vocab_size, report=report)
    print(identity)


@app.command(rich_help_panel=DATA)
def shard(
    store: StoreOption = DEFAULT_STORE,
    tier_version: Annotated[
        int | None, typer.Option(help="Tier version to write views of; the newest by default.")
    ] = None,
    shard_bytes: Annotated[int, typer.Option(help="Largest uncompressed size of a shard, bytes.")] = 1 << 20,
    tokenizer: TokenizerOption = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Write nothing: look at every shard, document and token that is there. Exit code 1 where something is wrong.",
        ),
    ] = False,
    sample: Annotated[
        int | None,
        typer.Option(help="With --verify: hold the tokens of so many documents against their texts; all by default."),
    ] = None,
    ray: RayOption = None,
    workers: WorkersOption = None,
    format_: FormatOption = Format.table,
) -> None:
    """Write the tokenised documents into the pool of MDS shards, and a view for each tier.

    Example: atoll shard && atoll shard --verify --sample 1000
    """
    from pipeline.engine import open_engine
    from pipeline.pool import ShardConfig
    from pipeline.pool import shard as run_shard
    from tools.progress import progress_report

    its_store = opened(store)
    if verify:
        _verify(its_store, tier_version, tokenizer, sample, format_)
        return
    if sample is not None:
        raise UserError("--sample goes with --verify")
    config = ShardConfig(tier_version=tier_version, shard_bytes=shard_bytes, tokenizer=tokenizer)
    with open_engine(ray, workers=workers) as engine, progress_report() as report:
        summary = run_shard(its_store, config=config, engine=engine, report=report)
    print_summary({k: v for k, v in summary.items() if k != "tiers"})
    print_views(its_store, summary, format_)


def _verify(store: Store, tier_version: int | None, tokenizer: str | None, sample: int | None, format_: Format) -> None:
    import pyarrow as pa

    from pipeline.verify import verify as run_verify
    from tools.progress import progress_report

    with progress_report() as report:
        verified = run_verify(store, tier_version=tier_version, tokenizer=tokenizer, sample=sample, report=report)
    if verified.findings:
        print_answer(pa.Table.from_pylist([asdict(finding) for finding in verified.findings]), format_)
        raise Failure(
            f"findings in the shards of {store.uri}: {len(verified.findings):,}; the first of each names its mend"
        )
    STDERR.print(
        f"tier version {verified.tier_version}: {verified.shards:,} shards, {verified.documents:,} documents, the tokens of {verified.compared:,} "
        "held against their texts: nothing is wrong"
    )


@app.command(rich_help_panel=DATA)
def view(
    tier: Annotated[str, typer.Argument(help="S, A, B, C or holdout.")],
    out: Annotated[Path, typer.Argument(help="Folder that the view's index.json is written to.")],
    store: StoreOption = DEFAULT_STORE,
    tier_version: Annotated[int | None, typer.Option(help="The newest by default.")] = None,
) -> None:
    """Write a tier's MDS index to a folder, for a plain StreamingDataset(local=OUT, remote=…/pool).

    Example: atoll view S ./tier-s
    """
    from manifests.catalog import Catalog, write_whole

    its_store = opened(store)
    views = (
        "SELECT object FROM views WHERE tier = ? AND (tier_version = ? OR ? IS NULL) ORDER BY tier_version DESC LIMIT 1"
    )
    rows = Catalog(its_store).rows(views, [tier, tier_version, tier_version])
    if not rows:
        raise UserError(
            f"no view of tier {tier!r}; tiers are S, A, B, C and holdout, and `atoll shard` writes their views"
        )
    write_whole(out / "index.json", its_store.get(rows[0]["object"]))
    print(f"StreamingDataset(local={str(out)!r}, remote={its_store.table_uri('pool')!r})")


@app.command(rich_help_panel=ASK)
def made(
    run: RunOption = "main",
    store: StoreOption = DEFAULT_STORE,
    format_: FormatOption = Format.table,
) -> None:
    """Say which corpora and tiers made the last global checkpoint of a run, and check it against the islands' own counters.

    Example: atoll made --run first
    """
    from tools.provenance import check_ledger, checkpoint_mix

    catalog = catalog_of(store)
    print_answer(checkpoint_mix(catalog, run), format_)
    STDERR.print(check_ledger(catalog, run))


@app.command(rich_help_panel=ASK)
def report(
    run: RunOption = "main",
    store: StoreOption = DEFAULT_STORE,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("atoll-report.html"),
    format_: FormatOption = Format.table,
) -> None:
    """Print a run's final table and write one self-contained HTML page with its plots.

    Example: atoll report --run first --out report.html
    """
    from tools.report import final_table, write_report

    catalog = catalog_of(store)
    print_answer(final_table(catalog, run), format_, title=f"run {run}")
    write_report(catalog, run, out)
    STDERR.print(f"report: {out}")


@app.command(rich_help_panel=ASK)
def doctor(
    store: StoreOption = DEFAULT_STORE,
    format_: FormatOption = Format.table,
) -> None:
    """Say what works here: versions, this machine, and whether the store keeps its promises. Probes the store, if it exists, and cleans up.

    Example: atoll doctor --store s3://bucket/atoll
    """
    from tools.doctor import as_table, examine, require_health

    lines = examine(store)
    print_answer(as_table(lines), format_)
    require_health(lines)


@app.command(rich_help_panel=ASK)
def demo(
    store: StoreOption = "demo-store",
    seed: SeedOption = 0,
) -> None:
    """Run the main job on real text, command by command: minutes on two cores. Needs `make demo`'s text package.

    Example: atoll demo
    """
    from tools.demo import run_demo

    run_demo(store, seed=seed)


def main() -> NoReturn:
    """The console command."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    try:
        # Outside typer's standalone mode errors reach us, and become one line.
        code = typer.main.get_command(app).main(arguments, prog_name="atoll", standalone_mode=False)
        if code == _INTERRUPTED:  # typer makes an exit code of a KeyboardInterrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except AtollError as e:
        _complain(str(e))
        return e.exit_code
    except typer.exceptions.Exit as e:
        return e.exit_code
    except (typer.exceptions.Abort, KeyboardInterrupt):
        _complain("interrupted; what was committed stays, the same command goes on from there")
        return _INTERRUPTED
    except BrokenPipeError:
        return 0  # the reader of our output has seen enough
    except Exception as e:
        message = _usage_message(e)
        if message is None:
            raise
        _complain(message)
        return 2


def _usage_message(error: Exception) -> str | None:
    """The one line of a usage error of typer's; None for any other exception."""
    if not hasattr(error, "format_message") or not hasattr(error, "ctx"):
        return None
    command = error.ctx.command_path if error.ctx is not None else "atoll"
    return f"{error.format_message()} See `{command} --help`."


def _complain(message: str) -> None:
    one_line = " ".join(message.split())
    print(f"error: {one_line}", file=sys.stderr)


def _pairs(options: list[str]) -> dict[str, str]:
    pairs = {}
    for option in options:
        name, sign, column = option.partition("=")
        if not sign or not name or not column:
            raise UserError(f"--column {option!r}: write NAME=COLUMN, as in --column text=content")
        pairs[name] = column
    return pairs


if __name__ == "__main__":
    main()
