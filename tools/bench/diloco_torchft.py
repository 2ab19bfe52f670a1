"""torchft's side of the DiLoCo benchmark: its DiLoCo on the model, the tokens and the schedule that ours gets.

The model, the inner AdamW, the learning rate and the losses are Atoll's own (`trainer.model`); averaging, outer step and the replicas' meeting are
torchft's. Every replica is a process of its own, and so is the Lighthouse; `python -m tools.bench.diloco_torchft --folder FOLDER --role ROLE` is one
of them. What the replicas compare, and ours, stands elsewhere.

torchft (`torchft-nightly` on PyPI) is optional. Its `use_bucketization` stays off: a tensor that doesn't fit its bucket would never be averaged, and
nothing would say so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from manifests.errors import Failure, UserError
from trainer.config import RunConfig

_JOB, _ADDRESS = "job.json", "lighthouse.address"
_LIGHTHOUSE = "lighthouse"
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchftResult:
    """What a run of torchft's DiLoCo came to. Tuples have one entry for each replica."""

    holdout_loss: float
    """Of the averaged parameters at the end: mean nats per token over all holdout sequences."""
    seconds: tuple[float, ...]
    """Wall clock of the training loop: from the first quorum, which all replicas leave together, to the last outer step."""
    wait_seconds: tuple[float, ...]
    """Of these, what went into synchronisation: quorum, all-reduce, commit, outer step. That is all but forward, backward, AdamW and sleep."""
    num_commits: int
    """Outer steps; each replica took every one."""
    train_losses: tuple[tuple[float, ...], ...]
    """Loss of each inner step, before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What the processes need to know; lies as JSON in the run's folder."""

    model: Mapping[str, Any]
    token_files: Sequence[str]
    holdout_file: str
    seq_len: int
    batch_size: int
    steps: int
    lr: float
    warmup_steps: int
    weight_decay: float
    gradient_clip: float
    sync_every: int
    outer_lr: float
    outer_momentum: float
    seed: int
    sleep_s: Sequence[float]
    """Seconds that each replica sleeps in every step."""
    threads: int
    timeout_s: float

    @property
    def config(self) -> RunConfig:
        """As our own trainer takes it, so that both sides build the same model and train it alike."""
        return RunConfig(
            run="torchft",
            tier_version=0,
            pool="",
            token_dtype="int64",
            vocab_size=self.model["vocab_size"],
            model=self.model,
            num_islands=len(self.token_files),
            steps=self.steps,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            lr=self.lr,
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            gradient_clip=self.gradient_clip,
            num_fragments=1,
            sync_every=self.sync_every,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            seed=self.seed,
            device="cpu",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What a replica says at its end."""

    seconds: float
    wait_seconds: float
    num_commits: int
    parameters_hash: str
    """SHA-256 of its global parameters."""
    holdout_loss: float | None
    """Only replica 0 measures it; the others' parameters are the same."""
    train_losses: tuple[float, ...]


def run_torchft(
    folder: Path,
    *,
    model: dict[str, Any],
    token_files: list[Path],
    holdout_file: Path,
    seq_len: int,
    batch_size: int,
    steps: int,
    lr: float,
    warmup_steps: int,
    weight_decay: float,
    gradient_clip: float,
    sync_every: int,
    outer_lr: float,
    outer_momentum: float,
    seed: int,
    slow: dict[int, float] | None = None,
    threads: int = 1,
    timeout_s: float = 900,
) -> TorchftResult:
    """Trains with torchft's DiLoCo: one fragment, no sync delay, no quantisation, one replica for each token file, all of them in every quorum.

    One token file is one replica: torchft does take that, its outer step then works on that replica's own progress.

    Args:
        folder: for logs and reports of the processes; made if it isn't there.
        model: Hugging Face configuration or the folder of a model as RunConfig has it, with its vocab_size.
        token_files: .npy of int64, (steps · batch_size, seq_len), in the order of training.
        holdout_file: .npy of int64, (sequences, seq_len).
        steps: inner steps of each replica, a multiple of sync_every: torchft would leave the rest out of the global parameters.
        slow: seconds that a replica sleeps in every step, by its number.
        threads: torch threads of each replica.
        timeout_s: for everything, the processes' start included.

    Raises:
        UserError: torchft isn't installed, or the arguments don't fit each other.
        Failure: a process died (the message has its log's last line), time ran out, or the replicas' parameters are not the same at the end.
    """
    replicas = range(len(token_files))
    if slow and not slow.keys() <= set(replicas):
        raise UserError(f"slow names replica {max(slow)}; there are replicas 0 to {len(token_files) - 1}")
    job = _Job(
        model=model,
        token_files=[str(path.resolve()) for path in token_files],
        holdout_file=str(holdout_file.resolve()),
        seq_len=seq_len,
        batch_size=batch_size,
        steps=steps,
        lr=lr,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        gradient_clip=gradient_clip,
        sync_every=sync_every,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        seed=seed,
        sleep_s=[(slow or {}).get(replica, 0.0) for replica in replicas],
        threads=threads,
        timeout_s=timeout_s,
    )
    _check(job)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_ADDRESS, *(f"{replica}.json" for replica in replicas)):
        (folder / name).unlink(missing_ok=True)
    (folder / _JOB).write_text(json.dumps(asdict(job)))
    reports = _run_processes(folder, job)
    hashes = {report.parameters_hash for report in reports}
    if len(hashes) > 1:
        raise Failure(f"the replicas end with {len(hashes)} different sets of global parameters; their logs: {folder}")
    holdout_loss = reports[0].holdout_loss
    assert holdout_loss is not None
    return TorchftResult(
        holdout_loss=holdout_loss,
        seconds=tuple(report.seconds for report in reports),
        wait_seconds=tuple(report.wait_seconds for report in reports),
        num_commits=min(report.num_commits for report in reports),
        train_losses=tuple(report.train_losses for report in reports),
    )


