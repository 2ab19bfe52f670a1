"""The store on a folder and on a real S3 server: whole objects, one winner, clear errors."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manifests.errors import Failure, ObjectMissing, ObjectTaken, StoreUnreachable, UserError
from manifests.store import Store
from manifests.tables import create_store, open_store


@pytest.fixture(params=["folder", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return create_store(str(tmp_path / "store"))
    return create_store(request.getfixturevalue("s3_environment"))


def test_object_comes_back_as_it_was_written(any_store: Store) -> None:
    any_store.put_new("runs/r/x.bin", b"\x00\x01")
    assert any_store.get("runs/r/x.bin") == b"\x00\x01"
    assert any_store.exists("runs/r/x.bin")


def test_second_writer_of_a_name_is_refused_and_changes_nothing(any_store: Store) -> None:
    any_store.put_new("x", b"first")
    with pytest.raises(ObjectTaken):
        any_store.put_new("x", b"second")
    assert any_store.put_content("x", b"second") is False
    any_store.put_new("x", b"first")  # its own object, met again after a lost reply
    assert any_store.get("x") == b"first"


def test_race_for_a_name_has_one_winner(any_store: Store) -> None:
    def race(number: int) -> bool:
        return any_store.put_content("runs/contested", str(number).encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert sum(won) == 1
    assert any_store.get("runs/contested") == str(won.index(True)).encode()


def test_missing_object_is_named(any_store: Store) -> None:
    with pytest.raises(ObjectMissing, match="runs/none"):
        any_store.get("runs/none")
    assert not any_store.exists("runs/none")
    any_store.delete("runs/none")


def test_listing_shows_what_lies_below_a_folder_and_not_its_namesakes(any_store: Store) -> None:
    for path in ("a/1", "a/b/2", "ab/3"):
        any_store.put_new(path, b"x")
    assert {info.path for info in any_store.list("a")} == {"a/1", "a/b/2"}
    assert list(any_store.list("nothing")) == []


def test_store_is_made_once_and_opened_again(any_store: Store) -> None:
    assert create_store(any_store.uri).uri == any_store.uri
    assert open_store(any_store.uri).uri == any_store.uri


def test_missing_store_names_the_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="atoll ingest"):
        open_store(str(tmp_path / "nowhere"))


def test_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Atoll store"):
        open_store(str(tmp_path))


def test_newer_store_is_refused(store: Store) -> None:
    (store.root / "atoll.json").write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="update Atoll"):
        open_store(store.uri)


@pytest.mark.parametrize("uri", ["ftp://host/x", "s3://"])
def test_unusable_address_is_refused(uri: str) -> None:
    with pytest.raises(UserError):
        Store(uri)


def test_wrong_credentials_say_so(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UserError, match="credentials"):
        open_store(s3_environment)


def test_missing_bucket_is_an_error_not_an_empty_store(s3_environment: str) -> None:
    with pytest.raises((UserError, Failure)):
        open_store("s3://no-such-bucket-here/x")


def test_absent_server_is_unreachable(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("manifests.store._RETRY", {"max_retries": 1})
    with pytest.raises(StoreUnreachable):
        open_store(s3_environment)


def test_writer_killed_in_the_middle_leaves_no_object(store: Store) -> None:
    """Objects appear whole or not at all: a process that dies while it writes big ones leaves only whole ones."""
    code = (
        "import sys; from manifests.store import Store; s = Store(sys.argv[1])\n"
        "print('go', flush=True)\n"
        "for i in range(10_000): s.put_new(f'big/{i}', bytes([i % 256]) * 20_000_000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, store.uri], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        process.wait(timeout=0.7)
    except subprocess.TimeoutExpired:
        process.kill()
    process.wait()
    objects = [info for info in store.list("big") if "#" not in info.path]
    assert all(info.size_bytes == 20_000_000 for info in objects)
