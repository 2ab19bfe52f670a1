"""How each kind of fault is done to the processes of a crew, and undone. When and to whom is the schedule's."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

from manifests.errors import AtollError
from tools.bench.diloco_processes import call
from tools.bench.link import S3Server, ThrottledLink
from tools.chaos.crew import Crew
from tools.chaos.s3_proxy import S3Proxy
from tools.chaos.schedule import EVERYONE, Fault

_HASHED = ("/pool/", "/runs/")
"""Folders of a store whose objects carry a hash or a checksum of ours; tables have none of ours."""


class Network:
    """A link for each role to the one S3 server, as a context. A fault of replies sends a link through a proxy for as long as it lasts."""

    def __init__(self, server: S3Server, roles: list[int]) -> None:
        self._server = server
        self._stack = ExitStack()
        self.links = {role: ThrottledLink(server.address, latency_s=0.0, bandwidth_bps=None) for role in roles}
        host, port = server.address
        self._upstream = f"http://{host}:{port}"
        self._proxies: dict[int, ExitStack] = {}

    def __enter__(self) -> Network:
        for link in self.links.values():
            self._stack.enter_context(link)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for role in list(self._proxies):
            self.send_straight(role)
        self._stack.close()

    @property
    def environments(self) -> dict[int, dict[str, str]]:
        """What each role needs to reach the store by its own link."""
        return {
            role: {**self._server.environment, "AWS_ENDPOINT_URL": link.endpoint} for role, link in self.links.items()
        }

    def send_through(self, role: int, proxy: S3Proxy) -> None:
        """Sends a role's requests through a proxy from now on."""
        stack = self._proxies[role] = ExitStack()
        stack.enter_context(proxy)
        self._turn(role, proxy.address)

    def send_straight(self, role: int) -> None:
        """Ends that."""
        if role in self._proxies:
            self._turn(role, self._server.address)
            self._proxies.pop(role).close()

    def _turn(self, role: int, target: tuple[str, int]) -> None:
        link = self.links[role]
        link.target = target
        link.cut()  # connections that are open go the old way
        link.mend()

    def proxy(self, **what: Any) -> S3Proxy:
        """A proxy before the server."""
        return S3Proxy(self._upstream, **what)