def _check(job: _Job) -> None:
    """Complains in this process about what would make the others fail."""
    _ = job.config  # its own checks
    for path in job.token_files:
        tokens = np.load(path, mmap_mode="r")
        wanted = (job.steps * job.batch_size, job.seq_len)
        if tokens.dtype != np.int64 or tokens.shape != wanted:
            raise UserError(f"{path} has {tokens.dtype} {tokens.shape}; {job.steps} steps need int64 {wanted}")
    holdout = np.load(job.holdout_file, mmap_mode="r")
    if holdout.dtype != np.int64 or holdout.ndim != 2 or not len(holdout) or holdout.shape[1] != job.seq_len:
        raise UserError(f"{job.holdout_file} has {holdout.dtype} {holdout.shape}; it must be int64 (N, {job.seq_len})")
    try:
        import torchft  # type: ignore[import-untyped, import-not-found]  # noqa: F401
    except ImportError as e:
        raise UserError(
            f"the benchmark beside torchft needs it, and it can't be imported ({e}); pip install 'atoll[bench]'"
        ) from e


def _run_processes(folder: Path, job: _Job) -> list[_Report]:
    """Starts Lighthouse and replicas, and waits for the replicas."""
    environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
    names = [str(replica) for replica in range(len(job.token_files))]
    command = [sys.executable, "-m", "tools.bench.diloco_torchft", "--folder", str(folder.resolve()), "--role"]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    deadline = time.monotonic() + job.timeout_s
    try:
        for name in (_LIGHTHOUSE, *names):
            with _log(folder, name).open("wb") as log:
                processes[name] = subprocess.Popen(
                    [*command, name, "--parent-pid", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=Path(__file__).parents[2],
                )
        while any(processes[name].poll() is None for name in names):
            for name, process in processes.items():
                code = process.poll()
                if code is not None and (code or name == _LIGHTHOUSE):
                    raise Failure(f"torchft's {_title(name)} ended with code {code}: {_last_words(folder, name)}")
            if time.monotonic() > deadline:
                running = ", ".join(_title(name) for name in names if processes[name].poll() is None)
                raise Failure(
                    f"torchft's {running} didn't finish in {job.timeout_s:g} s; raise timeout_s, or see the logs in {folder}"
                )
            time.sleep(_POLL_S)
        failed = [name for name in names if processes[name].returncode]
        if failed:
            code = processes[failed[0]].returncode
            raise Failure(f"torchft's {_title(failed[0])} ended with code {code}: {_last_words(folder, failed[0])}")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return [_Report(**json.loads((folder / f"{name}.json").read_text())) for name in names]


def _log(folder: Path, name: str) -> Path:
    return folder / f"{_title(name).replace(' ', '-')}.log"


def _title(name: str) -> str:
    return "Lighthouse" if name == _LIGHTHOUSE else f"replica {name}"


def _last_words(folder: Path, name: str) -> str:
    path = _log(folder, name)
    lines = path.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'it said nothing'} (its log is {path})"


