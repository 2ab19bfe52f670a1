"""Commands about who may read what: the policy and its audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manifests.errors import UserError
from tools.app import DEFAULT_STORE, KEEP, AtOption, FormatOption, StoreOption, app, catalog_of, opened
from tools.output import STDERR, Format, print_answer

policy_app = typer.Typer(no_args_is_help=True, help="The policy: which licences and access labels who may read.")
app.add_typer(policy_app, name="policy", rich_help_panel=KEEP)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The policy, a TOML file.")]


@policy_app.command("set")
def set_(
    file: FileArgument,
    reason: Annotated[str, typer.Option(help="Why; it is kept beside the policy.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Put a policy in force. What it takes away, islands leave out from their next start; what it gives is in new runs.

    Example: atoll policy set policy.toml --reason "legal review of May"
    """
    from manifests.editions import set_policy

    policy, is_new = set_policy(opened(store), _text(file), reason, source=str(file))
    what = "is in force" if is_new else "was in force already; nothing changed"
    STDERR.print(f"policy {policy.id} {what}", markup=False)


@policy_app.command()
def show(
    store: StoreOption = DEFAULT_STORE,
    reader: Annotated[
        str | None,
        typer.Option(help="Show what one reader may read: run:NAME/island:N, job:KIND or sql:NAME."),
    ] = None,
    at: AtOption = None,
    format_: FormatOption = Format.table,
) -> None:
    """Print the policy in force; with --reader, how many documents of each licence and label that one may read.

    Example: atoll policy show --reader run:main/island:2
    """
    from manifests.editions import current_edition, current_policy
    from tools.reach import reach_table

    catalog = catalog_of(store, at)
    edition, policy = current_edition(catalog), current_policy(catalog)
    if edition is None or policy is None:
        STDERR.print("no policy is set: every reader may read everything")
    else:
        when = edition["written_at"].isoformat(timespec="seconds")
        STDERR.print(f"policy {policy.id}, in force since {when}: {edition['reason']}", markup=False)
    if reader is not None:
        rights = policy.rights(reader) if policy is not None else None
        if rights is not None:
            STDERR.print(f"{reader}: {rights.named or 'no rule names it'}; condition: {rights.condition}", markup=False)
        print_answer(reach_table(catalog, rights), format_)
    elif policy is not None:
        print(policy.text, end="" if policy.text.endswith("\n") else "\n")


@policy_app.command()
def check(file: FileArgument, store: StoreOption = DEFAULT_STORE, format_: FormatOption = Format.table) -> None:
    """Check a policy file, and show what it would change for the readers and documents of the store. Changes nothing.

    Example: atoll policy check policy.toml
    """
    from manifests.editions import current_policy
    from manifests.policy import parse_policy
    from tools.reach import changes_table

    policy = parse_policy(_text(file), source=str(file))
    STDERR.print(f"{file} is a policy of {len(policy.rules)} rules", markup=False)
    catalog = catalog_of(store)
    changes = changes_table(catalog, current_policy(catalog), policy)
    if changes.num_rows:
        print_answer(changes, format_)
    else:
        STDERR.print("it changes nothing for the readers and documents of the store")


@app.command(rich_help_panel=KEEP)
def audit(
    store: StoreOption = DEFAULT_STORE,
    run: Annotated[str | None, typer.Option("--run", help="Only this run, and what it branches from.")] = None,
    documents: Annotated[bool, typer.Option("--documents", help="List the forbidden documents one by one.")] = False,
    at: AtOption = None,
    format_: FormatOption = Format.table,
) -> None:
    """Prove from what was trained on that the policy was kept: the one that each run was made under, and the newest. Exit code 1 where not.

    Example: atoll audit --run main
    """
    from tools.audit import audit as run_audit
    from tools.audit import documents_table, findings_table, require_clean

    catalog = catalog_of(store, at)
    found = run_audit(catalog, run)
    if found.findings:
        print_answer(documents_table(catalog, found) if documents else findings_table(found), format_)
    require_clean(found)
    STDERR.print(f"{found.seen}, none forbidden{'' if found.has_policy else ': no policy is set'}")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{file}: {e.strerror}; give a policy file, see `atoll policy --help`") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{file} is not UTF-8 text: {e}; write the policy as plain TOML") from e
