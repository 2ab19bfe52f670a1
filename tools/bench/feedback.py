"""What feedback costs on the wire, and whether a bad network brings its readers apart: on messages of islands that train on real text.

The messages are those of a real training (islands and syncer in turn, four tiers, adaptive mixes); they're told again, over networks that lose, repeat, delay and
reorder them and their acknowledgements, to three readers each.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

from manifests.schemas import TABLES, TIERS
from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.bench.turns import train_in_turn
from tools.output import STDERR
from trainer.feedback import SCALES, Feedback
from trainer.messages import Heard, Key, Levels, Teller, decode, levels_of, to_text
from trainer.run import Run
from trainer.syncer import Syncer
from trainer.wire import unpack

LINK_BPS = 0.84e9
"""The link that Decoupled DiLoCo (arXiv 2604.21428) reports on."""
ROUND_S = 6.0
"""A round of H / P = 6 steps of a second each."""
READERS = 3
LOSS, REPEAT, MOST_LATE = 0.3, 0.2, 5
"""Share of the messages lost and sent twice, and by how many messages one may be late."""
BUDGETS = (8, 4)
"""Bytes of changes in a message, where there is a bound."""
BEFORE_STEADY = 4
"""Messages that come before the first acknowledgement can be there, and so are full."""
Values = dict[str, float | None]
"""What an island tells of a cycle, by the names of SCALES."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    documents: int
    islands: int
    cycles: int
    deliveries: int
    seeds: tuple[int, ...]


FULL = Size(documents=3_000, islands=2, cycles=48, deliveries=1_000, seeds=(0, 1, 2))
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
FRAGMENTS = 4
_COMMON: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "sync_every": 8, "holdout_sequences": 16, "device": "cpu"}
_DECISIVE = [i for i, scale in enumerate(SCALES) if scale.name in [f"effectiveness_{tier.lower()}" for tier in TIERS]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spoken:
    """One island's messages."""

    values: list[Values]
    """As they were meant; the first is of sequence number 1."""
    texts: list[str]
    """As they travelled in the headers of outer gradients."""
    jsons: list[bytes]
    """The same content as JSON."""


def measure(quick: bool) -> Mapping[str, Figure | str]:
    """All figures."""
    size = QUICK if quick else FULL
    islands = [island for seed in size.seeds for island in _train(size, seed)]
    per_message = [statistics.fmean(map(len, island.texts[BEFORE_STEADY:])) for island in islands]
    as_json = [statistics.fmean(map(len, island.jsons[BEFORE_STEADY:])) for island in islands]
    per_round = [x / FRAGMENTS for x in per_message]
    figures: dict[str, Figure | str] = {
        "bytes_vs_json": Figure(
            values=[a / b for a, b in zip(per_message, as_json, strict=True)],
            unit="ratio",
            meaning="bytes of a message as it travels / of the same content as JSON, island by island; target: at most 0.05",
        ),
        "bytes_per_island_round": Figure(
            values=per_round, unit="bytes", meaning=f"one message in P = {FRAGMENTS} rounds"
        ),
        "bytes_per_message": Figure(values=per_message, unit="bytes", meaning="in steady state"),
        "bytes_per_message_json": Figure(values=as_json, unit="bytes", meaning="the same content as JSON"),
        "bytes_full_message": Figure(
            values=[float(len(island.texts[0])) for island in islands], unit="bytes", meaning="the first"
        ),
    }
    for number in (8, 32, 1000):
        figures[f"link_share_{number}"] = Figure(
            values=[x * number * 8 / ROUND_S / LINK_BPS for x in per_round],
            unit="share",
            meaning=f"of a link of 0.84 Gbit/s, {number} islands, rounds of {ROUND_S:g} s",
        )
    told = [island.values for island in islands]
    for budget in BUDGETS:
        figures |= _with_budget(told, budget)
    return figures | _over_bad_networks(told, size)


def _train(size: Size, seed: int) -> list[Spoken]:
    """What each island of a run tells."""
    from tools.bench.tiered import make_tiered_store
    from tools.realtext import export_wikipedia
    from trainer.metrics import Metrics, read_metrics
    from trainer.plan import configure_run
    from trainer.run import create_run
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
            num_fragments=FRAGMENTS,
            checkpoint_cycles=1000,
            seed=seed,
            **_COMMON,
        )
        run = create_run(store, config)
        prepare_run(run)
        roles = [f"island-{number:04d}" for number in range(size.islands)]
        metrics = [Metrics(store, f"{run.folder}/metrics/{role}", role=role, incarnation=0) for role in roles]
        train_in_turn(run, metrics=metrics, on_round=partial(_report, seed, config.num_rounds)).close()
        for metric in metrics:
            metric.close()
        lines = [line for line in read_metrics(store, "r")[0] if line["kind"] == "feedback"]
        return [_spoken(run, n, [line for line in lines if line["role"] == role]) for n, role in enumerate(roles)]