def _run_lighthouse(folder: Path, job: _Job) -> None:
    """Lets the replicas find each other until the parent ends this process."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-untyped, import-not-found]

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=len(job.token_files))
    port = lighthouse.address().rsplit(":", 1)[1]  # its host is this machine's name, which may lead nowhere
    part = folder / f"{_ADDRESS}.part"
    part.write_text(f"http://127.0.0.1:{port}")
    part.rename(folder / _ADDRESS)
    while True:
        time.sleep(3600)


def _run_replica(folder: Path, job: _Job, replica: int) -> _Report:
    """Trains one replica to its end."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft.local_sgd import DiLoCo  # type: ignore[import-untyped, import-not-found]
    from torchft.manager import Manager  # type: ignore[import-untyped, import-not-found]
    from torchft.process_group import ProcessGroupGloo  # type: ignore[import-untyped, import-not-found]

    from trainer.model import build_model, holdout_loss, learning_rate, make_optimizer, token_losses

    torch.set_num_threads(job.threads)
    config = job.config
    tokens_SL = torch.from_numpy(np.load(job.token_files[replica]))
    model = build_model(config)
    inner = make_optimizer(model, config)
    outer = torch.optim.SGD(model.parameters(), lr=job.outer_lr, momentum=job.outer_momentum, nesterov=True)
    timeout = timedelta(seconds=job.timeout_s)
    group_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=len(job.token_files),
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=group_store.port,
        lighthouse_addr=_await_lighthouse(folder),
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
        # Else all but one replica would give up their first round: its first quorum copies that one's state to them.
        init_sync=False,
        # A round that fails is thrown away in silence otherwise; here nothing may fail.
        max_retries=0,
    )
    adamw_end = 0.0

    def note_adamw_end(*_: object) -> None:
        nonlocal adamw_end
        adamw_end = time.perf_counter()

    inner.register_step_post_hook(note_adamw_end)  # before DiLoCo's, which does the synchronisation
    losses: list[float] = []
    wait_s = 0.0
    with DiLoCo(manager, [model], inner, outer, sync_every=job.sync_every, use_bucketization=False):
        manager.start_quorum()  # connects the replicas, so that none of that is in the time of the loop
        begin = time.perf_counter()
        for step, batch_BL in enumerate(tokens_SL.split(job.batch_size), start=1):
            if job.sleep_s[replica]:
                time.sleep(job.sleep_s[replica])
            for group in inner.param_groups:
                group["lr"] = learning_rate(step, config)
            inner.zero_grad(set_to_none=True)
            loss = token_losses(model, batch_BL).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.gradient_clip)
            losses.append(loss.item())
            inner.step()
            wait_s += time.perf_counter() - adamw_end
        seconds = time.perf_counter() - begin
        manager.start_quorum()  # nobody leaves while another may still be averaging with it
    manager.shutdown()
    # The last step was an outer one, so the model is the global parameters.
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return _Report(
        seconds=seconds,
        wait_seconds=wait_s,
        num_commits=manager.current_step(),
        parameters_hash=digest.hexdigest(),
        holdout_loss=None if replica else holdout_loss(model, torch.from_numpy(np.load(job.holdout_file))),
        train_losses=tuple(losses),
    )


def _await_lighthouse(folder: Path) -> str:
    """The Lighthouse's address; the parent watches over it and over the time."""
    while not (folder / _ADDRESS).exists():
        time.sleep(_POLL_S)
    return (folder / _ADDRESS).read_text()


def main() -> None:
    """One process of a run: the Lighthouse, or a replica."""
    from tools.bench.frame import exit_with_parent

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the run's folder, with its job.json")
    parser.add_argument("--role", required=True, help="lighthouse, or the number of a replica")
    parser.add_argument("--parent-pid", type=int, help="process that this one ends with")
    options = parser.parse_args()
    if options.parent_pid:
        exit_with_parent(options.parent_pid)
    job = _Job(**json.loads((options.folder / _JOB).read_text()))
    if options.role == _LIGHTHOUSE:
        _run_lighthouse(options.folder, job)
    report = _run_replica(options.folder, job, int(options.role))
    (options.folder / f"{options.role}.json").write_text(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
