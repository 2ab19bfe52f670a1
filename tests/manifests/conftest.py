"""A new store for each test of the manifests, copied: making one takes longer than many of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from manifests.store import Store
from manifests.tables import create_store


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a new store, to be copied."""
    return create_store(str(tmp_path_factory.mktemp("new") / "store")).root


@pytest.fixture
def store(new_store: Path, tmp_path: Path) -> Store:
    """A new store on a folder."""
    return Store(str(shutil.copytree(new_store, tmp_path / "store")))
