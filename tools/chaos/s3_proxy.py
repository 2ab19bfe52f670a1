"""A proxy in front of an S3 endpoint that counts write requests and calls back at each: to kill the writer there, to lose a reply, to refuse or spoil one.

Bytes pass unchanged, the Host header too, so that the client's signature stays good. A request and its reply are read whole before they are
passed on: what the callback sees as `before` has not reached the store, what it sees as `after` took effect and its writer doesn't know yet.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from types import TracebackType
from typing import Literal
from urllib.parse import urlparse

_WRITING = ("PUT", "POST", "DELETE")
_TIMEOUT_S = 60.0

OnWrite = Callable[[int, Literal["before", "after"], str, str], None]
"""Called with the number of the write request, from 1, its moment, method and path."""


OnRead = Callable[[str], Literal["pass", "unavailable", "broken", "corrupt"]]
"""Called with the path of every GET request: whether its reply passes, is a 503, ends half-way, or has a bit flipped."""


Refuses = Callable[[], bool]
"""Called with every request: whether it is answered with a 503, and never reaches the store."""


class Cut(Exception):
    """Raised by a callback: the connection ends here, neither request nor reply is passed on."""


class S3Proxy:
    """A running proxy, as a context; `endpoint` is what its client takes for the S3 server."""

    def __init__(
        self,
        upstream: str,
        on_write: OnWrite | None = None,
        on_read: OnRead | None = None,
        refuses: Refuses | None = None,
    ) -> None:
        """Prepares a proxy for the server at `upstream`, an http:// address."""
        parsed = urlparse(upstream)
        assert parsed.scheme == "http"
        self.upstream = (parsed.hostname or "", parsed.port or 80)
        self.writes: list[tuple[str, str]] = []
        """Method and path of every write request so far."""
        self._on_write = on_write
        self._on_read = on_read
        self._refuses = refuses
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Connection)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """The proxy's own host and port."""
        return "127.0.0.1", int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        """The proxy's own address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> S3Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def pass_on(self, request: _Message) -> _Message:
        """Takes a request to the server and brings the reply, with the callbacks around it."""
        method, path, *_ = request.first_line.split(" ")
        if self._refuses is not None and self._refuses():
            return _UNAVAILABLE
        if method == "GET" and self._on_read is not None:
            return _spoilt(self._ask(request, method), self._on_read(path))
        if method not in _WRITING:
            return self._ask(request, method)
        with self._lock:
            self.writes.append((method, path))
            number = len(self.writes)
        self._call(number, "before", method, path)
        reply = self._ask(request, method)
        self._call(number, "after", method, path)
        return reply

    def _call(self, number: int, moment: Literal["before", "after"], method: str, path: str) -> None:
        if self._on_write is not None:
            self._on_write(number, moment, method, path)

    def _ask(self, request: _Message, method: str) -> _Message:
        # A connection for each request: none can be stale.
        with socket.create_connection(self.upstream, timeout=_TIMEOUT_S) as connection:
            connection.sendall(request.head + request.body)
            with connection.makefile("rb") as stream:
                while True:
                    head = _read_head(stream)
                    status = int(head.first_line.split(" ")[1])
                    if status >= 200:  # the rest is `100 Continue`, which the client was told by us
                        break
                if method == "HEAD" or status in (204, 304):
                    return head
                return _with_body(head, stream, until_end=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """A request or a reply, as bytes."""

    head: bytes
    """With the empty line that ends it."""
    body: bytes
    """As it was sent: chunked, where the head says so."""
    is_broken: bool = False
    """Whether the connection ends after it."""

    @property
    def first_line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode("latin-1")

    def header(self, name: str) -> str:
        """A header's value in lower case; empty where there is none."""
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip().lower()
        return ""


_UNAVAILABLE = _Message(head=b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n", body=b"")


def _spoilt(reply: _Message, how: Literal["pass", "unavailable", "broken", "corrupt"]) -> _Message:
    if how == "unavailable":
        return _UNAVAILABLE
    middle = len(reply.body) // 2
    if how == "broken":
        return _Message(head=reply.head, body=reply.body[:middle], is_broken=True)
    if how == "corrupt" and reply.body:
        flipped = bytes([reply.body[middle] ^ 1])
        return _Message(head=reply.head, body=reply.body[:middle] + flipped + reply.body[middle + 1 :])
    return reply


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False  # a client may keep its connection open for longer than the proxy
    request_queue_size = 64
    proxy: S3Proxy


class _Connection(socketserver.StreamRequestHandler):
    """One connection of a client: request after request, until it ends."""

    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        try:
            while True:
                request = _read_head(self.rfile)
                if request.header("expect") == "100-continue":
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                reply = self.server.proxy.pass_on(_with_body(request, self.rfile))
                self.wfile.write(reply.head + reply.body)
                if reply.is_broken:
                    return
                if "close" in (request.header("connection"), reply.header("connection")):
                    return
        except (Cut, EOFError, ConnectionError):
            return  # cut by the callback, or the client has gone, maybe killed


def _read_head(stream: BufferedIOBase) -> _Message:
    lines: list[bytes] = []
    while not lines or lines[-1] != b"\r\n":
        lines.append(_read_line(stream))
    return _Message(head=b"".join(lines), body=b"")


def _with_body(head: _Message, stream: BufferedIOBase, *, until_end: bool = False) -> _Message:
    """The message whole; `until_end`: a body of unknown length lasts until the connection ends, as only a reply's may."""
    if "chunked" in head.header("transfer-encoding"):
        body = _read_chunks(stream)
    elif head.header("content-length"):
        body = _read_exactly(stream, int(head.header("content-length")))
    else:
        body = stream.read() if until_end else b""
    return _Message(head=head.head, body=body)


def _read_chunks(stream: BufferedIOBase) -> bytes:
    parts = []
    while True:
        size_line = _read_line(stream)
        size_bytes = int(size_line.split(b";")[0], 16)
        parts.append(size_line)
        if size_bytes == 0:
            break
        parts.append(_read_exactly(stream, size_bytes + len(b"\r\n")))
    while parts[-1] != b"\r\n":  # trailers, and the empty line
        parts.append(_read_line(stream))
    return b"".join(parts)


def _read_line(stream: BufferedIOBase) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def _read_exactly(stream: BufferedIOBase, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data
