"""Commands that train: all roles of a run on this machine, or one of them; and what comes of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manifests.errors import UserError
from tools.app import (
    ASK,
    DEFAULT_STORE,
    TRAIN,
    DeviceOption,
    FormatOption,
    RunOption,
    SeedOption,
    StoreOption,
    app,
    model_of,
    opened,
    parse_weights,
)
from tools.output import STDERR, Format, print_answer

if TYPE_CHECKING:
    from manifests.store import Store

_DILOCO = "Outer steps"
_INNER = "Inner steps"
_MIX = "Data"
LoggerOption = Annotated[
    str, typer.Option(help="Who else is told the metrics: auto (what is installed), tensorboard, trackio or wandb.")
]


@app.command(rich_help_panel=TRAIN)
def train(
    store: StoreOption = DEFAULT_STORE,
    run: RunOption = "main",
    islands: Annotated[int, typer.Option(help="Island processes on this machine.")] = 4,
    strategies: Annotated[
        str,
        typer.Option(
            help="Strategy of each island, taken in turn: aggressive, balanced, conservative, adaptive, uniform, one of your own; "
            "or auto, by the speed and the link that it's measured to have (`atoll strategies explain`).",
            rich_help_panel=_MIX,
        ),
    ] = "aggressive,balanced,conservative,adaptive",
    steps: Annotated[int, typer.Option(help="Inner steps of each island.", rich_help_panel=_INNER)] = 160,
    batch_size: Annotated[int, typer.Option(help="Sequences in an inner step.", rich_help_panel=_INNER)] = 8,
    micro_batch: Annotated[
        int,
        typer.Option(
            help="Sequences that an accelerator has at once; gradients add up. 0: all.", rich_help_panel=_INNER
        ),
    ] = 0,
    seq_len: Annotated[int, typer.Option(help="Tokens in a sequence.", rich_help_panel=_INNER)] = 128,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=_INNER)] = 3e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.", rich_help_panel=_INNER)] = 16,
    schedule: Annotated[
        str,
        typer.Option(
            help="Learning rate after the warm-up: cosine, or wsd (stays, then falls).", rich_help_panel=_INNER
        ),
    ] = "cosine",
    weight_decay: Annotated[float, typer.Option(help="Of matrices.", rich_help_panel=_INNER)] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.", rich_help_panel=_INNER)] = 1.0,
    parallel: Annotated[
        str,
        typer.Option(help="How the ranks of an island (torchrun) share it: ddp or fsdp.", rich_help_panel=_INNER),
    ] = "ddp",
    compile_: Annotated[
        bool, typer.Option("--compile", help="Put the model through torch.compile.", rich_help_panel=_INNER)
    ] = False,
    sync_every: Annotated[
        int, typer.Option(help="Inner steps between two syncs of a fragment (H).", rich_help_panel=_DILOCO)
    ] = 32,
    fragments: Annotated[int, typer.Option(help="Fragments of the parameters (P).", rich_help_panel=_DILOCO)] = 4,
    overlap: Annotated[
        int,
        typer.Option(
            help="Steps that a fragment may be under way before a merge waits no longer (τ); 0: half of H.",
            rich_help_panel=_DILOCO,
        ),
    ] = 0,
    keep: Annotated[
        float,
        typer.Option(
            help="Share of what was learned since sending that stays on receipt; 0 as in the paper.",
            rich_help_panel=_DILOCO,
        ),
    ] = 1.0,
    wire: Annotated[
        str, typer.Option(help="How fragments travel: int4, int8, bf16 or fp32.", rich_help_panel=_DILOCO)
    ] = "int4",
    merge: Annotated[
        str,
        typer.Option(help="How outer gradients become one: rda (radial-directional) or mean.", rich_help_panel=_DILOCO),
    ] = "rda",
    quorum: Annotated[int, typer.Option(help="Islands that a merge needs at least (K).", rich_help_panel=_DILOCO)] = 1,
    grace: Annotated[
        float,
        typer.Option(help="Share of the slack that a merge waits for the others (γ).", rich_help_panel=_DILOCO),
    ] = 0.8,
    max_staleness: Annotated[
        int,
        typer.Option(help="Versions that an outer gradient's base may lie behind.", rich_help_panel=_DILOCO),
    ] = 4,
    outer_lr: Annotated[float, typer.Option(help="Learning rate of the outer step.", rich_help_panel=_DILOCO)] = 0.7,
    outer_momentum: Annotated[
        float,
        typer.Option(
            help="Nesterov momentum of the outer step; a run of few outer steps wants little.",
            rich_help_panel=_DILOCO,
        ),
    ] = 0.9,
    gate_holdout: Annotated[
        float,
        typer.Option(
            help="Keep an outer gradient out that raises the holdout loss of the merge by more; 0: not measured.",
            rich_help_panel=_DILOCO,
        ),
    ] = 0.0,
    min_diversity: Annotated[
        float,
        typer.Option(
            help="Mean Jensen-Shannon divergence (nats) by which adaptive islands' mixes are set apart, so that they learn from each other; 0: they aren't.",
            rich_help_panel=_MIX,
        ),
    ] = 0.01,
    feedback_rounds: Annotated[
        int,
        typer.Option(
            help="Rounds between two feedback messages, each with a measurement on the holdout; 0: an outer cycle.",
            rich_help_panel=_DILOCO,
        ),
    ] = 0,
    feedback_bytes: Annotated[
        int,
        typer.Option(
            help="Room for what has changed in a feedback message, the most telling first; 0: all is told.",
            rich_help_panel=_DILOCO,
        ),
    ] = 0,
    feedback_epsilon: Annotated[
        float,
        typer.Option(
            help="Differential privacy of the feedback: ε that each island's messages of the whole run may cost; 0: no noise.",
            rich_help_panel=_DILOCO,
        ),
    ] = 0.0,
    feedback_delta: Annotated[float, typer.Option(help="… and the δ of that budget.", rich_help_panel=_DILOCO)] = 1e-5,
    feedback_clip: Annotated[
        float,
        typer.Option(
            help="… for which a sequence's loss counts up to so far (nats) from what is known of its tier.",
            rich_help_panel=_DILOCO,
        ),
    ] = 1.0,
    checkpoint_cycles: Annotated[
        int, typer.Option(help="Outer cycles between two whole checkpoints of an island.")
    ] = 1,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face model configuration: a JSON file, or a local model folder.")
    ] = None,
    online_influence: Annotated[
        bool,
        typer.Option(
            "--online-influence",
            help="Measure what every span contributes to the descent of the holdout loss; `atoll ask online_influence` sums it up.",
            rich_help_panel=_MIX,
        ),
    ] = False,
    tier_version: Annotated[
        int | None,
        typer.Option(help="Tier version to train on; the newest that has views by default.", rich_help_panel=_MIX),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay",
            help="Stay on the tier version; else islands go over to newer ones at a round's edge.",
            rich_help_panel=_MIX,
        ),
    ] = False,
    max_repeats: Annotated[
        int,
        typer.Option(
            help="How often a document may come again; a tier that runs out leaves its weight to the next one.",
            rich_help_panel=_MIX,
        ),
    ] = 4,
    group_by: Annotated[
        str,
        typer.Option(
            help="Mix other groups than the tiers: an SQL expression over the columns of documents, tier and score that names a document's group.",
            rich_help_panel=_MIX,
        ),
    ] = "",
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Weights of the groups, as faq=.6,table=.4; again for each further island, taken in turn.",
            rich_help_panel=_MIX,
        ),
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    logger: LoggerOption = "",
) -> None:
    """Train a run on this machine: a syncer and the islands, started again when they die. The same command continues an interrupted run.

    Example: atoll train --run first --islands 4 --steps 160
    """
    from trainer.plan import configure_run
    from trainer.run import create_run

    its_store = opened(store)
    config = configure_run(
        its_store,
        run=run,
        tier_version=tier_version,
        num_islands=islands,
        strategies=tuple(name.strip() for name in strategies.split(",")),
        steps=steps,
        batch_size=batch_size,
        micro_batch=micro_batch,
        seq_len=seq_len,
        lr=lr,
        warmup_steps=warmup,
        schedule=schedule,
        weight_decay=weight_decay,
        gradient_clip=clip,
        parallel=parallel,
        compile=compile_,
        sync_every=sync_every,
        num_fragments=fragments,
        overlap_steps=overlap,
        keep=keep,
        wire=wire,
        merge=merge,
        quorum=quorum,
        grace=grace,
        max_staleness=max_staleness,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        gate_holdout=gate_holdout,
        min_diversity=min_diversity,
        feedback_rounds=feedback_rounds,
        feedback_bytes=feedback_bytes,
        feedback_epsilon=feedback_epsilon,
        feedback_delta=feedback_delta,
        feedback_clip=feedback_clip,
        checkpoint_cycles=checkpoint_cycles,
        model=model_of(model) or {},
        online_influence=online_influence,
        follow_tiers=not stay,
        max_repeats=max_repeats,
        group_by=group_by,
        group_weights=tuple(parse_weights("--weights", text) for text in weights or ()),
        seed=seed,
        device=device,
    )
    create_run(its_store, config)
    launch_run(its_store, run, logger=logger)


@app.command(rich_help_panel=TRAIN)
def island(
    run: Annotated[str, typer.Option("--run", help="Name of the run.")],
    island: Annotated[
        int,
        typer.Option("--island", help="Number of the island, from 0; one that the run wasn't planned for joins it."),
    ],
    store: StoreOption = DEFAULT_STORE,
    no_syncer: Annotated[
        bool, typer.Option("--no-syncer", help="Don't take the syncer's role where nobody holds it.")
    ] = False,
    logger: LoggerOption = "",
) -> None:
    """Run one island of a run, here; its status goes to stdout as JSON lines. Under torchrun all ranks together are the island.

    Example: atoll island --store s3://bucket/atoll --run first --island 2
    """
    from trainer.roles import leave_on_sigterm, run_island

    leave_on_sigterm()
    run_island(opened(store), run, island, emit=_print_json, hosts_syncer=not no_syncer, logger=logger)


@app.command(rich_help_panel=TRAIN)
def syncer(
    run: Annotated[str, typer.Option("--run", help="Name of the run.")],
    store: StoreOption = DEFAULT_STORE,
    logger: LoggerOption = "",
) -> None:
    """Stand by for the syncer's role of a run, and hold it whenever it's free; its status goes to stdout as JSON lines.

    Example: atoll syncer --store s3://bucket/atoll --run first
    """
    from trainer.roles import leave_on_sigterm, run_syncer

    leave_on_sigterm()
    run_syncer(opened(store), run, emit=_print_json, logger=logger)


@app.command(rich_help_panel=TRAIN)
def leave(
    run: Annotated[str, typer.Option("--run", help="Name of the run.")],
    island: Annotated[int, typer.Option("--island", help="Number of the island.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Take an island out of a run: it stops at its round's edge; the others and the run's end no longer wait for it. Started again, it's back.

    Example: atoll leave --run first --island 2
    """
    from trainer.members import say_left
    from trainer.run import load_run

    say_left(load_run(opened(store), run), island)
    STDERR.print(
        f"  island {island} leaves run {run} at the edge of its round; `atoll island --run {run} --island {island}` brings it back"
    )