class Faults:
    """Does faults and undoes them."""

    def __init__(
        self, crew: Crew, network: Network, *, store_uri: str, run: str, environment: Mapping[str, str], seed: int
    ) -> None:
        """
        Args:
            crew: whom they strike.
            network: their ways to the store.
            store_uri: the store.
            run: the run.
            environment: to reach the store past all links.
            seed: of what is drawn while a fault lasts.
        """
        self._crew, self._network = crew, network
        self._store_uri, self._run, self._environment = store_uri, run, environment
        self._chance = random.Random(seed)
        self._errands: list[threading.Thread] = []
        self.planted: list[str] = []
        """Damaged objects that were put in the store."""

    def begin(self, fault: Fault) -> int | None:
        """Does a fault; returns whom it struck, or None where there was nobody left to strike."""
        target = fault.target
        if fault.kind == "syncer" and self._crew.leader is not None:
            target = self._crew.leader
        if target == EVERYONE:
            for role in self._crew.roles.values():
                if not role.finished:
                    self._crew.kill(role.island, away_s=fault.seconds)
            return EVERYONE
        struck = self._crew.roles.get(target)
        if struck is None or struck.finished or not struck.runs:
            return None
        self._DOINGS[fault.kind](self, target, fault)
        return target

    def end(self, fault: Fault, target: int) -> None:
        """Undoes it."""
        undo = self._UNDOINGS.get(fault.kind)
        if undo is not None:
            undo(self, target)

    def settle(self) -> None:
        """Waits for what is still being put in the store."""
        for errand in self._errands:
            errand.join()

    def _kill(self, target: int, fault: Fault) -> None:
        self._crew.kill(target, away_s=fault.seconds)

    def _stop(self, target: int, fault: Fault) -> None:
        self._crew.signal(target, signal.SIGSTOP)

    def _go_on(self, target: int) -> None:
        self._crew.signal(target, signal.SIGCONT)

    def _slow(self, target: int, fault: Fault) -> None:
        self._crew.nudge(target, slowness=fault.strength)

    def _refuse(self, target: int, fault: Fault) -> None:
        self._network.send_through(target, self._network.proxy(refuses=lambda: self._chance.random() < fault.strength))

    def _spoil(self, target: int, fault: Fault) -> None:
        def on_read(path: str) -> Literal["pass", "corrupt"]:
            is_hashed = any(folder in path for folder in _HASHED) and "/tables/" not in path and "list-type" not in path
            return "corrupt" if is_hashed and self._chance.random() < fault.strength else "pass"

        self._network.send_through(target, self._network.proxy(on_read=on_read))

    def _straight(self, target: int) -> None:
        self._network.send_straight(target)

    def _delay(self, target: int, fault: Fault) -> None:
        self._network.links[target].latency_s = fault.strength

    def _no_delay(self, target: int) -> None:
        self._network.links[target].latency_s = 0.0

    def _cut(self, target: int, fault: Fault) -> None:
        self._network.links[target].cut()

    def _mend(self, target: int) -> None:
        self._network.links[target].mend()

    def _fill_disk(self, target: int, fault: Fault) -> None:
        self._crew.nudge(target, disk_full=True)

    def _shift(self, target: int, fault: Fault) -> None:
        self._crew.nudge(target, clock_s=fault.strength)

    def _poison(self, target: int, fault: Fault) -> None:
        self._crew.nudge(target, poisoned=True)

    def _plant(self, target: int, fault: Fault) -> None:
        def put() -> None:
            try:
                path = call(
                    plant_object, self._store_uri, self._run, target, fault.strength, environment=self._environment
                )
            except AtollError:
                return  # it was too late for this one: the island's own object lies there
            if path is not None:
                self.planted.append(path)

        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        self._errands.append(thread)

    def _as_usual(self, target: int) -> None:
        self._crew.nudge(target, slowness=1.0, clock_s=0.0, poisoned=False, disk_full=False)

    _DOINGS: Mapping[str, Callable[[Faults, int, Fault], None]] = {
        "kill": _kill,
        "syncer": _kill,
        "stop": _stop,
        "slow": _slow,
        "errors": _refuse,
        "latency": _delay,
        "partition": _cut,
        "replies": _spoil,
        "object": _plant,
        "disk": _fill_disk,
        "clock": _shift,
        "poison": _poison,
    }
    _UNDOINGS: Mapping[str, Callable[[Faults, int], None]] = {
        "stop": _go_on,
        "slow": _as_usual,
        "errors": _straight,
        "latency": _no_delay,
        "partition": _mend,
        "replies": _straight,
        "disk": _as_usual,
        "clock": _as_usual,
        "poison": _as_usual,
    }


def plant_object(store_uri: str, run: str, island: int, which: float) -> str | None:
    """Puts a damaged outer gradient under the name that an island's next one would have; returns its path, or None where the island was faster.

    Below a half of `which` it's the island's last one with a bit flipped, above the last one of another island. For `diloco_processes.call`.
    """
    from manifests.errors import ObjectTaken
    from manifests.tables import open_store
    from trainer.run import load_run

    its_run = load_run(open_store(store_uri), run)
    store = its_run.store

    def last_of(number: int) -> str | None:
        return max((info.path for info in store.list(its_run.outer_folder(number))), default=None)

    own = last_of(island)
    if own is None:
        return None
    round_ = int(own.rsplit("/", 1)[1].split("-")[0]) + 1
    others = [last_of(number) for number in range(its_run.config.num_islands) if number != island]
    foreign = next((path for path in others if path is not None), None)
    data = bytearray(store.get(own))
    if which >= 0.5 and foreign is not None:
        data = bytearray(store.get(foreign))
    else:
        data[int(which * 2 * len(data)) % len(data)] ^= 1
    path = its_run.outer_path(island, round_, (round_ - 1) % its_run.config.num_fragments)
    try:
        store.put_new(path, bytes(data))
    except ObjectTaken:
        return None
    return path