def _report(seed: int, num_rounds: int, round_: int, syncer: Syncer) -> None:
    if round_ % 40 == 0:
        STDERR.print(f"  seed {seed}: round {round_} of {num_rounds}")


def _spoken(run: Run, island: int, lines: list[dict[str, Any]]) -> Spoken:
    lines.sort(key=lambda line: line["sequence"])
    texts: list[str] = []
    for info in sorted(run.store.list(run.outer_folder(island)), key=lambda info: info.path):
        texts += unpack(run.store.get(info.path), name=info.path)[1]["feedback"]
    assert len(texts) == len(lines), f"{len(texts)} messages went out, {len(lines)} were made"
    names = set(TABLES["feedback"].schema.names)
    contents = [{name: value for name, value in line.items() if name in names} for line in lines]
    return Spoken(
        values=[_values(content) for content in contents],
        texts=texts,
        jsons=[json.dumps({"island": island, "incarnation": 0, **content}).encode() for content in contents],
    )


def _values(content: Mapping[str, Any]) -> Values:
    by_tier = {t: content[f"effectiveness_{t.lower()}"] for t in TIERS}
    errors = {t: content[f"effectiveness_error_{t.lower()}"] for t in TIERS}
    names = ("loss_trend", "convergence_rate", "convergence_error", "generalization_gap", "step_time_s", "upload_bps")
    rest = {name: content[name] for name in (*names, "latency_s")}
    return Feedback(effectiveness=by_tier, effectiveness_error=errors, **rest).to_values()


# Told again.


def _with_budget(told: Sequence[list[Values]], budget: int) -> dict[str, Figure]:
    """Over a network that loses nothing and acknowledges two messages later."""
    sizes, behind = [], []
    for island, messages in enumerate(told):
        teller, heard = Teller(scales=SCALES, island=island, incarnation=0, budget_bytes=budget), Heard()
        acknowledgements: list[Key | None] = [None, None]
        lengths, distances = [], []
        for sequence, values in enumerate(messages, start=1):
            data = teller.tell(sequence, values)
            heard = heard.joined(Heard.of(decode(data, SCALES)))
            acknowledgements.append(heard.acknowledged)
            teller.acknowledge(acknowledgements[-3])
            known, meant = heard.states(len(SCALES))[0, sequence], levels_of(values, SCALES)
            if sequence > BEFORE_STEADY:
                lengths.append(len(to_text(data)))
                pairs = [(known[i], meant[i]) for i in _DECISIVE]
                distances += [abs((a or 0) - b) for a, b in pairs if b is not None]
        sizes.append(statistics.fmean(lengths))
        behind.append(statistics.fmean(distances))
    return {
        f"bytes_per_message, {budget} bytes of changes": Figure(values=sizes, unit="bytes", meaning="with a bound"),
        f"effectiveness_behind, {budget} bytes of changes": Figure(
            values=behind,
            unit="quarters of its standard error",
            meaning="mean distance of a tier's effectiveness as it's known from what was meant",
        ),
    }


