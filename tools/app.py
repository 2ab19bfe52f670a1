"""The typer application and the options that its commands share. The commands stand in tools/commands/, the entry point in cli.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import typer.core

from manifests.errors import UserError
from tools.output import STDERR, Format, parse_format, print_answer

if TYPE_CHECKING:
    from manifests.catalog import Catalog
    from manifests.store import Store

T = TypeVar("T")
DATA, TRAIN = "Data: from text to tiers and shards", "Training: islands and rollback"
ASK, KEEP = "Asking: SQL and reports", "Keeping: tables, policy, erasure"
_DATA_FLOW = ("ingest", "tokenizer", "score", "distill", "tier", "shard", "view")
DEFAULT_STORE = "atoll-store"
OWNER = "owner"
"""Reader of SQL that comes under no other name: reads everything, unless a rule of the policy names it."""


class InOrder(typer.core.TyperGroup):
    """Lists the commands as the work goes, whichever module added them first."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, panel by panel."""
        panels = {name: getattr(command, "rich_help_panel", None) for name, command in self.commands.items()}
        flow = {name: place for place, name in enumerate(_DATA_FLOW)}
        return sorted(
            super().list_commands(ctx),
            key=lambda name: ((DATA, TRAIN, ASK, KEEP).index(panels[name]), flow.get(name, len(flow))),
        )


app = typer.Typer(
    name="atoll",
    cls=InOrder,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="A training mix that steers itself: influence tiers, a mix for each island, checkpoints that know their data.",
    epilog="Start with: atoll demo",
)

StoreOption = Annotated[
    str,
    typer.Option(
        "--store", envvar="ATOLL_STORE", help="Where everything lies: a folder, or s3://, gs://, az:// and a prefix."
    ),
]
RunOption = Annotated[str, typer.Option("--run", help="Name of the run.")]
FormatOption = Annotated[
    Format,
    typer.Option("--format", parser=parse_format, metavar="|".join(Format), help="How the answer is printed."),
]
AtOption = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="POINT",
        help="Look from a time (2026-01-31T12:00), from a checkpoint (its id in hex), or at TABLE=VERSION,…; now by default.",
    ),
]

AsOption = Annotated[
    str,
    typer.Option(
        "--as", metavar="NAME", help="Ask as the policy's reader sql:NAME: what it may not read is not there."
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="File for the answer, in any format; it appears whole or not at all.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of everything random.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="Work on a Ray cluster: HOST:PORT, auto, or local to start one here."
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        help="With --ray: most pieces of work at once; two for each CPU by default. What comes out is the same."
    ),
]
TokenizerOption = Annotated[
    str | None, typer.Option(help="Id of the store's tokenizer; only needed where it has several.")
]


def opened(store: str) -> Store:
    """The store of a --store option."""
    from manifests.tables import open_store

    return open_store(store)


def catalog_of(store: str, at: str | None = None, *, reader: str | None = None) -> Catalog:
    """The catalog of a --store and an --at option; for the SQL of a --as option, with its rights."""
    from manifests.catalog import Catalog
    from manifests.cut import parse_at
    from manifests.editions import rights_of

    its_store = opened(store)
    # The policy of today, also for a look at the past.
    rights = rights_of(its_store, f"sql:{reader}") if reader is not None else None
    return Catalog(its_store, at=parse_at(at) if at is not None else None, rights=rights)


def print_summary(summary: dict[str, Any]) -> None:
    say_done_before(summary)
    for name, value in summary.items():
        if name != "already_done":
            shown = json.dumps(value) if isinstance(value, dict | list) else value
            STDERR.print(f"  {name}: {shown}", markup=False)


def print_views(store: Store, summary: dict[str, Any], format_: Format) -> None:
    """The views that a job has written, the largest tier first."""
    from manifests.catalog import Catalog

    views = "SELECT tier, shards, documents, tokens FROM views WHERE tier_version = ? AND pool = ? ORDER BY tokens DESC"
    print_answer(Catalog(store).query(views, [summary["tier_version"], summary["pool"]]), format_)


def say_done_before(summary: dict[str, Any]) -> None:
    if summary.get("already_done"):
        STDERR.print("  done before with the same options and inputs; nothing changed")


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def configured(kind: Callable[..., T], **options: Any) -> T:
    """A configuration from options; what it refuses is the user's to mend."""
    try:
        return kind(**options)
    except ValueError as e:
        raise UserError(str(e)) from e


def parse_weights(option: str, text: str) -> dict[str, float]:
    """Weights by name from NAME=NUMBER,…; they needn't sum to one."""
    weights: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = (part.strip() for part in item.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            name = ""
        if not name:
            raise UserError(f"{option} {text!r}: {item!r} is not NAME=NUMBER; write them as in S=.4,A=.4,B=.2")
        if name in weights:
            raise UserError(f"{option} {text!r} names {name!r} twice; give each its whole weight once")
        weights[name] = weight
    return weights


def model_of(option: str | None) -> dict[str, Any] | None:
    if option is None:
        return None
    path = Path(option)
    if path.is_dir():
        return {"path": str(path.absolute())}
    try:
        return dict(json.loads(path.read_text()))
    except OSError as e:
        raise UserError(f"--model {option}: {e.strerror}; give a JSON file or a folder of a Hugging Face model") from e
    except ValueError as e:
        raise UserError(f"--model {option}: not a JSON object: {e}") from e
