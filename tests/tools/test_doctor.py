"""The doctor: every version, the machine, the store's promises; trouble is a line and exit code 1; nothing is made, no key is shown."""

from __future__ import annotations

import json
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import obstore
import pytest

from manifests.errors import Failure
from manifests.schemas import SCHEMA_VERSION
from manifests.store import Store
from tests.conftest import KEY, SECRET
from tools.cli import _run
from tools.doctor import Line, require_health


class Overwriting(Store):
    """Ignores create-if-absent."""

    def put_new(self, path: str, data: bytes) -> None:
        obstore.put(self.objects, path, data, mode="overwrite")


def _doctor(uri: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit code, lines by what they are of, and stderr."""
    code = _run(["doctor", "--store", uri, "--format", "json"])
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert all(list(line) == ["what", "value", "ok", "detail"] for line in lines)
    assert len({line["what"] for line in lines}) == len(lines)
    return code, {line["what"]: line for line in lines}, shown.err


def test_absent_store_is_said_so_and_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, err = _doctor(str(tmp_path / "new" / "store"), capsys)
    assert (code, err) == (0, "")
    assert "doesn't exist yet" in lines["store"]["detail"]
    assert "listing" not in lines
    assert list(tmp_path.iterdir()) == []


def test_folder_without_a_store_is_not_probed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = _doctor(str(tmp_path), capsys)
    assert code == 0
    assert "doesn't exist yet" in lines["store"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_installation_and_machine_are_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = _doctor(str(tmp_path), capsys)
    required = [r for r in requires("atoll") or [] if "extra" not in r]
    assert len(required) > 10
    for name in ("deltalake", "obstore", "torch", "mosaicml-streaming"):
        assert lines[name]["value"] == version(name)
    assert sum(1 for line in lines.values() if (line["detail"] or "").startswith("asked for: ")) == len(required)
    assert {"atoll", "python", "platform", "cpus", "memory", "cuda", "cache disk", "store disk"} <= set(lines)
    assert int(lines["cpus"]["value"]) > 0
    assert "pytest" not in lines


def test_missing_dependency_is_trouble(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.doctor.requires", lambda _: ["no-such-thing>=3", "never; extra == 'dev'"])
    code, lines, err = _doctor(str(tmp_path), capsys)
    assert code == 1
    assert lines["no-such-thing"]["ok"] is False
    assert "pip install 'no-such-thing>=3'" in lines["no-such-thing"]["detail"]
    assert "never" not in lines
    assert "no-such-thing" in err


def test_sound_store_is_probed_and_left_clean(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(store.root.rglob("*"))
    code, lines, err = _doctor(store.uri, capsys)
    assert (code, err) == (0, "")
    assert lines["schema"]["value"] == str(SCHEMA_VERSION)
    for promise in ("read after write", "read after delete", "second writer", "racing writers", "listing"):
        assert lines[promise]["value"] == "kept"
        assert lines[promise]["ok"] is True
    for operation in ("put", "get", "exists", "list", "delete"):
        assert lines[f"{operation} latency"]["value"].endswith(" ms")
    assert lines["store"]["ok"] is True
    assert sorted(store.root.rglob("*")) == before


def test_broken_promise_is_printed_and_fails(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.doctor.Store", Overwriting)
    code, lines, err = _doctor(store.uri, capsys)
    assert code == 1
    assert lines["racing writers"]["ok"] is False
    assert "If-None-Match" in lines["racing writers"]["detail"]
    assert lines["listing"]["ok"] is True
    assert lines["store"]["ok"] is False
    assert err.startswith("error: ")
    assert "racing writers" in err
    assert len(err.splitlines()) == 1


def test_store_of_another_schema_is_trouble(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (store.root / "atoll.json").write_text('{"schema_version": 99}')
    code, lines, _ = _doctor(store.uri, capsys)
    assert code == 1
    assert lines["schema"]["value"] == "99"
    assert "update Atoll" in lines["store"]["detail"]


def test_unusable_address_still_shows_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, err = _doctor("ftp://host/x", capsys)
    assert code == 1
    assert lines["torch"]["value"] == version("torch")
    assert "s3://" in lines["store"]["detail"]
    assert err.startswith("error: ")


def test_settings_of_s3_are_shown_and_keys_are_not(
    s3_environment: str, s3_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(s3_environment).put_new("atoll.json", json.dumps({"schema_version": SCHEMA_VERSION}).encode())
    code, lines, err = _doctor(s3_environment, capsys)
    assert (code, err) == (0, "")
    assert lines["AWS endpoint"]["value"] == s3_server
    assert lines["AWS region"]["value"] == "us-east-1"
    assert lines["AWS credentials"]["value"] == "from the environment"
    assert lines["racing writers"]["ok"] is True
    assert "store disk" not in lines
    for secret in (KEY, SECRET):
        assert secret not in json.dumps(lines)


def test_password_in_an_endpoint_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@127.0.0.1:9")
    monkeypatch.setattr("manifests.store._RETRY", {"max_retries": 0})
    code, lines, _ = _doctor("s3://bucket/x", capsys)
    assert code == 1
    assert lines["AWS endpoint"]["value"] == "http://127.0.0.1:9"


def test_health_names_every_line_in_trouble() -> None:
    require_health([Line(what="a", value="1"), Line(what="b", value="2", ok=True)])
    with pytest.raises(Failure, match="trouble with: c, d;"):
        require_health([Line(what="c", value="1", ok=False), Line(what="d", value="2", ok=False)])
