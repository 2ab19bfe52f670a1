"""What must hold in a store after a run, whatever happened to its processes, and what the store says of the run. Everything is read; nothing is mended.

The ledger's questions stand in ledger.py. Functions with an address of a store are for `diloco_processes.call`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from manifests.catalog import Catalog
from manifests.check import check as check_tables
from manifests.errors import AtollError, ObjectMissing
from manifests.tables import open_store
from tools.chaos.facts import Contribution, Facts, Finding
from tools.chaos.ledger import compare_streams, ledger_findings, stream_of
from trainer.model import build_model
from trainer.quantise import Tensors
from trainer.run import Run, load_run
from trainer.syncer import finished_loss
from trainer.tape import Anatomy, Followed, anatomy_of, follow_merge, read_global, read_merge, replay, snapshots
from trainer.wire import object_hash, pack, unpack

_OUTER = re.compile(r"outer/(\d{4})/(\d{8})-(\d{4})\.safetensors")
_MERGE = re.compile(r"merges/(\d{8})\.safetensors")
_CHECKPOINT = re.compile(r"islands/(\d{4})/checkpoint-\d+-(\d+)\.safetensors")
_LEASE = re.compile(r"lease/(\d+)-.+")
_MEMBER = re.compile(r"members/(\d{4})-(?:\d{3}(?:-left)?|finished)\.json")
_METRICS = re.compile(r"metrics/[^/]+/\d+-\d+(-\d+)?\.jsonl")


def look(
    store_uri: str, run: str, alike: Mapping[tuple[int, int], str] | None
) -> tuple[Facts, list[Finding], dict[tuple[int, int], str]]:
    """Looks at a run that is over; `alike` is the stream of one of the same data that nothing happened to. Also returns the run's own stream (ledger.py)."""
    store = open_store(store_uri)
    catalog = Catalog(store)
    its_run = load_run(store, run, catalog=catalog)
    findings = ledger_findings(catalog, its_run)
    stream = stream_of(catalog, run)
    if alike is not None:
        findings += compare_streams(stream, alike)
    found, followed = global_findings(its_run, catalog)
    findings += found
    if followed is not None:
        findings += tape_findings(its_run, catalog, followed)
    orphans, leftovers = orphan_findings(its_run, catalog, followed)
    findings += orphans
    findings += [
        Finding(invariant="tables", what=f"{damage.table}: {damage.finding}") for damage in check_tables(store).damages
    ]
    return _facts(its_run, catalog, leftovers), findings, stream


def _facts(run: Run, catalog: Catalog, leftovers: int) -> Facts:
    details = [
        json.loads(row["detail"])
        for row in catalog.rows("SELECT detail FROM events WHERE run = ? AND kind = 'merge'", [run.name])
    ]
    counted = catalog.rows(
        "SELECT (SELECT count(*) FROM events WHERE run = $run AND kind = 'refused') AS refused,"
        " (SELECT coalesce(sum(tokens), 0)::BIGINT FROM consumption WHERE run = $run) AS tokens",
        {"run": run.name},
    )[0]
    loss = finished_loss(run)
    return Facts(
        holdout_loss=float("nan") if loss is None else loss,
        merges=max((detail["merge"] for detail in details), default=0),
        fragments=len(anatomy_of(run, build_model(run.config)).fragments),
        contributions=[
            Contribution(merge=detail["merge"], island=said["island"], steps=said["steps"], tokens=said["tokens"])
            for detail in details
            for said in detail["contributions"]
        ],
        dropped=[said["why"] for detail in details for said in detail["dropped"]],
        refused=counted["refused"],
        tokens=counted["tokens"],
        leftovers=leftovers,
    )


# The global state: the tape, the snapshots, and every island's view of it.


def global_findings(run: Run, catalog: Catalog) -> tuple[list[Finding], Followed | None]:
    """Whether all views of the global state are the same to the bit: the tape as islands follow it, made again from the outer gradients as a syncer does, the
    snapshots, and what every checkpoint of an island says that it has received. Also the state as it's followed to the end; None: the tape can't be read."""

    def finding(what: str) -> Finding:
        return Finding(invariant="global state", what=what)

    anatomy = anatomy_of(run, build_model(run.config))
    findings: list[Finding] = []
    try:
        hashes, followed = _follow_all(run, anatomy)
        remade = replay(run, anatomy, start=min(snapshots(run)))
    except AtollError as e:
        return [finding(f"the tape can't be made again: {e}")], None
    if remade.merge != followed.merge or remade.clock != followed.versions:
        findings.append(finding(f"replay ends at merge {remade.merge}, the tape at {followed.merge}"))
    for number, fragment in enumerate(remade.fragments):
        if _hash(fragment.outer.parameters) != _hash(followed.parameters[number]):
            findings.append(finding(f"fragment {number} made again differs from the tape's"))
    try:
        views = [*_snapshot_views(run, anatomy), *_island_views(run, catalog, anatomy)]
    except AtollError as e:
        return [*findings, finding(str(e))], followed
    for name, number, version, own in views:
        if hashes.get((number, version)) != own:
            findings.append(finding(f"{name}: fragment {number} of version {version} differs from the tape's"))
    return findings, followed


