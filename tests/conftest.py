"""Fixtures that several test folders share: a store on a folder, and a real S3 server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manifests.store import Store
from manifests.tables import create_store

BUCKET = "atoll-test"
KEY, SECRET = "atolltestkey", "atolltestsecret"
_START_WAIT_S = 60.0

# Tests and the processes that they start share few cores, and torch's threads spin while they wait for one that has none: on two busy cores a step
# of a tiny model takes 0.44 s with two threads and 0.01 s with one. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A suite that runs in the background of a script inherits an ignored SIGINT, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A new store on a folder."""
    return create_store(str(tmp_path / "store"))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a SeaweedFS server that holds an empty bucket; it rejects wrong keys and honours create-if-absent."""
    weed = Path(sys.executable).parent / "weed"
    folder = tmp_path_factory.mktemp("seaweedfs")
    names = ("master", "volume", "filer", "s3", "admin")
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    environment = os.environ | {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            str(weed), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}",
            "-master.telemetry=false", "-webdav=false", *(f"-{name}.port={port}" for name, port in ports.items()),
        ],
        env=environment, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    try:
        _wait_until_ready(process, ports["s3"], folder / "log")
        yield f"http://127.0.0.1:{ports['s3']}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def s3_environment(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Credentials and endpoint in the environment, a cache of the test's own; returns a URI that no other test uses."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    return f"s3://{BUCKET}/{tmp_path.name}"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    # SeaweedFS takes each port plus 10,000 for gRPC.
    ports = [s.getsockname()[1] % 20_000 + 20_000 for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    from obstore.store import S3Store

    probe = S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    deadline = time.monotonic() + _START_WAIT_S
    while True:
        try:
            # Writing works last: the volumes must have joined.
            probe.put("ready", b"1")
            return
        except Exception as e:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS didn't start: {log.read_text()[-2000:]}") from e
            time.sleep(0.5)
