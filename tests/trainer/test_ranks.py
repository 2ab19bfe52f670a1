"""Tests of trainer/ranks.py: two real ranks over gloo, compared with one process. Run as a script, this file is such a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from manifests.errors import UserError
from trainer.config import RunConfig
from trainer.engine import LocalEngine, started_by_torchrun
from trainer.model import embeddings_of, parameters_of
from trainer.ranks import RanksEngine, serve_rank

ROOT = Path(__file__).parents[2]
MODEL = {
    "model_type": "llama",
    "vocab_size": 65,  # odd, as the MLP's width: neither can be cut into two equal parts
    "hidden_size": 32,
    "intermediate_size": 45,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
NUM_STEPS = 4
TOLERANCE = 1e-5
LRS = (1e-3, 3e-3, 2e-3, 1e-3)
Results = dict[str, Any]


def _config(**options: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "run": "r", "tier_version": 1, "pool": "p", "token_dtype": "uint16", "vocab_size": 64, "model": MODEL, "batch_size": 8, "seq_len": 12,
        "gradient_clip": 0.1, "device": "cpu",
    }  # fmt: skip
    return RunConfig(**(defaults | options))


def _tokens(count: int, *, seed: int) -> torch.Tensor:
    return torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(seed))


def _local() -> LocalEngine:
    return LocalEngine(_config(), holdout_NL=_holdout())


def _holdout() -> torch.Tensor:
    """More than one rank's batch for one rank, and just one for the other: 33 and 32."""
    return _tokens(65, seed=99)


def _take_steps(engine: RanksEngine | LocalEngine, first: int, last: int) -> torch.Tensor:
    return torch.stack(
        [engine.step(_tokens(8, seed=step), lr=LRS[step % 4], step=step).losses_BL for step in range(first, last)]
    )


def _load(engine: LocalEngine, tensors: Mapping[str, torch.Tensor], steps: Mapping[str, int]) -> None:
    """One process trains on in the very moments that it's given."""
    engine.load_state({name: tensor.clone() for name, tensor in tensors.items()}, steps)


def _other_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in parameters_of(model).items()
        if "layers.1.mlp" in name or "embed" in name
    }


def _exercise(engine: RanksEngine, local_state: Any) -> Results:
    """Everything that a rank 0 does, one after the other; the tests look at what came of it."""
    results: Results = {"names": list(parameters_of(engine.model)), "embeddings": embeddings_of(engine.model)}
    results["losses"] = _take_steps(engine, 0, NUM_STEPS)
    results["state"] = engine.state()
    results["holdout"] = engine.holdout_loss(_holdout())
    results["small holdout"] = engine.holdout_loss(_holdout()[:1])
    others = _other_parameters(engine.model)
    engine.write(others)
    results["others"] = others
    results["others read"] = engine.read(list(others))
    results["others' holdout"] = engine.holdout_loss(_holdout())
    results["others' losses"] = _take_steps(engine, NUM_STEPS, NUM_STEPS + 1)
    engine.load_state(*local_state)
    results["state after loading"] = engine.state()
    results["losses after loading"] = _take_steps(engine, NUM_STEPS, NUM_STEPS + 2)
    return results


def _be_a_rank(folder: Path) -> None:
    assert started_by_torchrun()
    dist.init_process_group("gloo")  # one for all engines, which leave it open
    for way in ("ddp", "fsdp", "death"):
        config = _config(parallel="ddp" if way == "ddp" else "fsdp", micro_batch=2)
        if os.environ["RANK"] != "0":
            serve_rank(config)
            continue
        engine = RanksEngine(config)
        if way == "death":
            engine.step(_tokens(8, seed=0), lr=1e-3, step=0)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save(_exercise(engine, torch.load(folder / "local.pt")), folder / f"{way}.pt")
        engine.close()


@pytest.fixture(scope="module")
def local() -> Results:
    """What one process makes of the same."""
    engine = _local()
    results: Results = {"names": list(parameters_of(engine.model)), "embeddings": embeddings_of(engine.model)}
    results["losses"] = _take_steps(engine, 0, NUM_STEPS)
    results["state"] = engine.state()
    results["holdout"] = engine.holdout_loss(_holdout())
    results["small holdout"] = engine.holdout_loss(_holdout()[:1])
    engine.write(_other_parameters(engine.model))
    results["others' holdout"] = engine.holdout_loss(_holdout())
    results["others' losses"] = _take_steps(engine, NUM_STEPS, NUM_STEPS + 1)
    _load(engine, *results["state"])
    results["losses after loading"] = _take_steps(engine, NUM_STEPS, NUM_STEPS + 2)
    return results


