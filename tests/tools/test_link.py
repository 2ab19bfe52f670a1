"""The throttled link: latency, shared bandwidth, pipelining, backpressure, a partition, and an S3 store behind it. Times are by this machine's clock."""

from __future__ import annotations

import hashlib
import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from manifests.errors import ObjectTaken
from manifests.store import Store
from tools.bench.link import ThrottledLink, serve_s3

_BODY = random.Random(0).randbytes(16 << 20)
_TIMEOUT_S = 10.0


class _Handler(BaseHTTPRequestHandler):
    """GET /N: N bytes. PUT: the body's SHA-256 and the Host header."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._reply(_BODY[: int(self.path[1:])])

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._reply(f"{hashlib.sha256(body).hexdigest()} {self.headers['Host']}".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        pass  # its clients are cut off on purpose


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[str, int]]:
    """The address of an HTTP server."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.block_on_close = False  # a client may keep its connection open for longer than the test
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield "127.0.0.1", server.server_port
        server.shutdown()
        thread.join()


def _connect(link: ThrottledLink) -> closing[http.client.HTTPConnection]:
    return closing(http.client.HTTPConnection(link.endpoint.removeprefix("http://"), timeout=_TIMEOUT_S))


def _get(connection: http.client.HTTPConnection, num_bytes: int) -> float:
    """Seconds that a GET takes; its body has been checked."""
    began = time.monotonic()
    connection.request("GET", f"/{num_bytes}")
    body = connection.getresponse().read()
    seconds = time.monotonic() - began
    assert body == _BODY[:num_bytes]
    return seconds


def _put(connection: http.client.HTTPConnection, num_bytes: int) -> float:
    """Seconds that a PUT takes; the server has seen the bytes and the client's Host header."""
    began = time.monotonic()
    connection.request("PUT", "/", body=_BODY[:num_bytes])
    reply = connection.getresponse().read().decode()
    seconds = time.monotonic() - began
    assert reply == f"{hashlib.sha256(_BODY[:num_bytes]).hexdigest()} {connection.host}:{connection.port}"
    return seconds


def _get_anew(link: ThrottledLink, num_bytes: int) -> float:
    """Seconds of a GET over a connection of its own."""
    with _connect(link) as connection:
        return _get(connection, num_bytes)


def _put_anew(link: ThrottledLink, num_bytes: int) -> float:
    """Seconds of a PUT over a connection of its own."""
    with _connect(link) as connection:
        return _put(connection, num_bytes)


def test_request_takes_one_round_trip_and_a_new_connection_another(target: tuple[str, int]) -> None:
    latency_s = 0.2
    with ThrottledLink(target, latency_s=latency_s, bandwidth_bps=None) as link, _connect(link) as connection:
        assert 2 * latency_s <= _get(connection, 10) <= 2 * latency_s * 1.5 + 0.1
        seconds = [_get(connection, 10) for _ in range(2)]
        assert min(seconds) >= latency_s
        assert min(seconds) <= latency_s * 1.5 + 0.1  # the better one: this process may have to wait for a core
        link.latency_s = 0.02
        # The reply's head and body are two small pieces: the second doesn't wait for a delayed acknowledgement, which takes 0.04 s.
        assert 0.02 <= min(_get(connection, 10) for _ in range(8)) <= 0.05


def test_bandwidth_is_shared_by_connections_and_is_each_directions_own(target: tuple[str, int]) -> None:
    with ThrottledLink(target, latency_s=0.0, bandwidth_bps=8e6) as link, ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        halves = [pool.submit(_get_anew, link, 500_000) for _ in range(2)]
        upload = pool.submit(_put_anew, link, 1_000_000)
        seconds = [half.result() for half in halves]
        assert 0.9 <= time.monotonic() - began <= 1.6
        upload.result()
        assert 0.9 <= time.monotonic() - began <= 1.6
        assert min(seconds) >= 0.7  # in turn, not one after the other
        link.bandwidth_bps = None
        assert _get_anew(link, 1_000_000) <= 0.3


