"""The faults themselves, each where it strikes: a clock, a disk, a step, a reply of the store."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from tools.chaos.inside import Nudges, paced
from tools.chaos.s3_proxy import S3Proxy

BODY = bytes(range(100))


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_clock_is_shifted_for_our_code_and_can_be_put_right() -> None:
    out = _python(
        "import time, manifests.tables as t; from datetime import UTC; from tools.chaos.inside import Nudges, shift_clock\n"
        "n = Nudges(); real = time.time(); shift_clock(lambda: n.clock_s); n.clock_s = -3600.0\n"
        "print(round((time.time() - real) / 3600), round((t.datetime.now(UTC).timestamp() - real) / 3600), type(t.datetime.now(UTC)).__name__)\n"
        "n.clock_s = 0.0\n"
        "print(round((time.time() - real) / 3600), round((t.datetime.now(UTC).timestamp() - real) / 3600))"
    )
    assert out.splitlines() == ["-1 -1 datetime", "0 0"]


def test_full_disk_fails_every_write_until_there_is_room(tmp_path: Path) -> None:
    out = _python(
        "import pathlib; from tools.chaos.inside import Nudges\n"
        f"n, p = Nudges(), pathlib.Path({str(tmp_path / 'file')!r})\n"
        "n.take({'disk_full': True})\n"
        "try: p.write_bytes(b'x'); print('written')\n"
        "except OSError as e: print(e.strerror)\n"
        "n.take({'disk_full': False}); p.write_bytes(b'x'); print('written')"
    )
    assert out.splitlines() == ["File too large", "written"]


def test_slow_island_takes_its_time_and_a_poisoned_one_the_same_tokens_in_another_order() -> None:
    seen: list[torch.Tensor] = []
    nudges = Nudges()
    step = paced(lambda tokens_BL, **more: seen.append(tokens_BL), nudges, step_s=0.05)
    tokens_BL = torch.arange(64).reshape(4, 16)
    step(tokens_BL)
    began = time.monotonic()
    step(tokens_BL)
    usual_s = time.monotonic() - began
    nudges.take({"slowness": 4.0, "poisoned": True})
    began = time.monotonic()
    step(tokens_BL)
    assert time.monotonic() - began > 0.19 > usual_s
    assert torch.equal(seen[0], tokens_BL)
    assert not torch.equal(seen[2], tokens_BL)
    assert torch.equal(seen[2].flatten().sort().values, tokens_BL.flatten())


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_proxy_refuses_with_a_503_and_flips_one_bit(upstream: str) -> None:
    with S3Proxy(upstream, refuses=lambda: True) as proxy, pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{proxy.endpoint}/x")
    assert refused.value.code == 503
    with S3Proxy(upstream, on_read=lambda path: "corrupt" if path == "/bad" else "pass") as proxy:
        assert urllib.request.urlopen(f"{proxy.endpoint}/good").read() == BODY
        flipped = urllib.request.urlopen(f"{proxy.endpoint}/bad").read()
    assert sum((a ^ b).bit_count() for a, b in zip(flipped, BODY, strict=True)) == 1
