"""The benchmark of online influence, on a model of no size: what it reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tools.bench import online
from trainer.config import default_model


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_overhead_is_reported_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = default_model(online.VOCABULARY) | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    monkeypatch.setattr(online, "MODELS", {"default": tiny, "other": tiny})
    monkeypatch.setattr(online, "FULL", online.Size(blocks=2, steps=1))
    figures = online.measure(False)
    for name in ("online_overhead", "online_overhead_other"):
        assert len(figures[name].values) == 2
        assert figures[name].unit == "share"
    assert figures["steps_per_s"].median > 0
