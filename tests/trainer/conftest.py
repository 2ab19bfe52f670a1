"""Fixtures of the trainer's tests: a tiny store that a run can be trained on, see tiny.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from manifests.store import Store
from tiny import fabricate


@pytest.fixture(scope="session", autouse=True)
def _impatient() -> Iterator[None]:
    """Islands and syncer look around often, and leave cores to each other."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.receiver._POLL_S", 0.01)
        patch.setattr("trainer.receiver._NEWS_EVERY_S", 0.02)
        patch.setattr("trainer.syncer._POLL_S", 0.01)
        patch.setattr("trainer.syncer._MEMBERS_EVERY_S", 0.05)
        yield


@pytest.fixture
def tiny_store(store: Store) -> Store:
    """A store with documents, tiers, a pool and views."""
    fabricate(store)
    return store