@pytest.mark.parametrize(("bandwidth_bps", "least_s"), [(None, 0.0), (200e6, 0.4)])
def test_latency_does_not_limit_throughput(
    target: tuple[str, int], bandwidth_bps: float | None, least_s: float
) -> None:
    latency_s = 0.2
    with (
        ThrottledLink(target, latency_s=latency_s, bandwidth_bps=bandwidth_bps) as link,
        _connect(link) as connection,
    ):
        _get(connection, 1)
        for transfer in (_get, _put):
            # far more than is ever on its way at 200 Mbit/s: half of the latency's 5 MB, and a queue of 1 MiB
            assert latency_s + least_s * 0.9 <= transfer(connection, 10_000_000) <= latency_s + least_s + 0.8


def test_slow_reader_is_waited_for_and_holds_up_nobody_else(target: tuple[str, int]) -> None:
    # 64 requests of 8 MiB each; the sockets' own buffers take a few MB.
    asked_bytes = 64 * (8 << 20)
    with ThrottledLink(target, latency_s=0.01, bandwidth_bps=2e9) as link, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.connect(("127.0.0.1", int(link.endpoint.rpartition(":")[2])))
        slow.sendall(b"GET /%d HTTP/1.1\r\n\r\n" % (8 << 20) * 64)
        before, delivered = -1, 0
        while delivered != before:
            time.sleep(0.2)
            before, delivered = delivered, link.bytes_down
        assert 0 < delivered < asked_bytes / 16
        assert _get_anew(link, 1_000_000) <= 0.5


def test_counters_are_of_bytes_delivered(target: tuple[str, int]) -> None:
    with ThrottledLink(target, latency_s=0.0, bandwidth_bps=None) as link:
        assert (link.bytes_up, link.bytes_down) == (0, 0)
        _put_anew(link, 100_000)
        assert 100_000 < link.bytes_up < 101_000
        up = link.bytes_up
        _get_anew(link, 200_000)
        assert 200_000 < link.bytes_down < 201_000
        assert 0 < link.bytes_up - up < 1000


def test_cut_drops_connections_and_refuses_new_ones_until_mended(target: tuple[str, int]) -> None:
    with ThrottledLink(target, latency_s=0.01, bandwidth_bps=8e6) as link, _connect(link) as idle:
        endpoint = link.endpoint
        _get(idle, 10)
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(_get_anew, link, 10_000_000)
            time.sleep(0.2)
            link.cut()
            delivered = link.bytes_down
            with pytest.raises((ConnectionError, http.client.IncompleteRead)):
                under_way.result()
        with pytest.raises(ConnectionError):
            _get(idle, 10)
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                _get_anew(link, 10)
            link.cut()  # once more changes nothing
        assert link.bytes_down == delivered
        for _ in range(2):
            link.mend()
            assert link.endpoint == endpoint
            assert _get_anew(link, 10) <= 0.2


def test_connection_ends_where_no_server_is() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        link = ThrottledLink(nobody.getsockname(), latency_s=0.0, bandwidth_bps=None)
        with link, pytest.raises(ConnectionError):
            _get_anew(link, 10)


def test_store_and_tables_work_over_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serve_s3(tmp_path) as server,
        ThrottledLink(server.address, latency_s=0.01, bandwidth_bps=1e9) as link,
    ):
        for name, value in (dict(server.environment) | {"AWS_ENDPOINT_URL": link.endpoint}).items():
            monkeypatch.setenv(name, value)
        assert list(Store(f"s3://{server.bucket}").list("")) == []
        store = Store(f"s3://{server.bucket}/x")
        began = time.monotonic()
        store.put_new("object", b"one")
        assert 0.01 <= time.monotonic() - began <= 0.5
        with pytest.raises(ObjectTaken):
            store.put_new("object", b"another")
        assert store.get("object") == b"one"
        rows = pa.table({"row": [1, 2, 3]})
        write_deltalake(store.table_uri("table"), rows, storage_options=store.table_options)
        read = DeltaTable(store.table_uri("table"), storage_options=store.table_options)
        assert pa.table(read.to_pyarrow_table()).equals(rows)
        assert min(link.bytes_up, link.bytes_down) > 1000