@pytest.fixture(scope="module")
def ranks(local: Results, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Results]:
    """What two ranks make of it, either way, and what becomes of rank 1 when rank 0 dies.

    Not by torchrun, which would end rank 1 itself; but as with torchrun, the store that the ranks meet in isn't rank 0's.
    """
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(local["state"], folder / "local.pt")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env=environment | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, errors = processes[0].communicate(timeout=120)
        died = time.monotonic()
        assert processes[0].returncode == -signal.SIGKILL, errors[-4000:]
        _, last_words = processes[1].communicate(timeout=30)
        death = {"seconds": time.monotonic() - died, "code": processes[1].returncode, "last words": last_words}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {"death": death, **{way: torch.load(folder / f"{way}.pt") for way in ("ddp", "fsdp")}}


both_ways = pytest.mark.parametrize("way", ["ddp", "fsdp"])


@both_ways
def test_ranks_train_as_one_process_does(way: str, ranks: Mapping[str, Results], local: Results) -> None:
    torch.testing.assert_close(ranks[way]["losses"], local["losses"], rtol=TOLERANCE, atol=TOLERANCE)
    (found, found_steps), (expected, expected_steps) = ranks[way]["state"], local["state"]
    assert found_steps == expected_steps == dict.fromkeys(local["names"], NUM_STEPS)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@both_ways
def test_names_are_those_of_the_plain_model(way: str, ranks: Mapping[str, Results], local: Results) -> None:
    assert ranks[way]["names"] == local["names"]
    assert "lm_head.weight" not in local["names"], "it is tied"
    assert ranks[way]["embeddings"] == local["embeddings"] == {"model.embed_tokens.weight"}


@both_ways
def test_a_state_of_ranks_goes_on_in_one_process(way: str, ranks: Mapping[str, Results], local: Results) -> None:
    engine = _local()
    _load(engine, *ranks[way]["state"])
    losses = _take_steps(engine, NUM_STEPS, NUM_STEPS + 2)
    torch.testing.assert_close(losses, local["losses after loading"], rtol=TOLERANCE, atol=TOLERANCE)


@both_ways
def test_a_state_of_one_process_goes_on_in_ranks(way: str, ranks: Mapping[str, Results], local: Results) -> None:
    (found, found_steps), (expected, expected_steps) = ranks[way]["state after loading"], local["state"]
    assert found_steps == expected_steps
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    losses = ranks[way]["losses after loading"]
    torch.testing.assert_close(losses, local["losses after loading"], rtol=TOLERANCE, atol=TOLERANCE)


@both_ways
def test_what_is_written_is_read_to_the_bit_and_trained_on(
    way: str, ranks: Mapping[str, Results], local: Results
) -> None:
    found, written = ranks[way]["others read"], ranks[way]["others"]
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], value) for name, value in written.items())
    losses = ranks[way]["others' losses"]
    torch.testing.assert_close(losses, local["others' losses"], rtol=TOLERANCE, atol=TOLERANCE)


@both_ways
@pytest.mark.parametrize("which", ["holdout", "small holdout", "others' holdout"])
def test_holdout_loss_is_that_of_one_process(
    which: str, way: str, ranks: Mapping[str, Results], local: Results
) -> None:
    assert ranks[way][which] == pytest.approx(local[which], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 7}, r"batch_size is 7, which can't be shared evenly among 2 ranks; take a multiple of 2"),
        ({"micro_batch": 3}, r"batch_size is 8, .* 2 ranks × micro_batch 3; take a multiple of 6"),
        ({"online_influence": True}, r"islands of one process"),
    ],
)
def test_a_configuration_that_does_not_go_with_ranks_is_refused(
    options: Mapping[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=message):
        RanksEngine(_config(**options))
    with pytest.raises(UserError, match=message):
        serve_rank(_config(**options))


def test_torchrun_is_known_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not started_by_torchrun()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert not started_by_torchrun()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert started_by_torchrun()


def test_a_dead_rank_0_ends_the_others(ranks: Mapping[str, Results]) -> None:
    death = ranks["death"]
    assert death["code"] == 1
    assert "rank 0 of this island is gone, so rank 1 ends" in death["last words"]
    assert death["seconds"] < 5


if __name__ == "__main__":
    _be_a_rank(Path(sys.argv[1]))
