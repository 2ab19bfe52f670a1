"""The doctor: what this machine brings, which versions work here, and whether a store keeps its promises. It makes nothing; it only probes."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path
from urllib.parse import urlparse

import pyarrow as pa

from manifests.catalog import cache_root
from manifests.errors import AtollError, Failure
from manifests.jobs import code_version
from manifests.probe import probe_store
from manifests.store import MARKER, Store
from manifests.tables import open_store, read_marker

_SCHEMA = pa.schema([("what", pa.string()), ("value", pa.string()), ("ok", pa.bool_()), ("detail", pa.string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One thing that the doctor looked at."""

    what: str
    value: str
    ok: bool | None = None
    """None where there is nothing to judge."""
    detail: str | None = None


def examine(uri: str) -> list[Line]:
    """Looks at the installation, the machine and the store at `uri`; a store that doesn't exist is not made."""
    lines = [*_installation(), *_machine()]
    try:
        store = Store(uri)
        for line in chain(_place(store), _store(store)):
            lines.append(line)  # one by one: those before an error are kept
    except AtollError as e:
        lines.append(Line(what="store", value=uri, ok=False, detail=str(e)))
    return lines


def as_table(lines: list[Line]) -> pa.Table:
    """The lines as rows: what, value, ok, detail."""
    return pa.Table.from_pylist([asdict(line) for line in lines], schema=_SCHEMA)


def require_health(lines: list[Line]) -> None:
    """Raises what the command fails with where a line isn't as it should be.

    Raises:
        Failure: names those lines.
    """
    troubles = [line.what for line in lines if line.ok is False]
    if troubles:
        raise Failure(
            f"the doctor found trouble with: {', '.join(troubles)}; the detail of each line says what and why"
        )


def _installation() -> Iterator[Line]:
    yield Line(what="atoll", value=code_version())
    yield Line(what="python", value=platform.python_version(), detail=platform.python_implementation())
    try:
        required = requires("atoll") or []
    except PackageNotFoundError:
        yield Line(what="dependencies", value="unknown", ok=False, detail="atoll is not installed; `pip install -e .`")
        return
    for requirement in required:
        name = re.match(r"[\w.-]+", requirement)
        if name is None or "extra ==" in requirement:
            continue
        try:
            yield Line(what=name[0], value=version(name[0]), detail=f"asked for: {requirement}")
        except PackageNotFoundError:
            yield Line(what=name[0], value="missing", ok=False, detail=f"`pip install '{requirement}'`")


def _machine() -> Iterator[Line]:
    yield Line(what="platform", value=platform.platform())
    yield Line(what="cpus", value=str(_usable_cpus()), detail=f"{os.cpu_count()} in the machine")
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    yield Line(what="memory", value=_size(page_bytes * os.sysconf("SC_PHYS_PAGES")))
    yield _cuda()
    yield _free_disk("cache disk", cache_root())


def _cuda() -> Line:
    try:
        import torch
    except (ImportError, OSError) as e:  # OSError: a shared library of CUDA's is missing
        return Line(what="cuda", value="unknown", ok=False, detail=f"torch can't be imported: {e}")
    if not torch.cuda.is_available():
        return Line(what="cuda", value="not available", detail=f"torch is built for CUDA {torch.version.cuda}")
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return Line(what="cuda", value=", ".join(devices), ok=True, detail=f"torch is built for CUDA {torch.version.cuda}")


def _place(store: Store) -> Iterator[Line]:
    if store.is_local:
        yield _free_disk("store disk", store.root)
    options = store.table_options
    if options is not None:
        endpoint = urlparse(options.get("AWS_ENDPOINT_URL", ""))
        shown = endpoint._replace(netloc=endpoint.netloc.rpartition("@")[2]).geturl()
        yield Line(what="AWS endpoint", value=shown or "AWS itself", detail="AWS_ENDPOINT_URL")
        yield Line(what="AWS region", value=options["AWS_REGION"], detail="AWS_REGION")
        from_environment = "AWS_ACCESS_KEY_ID" in options
        yield Line(
            what="AWS credentials",
            value="from the environment" if from_environment else "from the machine's role",
            detail="AWS_ACCESS_KEY_ID is set" if from_environment else "AWS_ACCESS_KEY_ID is not set",
        )


def _store(store: Store) -> Iterator[Line]:
    if (store.is_local and not store.root.is_dir()) or not store.exists(MARKER):
        absent = "doesn't exist yet, so it was not probed; `atoll ingest` makes it"
        yield Line(what="store", value=store.uri, detail=absent)
        return
    yield Line(what="schema", value=str(read_marker(store).get("schema_version")), detail=f"of {store.uri}")
    open_store(store.uri)
    probe = probe_store(store)
    for finding in probe.findings:
        detail = finding.detail if finding.ok else f"{finding.detail}; {finding.mend}"
        yield Line(what=finding.check, value="kept" if finding.ok else "broken", ok=finding.ok, detail=detail)
    for operation, latency_s in probe.latencies_s.items():
        yield Line(what=f"{operation} latency", value=f"{latency_s * 1000:.2f} ms", detail="median of a request")
    yield Line(
        what="store",
        value=store.uri,
        ok=not probe.failed,
        detail="keeps its promises" if not probe.failed else "can't be trusted",
    )


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_disk(what: str, folder: Path) -> Line:
    """Free space where the folder is, or would be made."""
    try:
        standing = next(path for path in (folder, *folder.parents) if path.exists())
        usage = shutil.disk_usage(standing)
    except OSError as e:
        return Line(what=what, value="unknown", ok=False, detail=f"{folder}: {e.strerror}")
    return Line(what=what, value=f"{_size(usage.free)} free", detail=f"{folder}, of {_size(usage.total)}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