def _follow_all(run: Run, anatomy: Anatomy) -> tuple[dict[tuple[int, int], str], Followed]:
    followed = read_global(run, anatomy, merge=min(snapshots(run)))
    hashes = {(n, followed.versions[n]): _hash(value) for n, value in enumerate(followed.parameters)}
    while True:
        try:
            parts, description = read_merge(run, anatomy, followed.merge + 1)
        except ObjectMissing:
            return hashes, followed
        number = follow_merge(followed, parts, description)
        hashes[number, followed.versions[number]] = _hash(followed.parameters[number])


def _snapshot_views(run: Run, anatomy: Anatomy) -> Iterator[tuple[str, int, int, str]]:
    for merge in snapshots(run):
        entries = json.loads(run.store.get(run.snapshot_path(merge)))["fragments"]
        for number, entry in enumerate(entries):
            tensors, _ = unpack(run.store.get(entry["parameters"]["path"]), name=f"snapshot {merge}")
            yield f"snapshot {merge}", number, entry["version"], _hash(tensors)


def _island_views(run: Run, catalog: Catalog, anatomy: Anatomy) -> Iterator[tuple[str, int, int, str]]:
    rows = catalog.rows(
        "SELECT island, round, object, hash FROM checkpoints WHERE run = ? AND island >= 0 AND object <> '' ORDER BY island, round",
        [run.name],
    )
    for row in rows:
        name = f"island {row['island']} after round {row['round']}"
        try:
            data = run.store.get(row["object"])
        except ObjectMissing:
            continue  # its process died before it put it there; the one before counts (checkpoints.py)
        if object_hash(data) != row["hash"]:
            yield name, -1, -1, "damaged"
            continue
        tensors, description = unpack(data, name=row["object"])
        for number, standing in enumerate(description["fragments"]):
            received = {name: tensors[f"received/{name}"] for name in anatomy.fragments[number]}
            yield name, number, standing["version"], _hash(received)


def _hash(tensors: Tensors) -> str:
    return object_hash(pack({name: tensors[name] for name in sorted(tensors)}, {}))


def tape_findings(run: Run, catalog: Catalog, followed: Followed) -> list[Finding]:
    """Whether every merge of the tape has one event, and no event is of another."""
    rows = catalog.rows("SELECT detail FROM events WHERE run = ? AND kind = 'merge'", [run.name])
    told = sorted(json.loads(row["detail"])["merge"] for row in rows)
    if told == list(range(1, followed.merge + 1)):
        return []
    return [
        Finding(
            invariant="tape",
            what=f"{followed.merge} merges on the tape, {len(told)} events, {len(set(told))} of them different",
        )
    ]


# What lies in the run's folder.


def orphan_findings(run: Run, catalog: Catalog, followed: Followed | None) -> tuple[list[Finding], int]:
    """Objects that nothing refers to and no killed process explains; and how many are a killed process'."""
    rows = catalog.rows("SELECT object FROM checkpoints WHERE run = ? AND object <> ''", [run.name])
    committed = {row["object"] for row in rows}
    paths = {info.path for info in run.store.list(run.folder)}
    incarnations: dict[int, int] = {}
    for path in paths:
        if found := re.search(r"members/(\d{4})-(\d{3})\.json$", path):
            incarnations[int(found[1])] = max(incarnations.get(int(found[1]), 0), int(found[2]))
    snapshotted = _snapshot_paths(run)
    terms = {int(found[1]) for path in paths if (found := _LEASE.fullmatch(path.removeprefix(f"{run.folder}/")))}
    findings, leftovers = [], 0
    for path in sorted(paths):
        inner = path.removeprefix(f"{run.folder}/")
        if path in committed or path in snapshotted or inner == "finished.json":
            continue
        if _MEMBER.fullmatch(inner) or _METRICS.fullmatch(inner) or _LEASE.fullmatch(inner):
            continue
        if (found := _MERGE.fullmatch(inner)) and followed is not None and int(found[1]) <= followed.merge:
            continue
        if (found := _OUTER.fullmatch(inner)) and followed is not None and _is_merged(found, followed):
            continue
        if (found := _CHECKPOINT.fullmatch(inner)) and int(found[2]) < incarnations.get(int(found[1]), 0):
            leftovers += 1
            continue
        if re.fullmatch(r"snapshots/\d{8}/.+", inner) and max(terms, default=0) > 0:
            leftovers += 1  # a syncer before the last one died at it
            continue
        findings.append(Finding(invariant="orphans", what=f"{path}: nothing refers to it"))
    if len(terms) > 2:
        findings.append(
            Finding(invariant="orphans", what=f"{len(terms)} terms of the lease are left, not the last two")
        )
    return findings, leftovers


def _is_merged(found: re.Match[str], followed: Followed) -> bool:
    island, round_, number = int(found[1]), int(found[2]), int(found[3])
    return number < len(followed.merged_rounds) and round_ <= followed.merged_rounds[number].get(island, -1)


def _snapshot_paths(run: Run) -> set[str]:
    paths = set()
    for merge in snapshots(run):
        paths.add(run.snapshot_path(merge))
        for entry in json.loads(run.store.get(run.snapshot_path(merge)))["fragments"]:
            paths |= {entry["parameters"]["path"], entry["outer"]["path"]}
    return paths
