"""Who may import whom (DESIGN: the arrows), and that the light commands stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "manifests": {"manifests"},
    "pipeline": {"pipeline", "manifests"},
    "trainer": {"trainer", "manifests"},
    "tools": {"tools", "trainer", "pipeline", "manifests"},
}
HEAVY = ("torch", "streaming", "transformers", "datasets", "plotly")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_along_the_arrows(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        ours = _imports(path) & set(MAY_IMPORT)
        assert ours <= MAY_IMPORT[package], f"{path} imports {ours - MAY_IMPORT[package]}"


def test_shard_reading_imports_neither_streaming_nor_transformers() -> None:
    code = "import sys, trainer.stream; print([m for m in ('torch', 'streaming', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["sql", "select 1"]])
def test_light_commands_start_without_the_heavy_libraries(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from manifests.tables import create_store; create_store(sys.argv[1])\n"
        "from tools.cli import _run; code = _run(sys.argv[2:])\n"
        f"print('heavy:', [m for m in {HEAVY!r} if m in sys.modules], 'code:', code)"
    )
    store = str(tmp_path / "store")
    more = ["--store", store] if arguments[0] == "sql" else []
    done = subprocess.run(
        [sys.executable, "-c", code, store, *arguments, *more], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "heavy: [] code: 0" in done.stdout, done.stdout + done.stderr