@app.command(rich_help_panel=ASK)
def replay(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    store: StoreOption = DEFAULT_STORE,
    to: Annotated[int | None, typer.Option(help="Last merge; the newest by default.")] = None,
    since: Annotated[
        int | None, typer.Option("--from", help="Merge whose snapshot it starts from; the run's first by default.")
    ] = None,
) -> None:
    """Make the merges of a run again from the islands' outer gradients, and hold each against the tape, bit for bit.

    Example: atoll replay first
    """
    from tools.progress import progress_report
    from trainer.run import load_run
    from trainer.tape import first_state, replay, snapshots

    its_run = load_run(opened(store), run)
    anatomy = first_state(its_run)[1]
    known = snapshots(its_run)
    if not known:
        raise UserError(f"run {run} has not begun; `atoll train --run {run}` begins it")
    start = known[0] if since is None else since
    if start not in known:
        raise UserError(f"run {run} has no snapshot after merge {start}; there are {', '.join(map(str, known))}")
    with progress_report() as report:
        state = replay(
            its_run, anatomy, start=start, end=to, on_merge=lambda merge: report("replay", merge - start, None)
        )
    STDERR.print(f"  merges {start + 1} to {state.merge} of run {run} come out as they stand on the tape, bit for bit")


@app.command(rich_help_panel=ASK)
def export(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
    store: StoreOption = DEFAULT_STORE,
    merge: Annotated[int | None, typer.Option(help="After this merge; the newest by default.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Write the global model as a Hugging Face folder, with its tokenizer, that AutoModelForCausalLM loads.

    Example: atoll export first --out model
    """
    from trainer.export import export_model

    at = export_model(opened(store), run, out, merge=merge, dtype=dtype)
    STDERR.print(f"  run {run} after merge {at}: {out}", markup=False)


@app.command(rich_help_panel=ASK)
def evaluate(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    store: StoreOption = DEFAULT_STORE,
    merge: Annotated[int | None, typer.Option(help="After this merge; the newest by default.")] = None,
    sequences: Annotated[int, typer.Option(help="Sequences of each domain at most.")] = 256,
    by: Annotated[str, typer.Option(help="SQL expression over documents that names the domain of each.")] = "corpus",
    device: DeviceOption = "auto",
    format_: FormatOption = Format.table,
) -> None:
    """Measure the holdout loss of the global parameters, domain by domain.

    Example: atoll evaluate first
    """
    from trainer.export import evaluate_domains

    print_answer(evaluate_domains(opened(store), run, merge=merge, sequences=sequences, by=by, device=device), format_)


def launch_run(store: Store, run_name: str, *, logger: str = "") -> None:
    """Starts all roles of a run here and shows them until the run is over."""
    from manifests.catalog import Catalog
    from tools.live import LiveView
    from trainer.launch import launch, warm_up
    from trainer.run import load_run
    from trainer.tape import prepare_run
    from trainer.undo import require_not_undone

    catalog = Catalog(store)
    run = load_run(store, run_name, catalog=catalog)
    require_not_undone(catalog, run_name)
    if catalog.rows("SELECT 1 FROM events WHERE run = ? AND kind = 'finished'", [run_name]):
        STDERR.print(f"run {run_name} has finished already; `atoll report --run {run_name}` shows it")
        return
    warm_up(run.config.num_islands, also=["tools.app", "tools.commands.train"])
    prepare_run(run)
    with LiveView(run.config) as on_status:
        launch(run, on_status=on_status, logger=logger)


def _print_json(status: dict[str, Any]) -> None:
    print(json.dumps(status), flush=True)