def _over_bad_networks(told: Sequence[list[Values]], size: Size) -> dict[str, Figure]:
    """Random deliveries, each of one island's messages to several readers."""
    outcomes = []
    for number in range(size.deliveries):
        chance = random.Random(number)
        outcomes.append(_deliver(chance.choice(told), chance))
    return {
        "lossy_converged": Figure(
            values=[statistics.fmean(outcome.is_the_same_everywhere for outcome in outcomes)],
            unit="share",
            meaning=f"of {size.deliveries} random deliveries after which {READERS} readers that have exchanged what they have know the same, and nothing that was not meant",
        ),
        "lossy_lag": Figure(
            values=[outcome.lag for outcome in outcomes],
            unit="messages",
            meaning=f"by which what the acknowledging reader knows is older than the newest, on the mean; {LOSS:.0%} lost, up to {MOST_LATE} late",
        ),
        "lossy_lag_perfect_reading": Figure(
            values=[outcome.lag_of_arrivals for outcome in outcomes],
            unit="messages",
            meaning="the same, if every message that arrives could be read by itself",
        ),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one delivery."""

    is_the_same_everywhere: bool
    lag: float
    lag_of_arrivals: float


def _deliver(messages: list[Values], chance: random.Random) -> Outcome:
    """Tells all, one a tick, to readers over networks of their own; acknowledgements of the first reader travel the same way. The island starts again now and then."""
    incarnation = 0
    teller = Teller(scales=SCALES, island=0, incarnation=incarnation)
    meant: dict[Key, Levels] = {}
    mail: list[list[tuple[int, bytes]]] = [[] for _ in range(READERS)]
    acknowledgements: list[tuple[int, Key | None]] = []
    readers = [Heard() for _ in range(READERS)]
    newest_arrived = 0
    lags, arrival_lags = [], []
    for sequence, values in enumerate(messages, start=1):
        if chance.random() < 0.02:
            incarnation += 1
            teller = Teller(scales=SCALES, island=0, incarnation=incarnation)
        data = teller.tell(sequence, values)
        meant[incarnation, sequence] = levels_of(values, SCALES)
        for reader, letters in enumerate(mail):
            for _ in range(1 + (chance.random() < REPEAT)):
                if chance.random() >= LOSS:
                    letters.append((sequence + chance.randint(0, MOST_LATE), data))
            due = [decode(letter, SCALES) for at, letter in letters if at <= sequence]
            chance.shuffle(due)
            mail[reader] = [letter for letter in letters if letter[0] > sequence]
            readers[reader] = reduce(Heard.joined, map(Heard.of, due), readers[reader])
            if reader == 0:
                newest_arrived = max([newest_arrived, *(message.sequence for message in due)])
        lags.append(sequence - max(readers[0].states(len(SCALES)), default=(0, 0))[1])
        arrival_lags.append(sequence - newest_arrived)
        if chance.random() >= LOSS:
            acknowledgements.append((sequence + chance.randint(0, MOST_LATE), readers[0].acknowledged))
        for at, key in acknowledgements:
            if at == sequence:
                teller.acknowledge(key)
    forth, back = reduce(Heard.joined, readers), reduce(Heard.joined, reversed(readers))
    states = forth.states(len(SCALES))
    is_true = all(meant[key] == levels for key, levels in states.items())
    return Outcome(
        is_the_same_everywhere=forth == back and bool(states) and is_true,
        lag=statistics.fmean(lags),
        lag_of_arrivals=statistics.fmean(arrival_lags),
    )


BENCHMARK = Benchmark(
    name="feedback",
    question="What does feedback cost on the wire, and does a network that loses, repeats, delays and reorders it bring its readers apart?",
    measure=measure,
    notes=(
        "Messages of islands that train on real text (a model of 0.03 M parameters, four tiers that differ in nothing, adaptive mixes), islands and syncer in turn. JSON is what the run's metrics hold "
        "of the same message: all digits, no names shortened, nothing left out.",
        "The bytes are those in the outer gradient's header, text coding (5 characters for 4 bytes) and all; what surrounds them there isn't counted, nor is JSON's.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
