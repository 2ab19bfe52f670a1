"""What feedback costs on the wire, and whether a bad network brings its readers apart: on messages of islands that train on real text.

The messages are those of a real training (islands and syncer in turn, four tiers, adaptive mixes); they're told again, over networks that lose, repeat, delay and
reorder them and their acknowledgements, to three readers each.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.frame import Figure
from tools.output import STDERR
from trainer.feedback import Feedback

LINK_BPS = 0.84e9
"""The link that Decoupled DiLoCo (arXiv 2604.21428) reports on."""
ROUND_S = 6.0
"""A round of H / P = 6 steps of a second each."""
READERS = 3
LOSS, REPEAT, MOST_LATE = 0.3, 0.2, 5
"""Share of the messages lost and sent twice, and by how many messages one may be late."""
BUDGETS = (8, 4)
"""Bytes of changes in a message, where there is a bound."""
Told = list[tuple[int, Feedback]]
"""What an island tells: sequence number and content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    documents: int
    islands: int
    cycles: int
    deliveries: int
    seeds: tuple[int, ...]


FULL = Size(documents=6_000, islands=4, cycles=96, deliveries=1_000, seeds=(0, 1, 2))
QUICK = Size(documents=400, islands=2, cycles=12, deliveries=100, seeds=(0,))
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
_COMMON: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "sync_every": 8, "num_fragments": 4, "holdout_sequences": 16}


def measure(quick: bool) -> Mapping[str, Figure | str]:
    """All figures."""
    size = QUICK if quick else FULL
    runs = [_train(size, seed) for seed in size.seeds]
    told = [[(n, feedback) for n, feedback, _ in island] for run in runs for island in run]
    sent = [[text for _, _, text in island] for run in runs for island in run]
    # In steady state: after the first acknowledgement, which the first message or two can't have.
    steady = [texts[3:] for texts in sent]
    per_message = [statistics.fmean(map(len, texts)) for texts in steady]
    as_json = [
        statistics.fmean(len(_json(island, n, feedback)) for n, feedback in messages[3:])
        for island, messages in enumerate(told)
    ]
    per_round = [x / _COMMON["num_fragments"] for x in per_message]
    figures: dict[str, Figure | str] = {
        "bytes_vs_json": Figure(
            values=[a / b for a, b in zip(per_message, as_json, strict=True)],
            unit="ratio",
            meaning="bytes of a message as it travels / of the same content as JSON, island by island; target: at most 0.05",
        ),
        "bytes_per_island_round": Figure(values=per_round, unit="bytes", meaning="one message in P = 4 rounds"),
        "bytes_per_message": Figure(values=per_message, unit="bytes", meaning="in steady state, with its text coding"),
        "bytes_per_message_json": Figure(values=as_json, unit="bytes", meaning="the same content as JSON"),
        "bytes_full_message": Figure(values=[float(len(t[0])) for t in sent], unit="bytes", meaning="the first"),
    }
    for islands in (8, 32, 1000):
        share = [x * islands * 8 / ROUND_S / LINK_BPS for x in per_round]
        figures[f"link_share_{islands}"] = Figure(
            values=share, unit="share", meaning=f"of a link of 0.84 Gbit/s, {islands} islands, rounds of {ROUND_S:g} s"
        )
    for budget in BUDGETS:
        figures |= _with_budget(told, budget)
    return figures | _over_bad_networks(told, size)


def _json(island: int, sequence: int, feedback: Feedback) -> bytes:
    """What one would send without a protocol; None for what is unknown."""
    row = {"island": island, "incarnation": 0, "sequence": sequence, **feedback.to_row()}
    return json.dumps({name: None if x != x else x for name, x in row.items()}).encode()


def _train(size: Size, seed: int) -> list[list[tuple[int, Feedback, str]]]:
    """What each island of a run tells, as it meant it and as it travelled."""
    from tools.bench.tiered import make_tiered_store
    from tools.realtext import export_wikipedia
    from trainer.plan import configure_run
    from trainer.run import create_run
    from trainer.syncer import Syncer
    from trainer.tape import prepare_run

    with tempfile.TemporaryDirectory(prefix="atoll-feedback-") as folder:
        text = Path(folder) / "text.parquet"
        export_wikipedia(text, num_documents=size.documents, seed=seed)
        store = make_tiered_store(
            Path(folder) / "store", text, corpus="wikipedia", holdout_share=0.1, vocab_size=384, tiers="SABC"
        )
        config = configure_run(
            store,
            run="r",
            tier_version=None,
            model=MODEL,
            num_islands=size.islands,
            strategies=("adaptive",),
            steps=size.cycles * _COMMON["sync_every"],
            checkpoint_cycles=1000,
            seed=seed,
            device="cpu",
            **_COMMON,
        )
        run = create_run(store, config)
        prepare_run(run)
        islands = [_Listening(run, number) for number in range(size.islands)]
        syncer = Syncer(run, emit=_ignore, in_background=False)
        for round_ in range(config.num_rounds):
            for island in islands:
                island.train_round()
            for island in islands:
                island.receive_now()
            syncer.sweep()
            if round_ % 40 == 0:
                STDERR.print(f"  seed {seed}: round {round_} of {config.num_rounds}")
        for island in islands:
            island.close()
        syncer.close()
        return [island.sent for island in islands]
