"""The probe: real stores that keep their promises pass and stay clean; a store that breaks one is refused with its finding."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest

from manifests.errors import ObjectMissing, ObjectTaken, StoreUnreachable, UserError
from manifests.probe import probe_store, require_sound
from manifests.store import ObjectInfo, Store
from tools.chaos.s3_proxy import Cut, S3Proxy


class Overwriting(Store):
    """Ignores create-if-absent, as some S3-like stores do."""

    def put_new(self, path: str, data: bytes) -> None:
        obstore.put(self.objects, path, data, mode="overwrite")


class CheckingFirst(Store):
    """Looks whether the name is free and writes then: a second writer is refused, unless it comes at the same moment."""

    def put_new(self, path: str, data: bytes) -> None:
        if self.exists(path):
            raise ObjectTaken(path)
        time.sleep(0.002)
        obstore.put(self.objects, path, data, mode="overwrite")


class Replacing(Store):
    """Refuses the second writer and takes its content all the same."""

    def put_new(self, path: str, data: bytes) -> None:
        taken = self.exists(path)
        obstore.put(self.objects, path, data, mode="overwrite")
        if taken:
            raise ObjectTaken(path)


class RememberingContent(Store):
    """Reads through a cache that is never told of a write."""

    _cache: dict[str, bytes]

    def get(self, path: str) -> bytes:
        self._cache = getattr(self, "_cache", {})
        if path not in self._cache:
            self._cache[path] = super().get(path)
        return self._cache[path]


class RememberingAbsence(Store):
    """Once an object was asked for in vain, it stays absent."""

    _absent: set[str]

    def get(self, path: str) -> bytes:
        self._absent = getattr(self, "_absent", set())
        try:
            if path in self._absent:
                raise ObjectMissing(path)
            return super().get(path)
        except ObjectMissing:
            self._absent.add(path)
            raise


class ListingLate(Store):
    """Leaves the newest object out of a listing."""

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        listed = sorted(super().list(prefix, after=after), key=lambda info: info.modified_at)
        yield from listed[:-1]


class ListingAll(Store):
    """Ignores the offset of a listing."""

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        yield from super().list(prefix)


class Keeping(Store):
    """Says that it deleted, and didn't."""

    def delete(self, path: str) -> None:
        pass


FAULTS = [
    (Overwriting, "create-if-absent is ignored: two writers of one name both won, in 8 of 8 races", "If-None-Match"),
    (CheckingFirst, "create-if-absent is ignored: two writers of one name both won, in ", "If-None-Match"),
    (Replacing, "second writer: a second writer was refused, and the object holds b'second'", "If-None-Match"),
    (RememberingContent, "read after write: get shows b'first' after b'second, longer' was written", "consistent"),
    (RememberingAbsence, "read after write: get shows None after b'first' was written", "consistent"),
    (ListingLate, "listing: list lacks 1 of 40 objects just written", "consistent"),
    (ListingAll, "listing: list after an offset shows 40 objects where there are 19", "consistent"),
    (Keeping, "read after delete: get still shows an object that was just deleted", "consistent"),
]


@pytest.fixture(params=["folder", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3_environment"))
    (tmp_path / "store").mkdir()
    return str(tmp_path / "store")


def test_honest_store_is_sound_and_left_as_it_was(uri: str) -> None:
    store = Store(uri)
    store.put_new("probe/of another", b"x")
    probe = probe_store(store)
    assert probe.failed == []
    assert [f.check for f in probe.findings] == [
        "read after write",
        "read after delete",
        "second writer",
        "racing writers",
        "listing",
    ]
    assert set(probe.latencies_s) == {"put", "get", "exists", "list", "delete"}
    assert all(0 < latency_s < 5 for latency_s in probe.latencies_s.values())
    assert [info.path for info in store.list("probe")] == ["probe/of another"]
    require_sound(store)


def test_probe_of_a_folder_takes_no_time_and_leaves_no_folder(tmp_path: Path) -> None:
    start_s = time.perf_counter()
    require_sound(Store(str(tmp_path)))
    assert time.perf_counter() - start_s < 1
    assert list(tmp_path.iterdir()) == []


def test_probes_side_by_side_dont_disturb_each_other(tmp_path: Path) -> None:
    def probe(_: int) -> bool:
        return not probe_store(Store(str(tmp_path))).failed

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(probe, range(24)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("broken", "finding", "mend"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_broken_promise_is_found_and_the_folder_left_clean(
    broken: type[Store], finding: str, mend: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        require_sound(broken(str(tmp_path)))
    message = str(caught.value)
    assert f"store {tmp_path.as_uri()} can't be trusted: " in message
    assert finding in message
    assert mend in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", [Overwriting, CheckingFirst, ListingLate])
def test_broken_promise_is_found_over_s3(broken: type[Store], s3_environment: str) -> None:
    with pytest.raises(UserError, match="can't be trusted"):
        require_sound(broken(s3_environment))
    assert list(Store(s3_environment).list("probe")) == []


def test_what_stops_the_probe_is_told_and_the_folder_left_clean(tmp_path: Path) -> None:
    class Failing(Store):
        def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
            raise StoreUnreachable("the listing got lost")

    with pytest.raises(StoreUnreachable, match="the listing got lost"):
        probe_store(Failing(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_place_that_cant_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("a file where the probe's folder should be")
    with pytest.raises(UserError, match=f"{tmp_path} can't be written: Not a directory; name another folder"):
        probe_store(Store(str(tmp_path)))


def test_missing_folder_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="doesn't exist"):
        probe_store(Store(str(tmp_path / "nowhere")))
    assert not (tmp_path / "nowhere").exists()


def test_absent_server_is_unreachable(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("manifests.store._RETRY", {"max_retries": 1})
    with pytest.raises(StoreUnreachable):
        probe_store(Store(s3_environment))


def test_lost_replies_are_not_held_against_the_store(
    s3_environment: str, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that hears nothing sends its write again, and the store refuses it rightly: the name is taken, by itself."""

    def lose_some(number: int, moment: str, method: str, path: str) -> None:
        if moment == "after" and number % 5 == 1:
            raise Cut

    with S3Proxy(s3_server, lose_some) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        require_sound(Store(s3_environment))


def test_wrong_credentials_say_so(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UserError, match="credentials"):
        probe_store(Store(s3_environment))
