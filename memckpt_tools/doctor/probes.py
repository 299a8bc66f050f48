"""Measurements of ``memckpt doctor`` on this machine, in the order of its checks. Temporary files are removed."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from memckpt.cli.common import place_of
from memckpt.cli.run_view import alarms_of, read_within
from memckpt.config import ErasureConfig
from memckpt.config.arguments import config_from_environment
from memckpt.errors import ConfigurationError, ForeignStateError, MemckptError, StorageError
from memckpt.memory.budget import available_bytes, cpu_quota, memory_limits
from memckpt.processes.address import AgentAddress, Listener
from memckpt.processes.control import ask_status
from memckpt.processes.handles import start_ticks
from memckpt.protocol.status import Status
from memckpt.storage.catalog import without
from memckpt.storage.chain import stored_points
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import kept_run, refuse_other
from memckpt.storage.store import Store
from memckpt.storage.urls import open_store
from memckpt_tools.doctor import checks
from memckpt_tools.doctor.checks import Check, DiskFacts, StoreFacts

_CHUNK_BYTES = 4 << 20
#: Share of the free bytes that a trial of a disk takes at most: a training may need the rest meanwhile.
_TRIAL_SHARE = 0.25
#: Bytes from which a rate is measured, as smaller files only measure a sync; and bytes of a mere write test.
_RATE_BYTES, _LEAST_BYTES = 16 << 20, 4096
#: Time limit for reading the catalog.
_STORAGE_SECONDS = 30.0
#: Number of other runs that are named.
_NAMED_RUNS = 5


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it; None: not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_facts() -> tuple[str, int, bool]:
    """Torch's import error (empty: none), its number of threads, and whether it sees an accelerator."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that cannot be loaded
        return f"{type(error).__name__}: {error}", 0, False
    return "", torch.get_num_threads(), torch.accelerator.is_available()


def configured_peers() -> tuple[ErasureConfig | None, str]:
    """The environment's peer settings, and the error in its settings (empty: none)."""
    try:
        return config_from_environment().peers, ""
    except ConfigurationError as error:
        return None, str(error)


def erasure_facts() -> tuple[tuple[str, ...], str]:
    """The available erasure codes, and pyeclib's import error (empty: none)."""
    try:
        from pyeclib.ec_iface import VALID_EC_TYPES
    except (ImportError, OSError) as error:
        return (), f"{type(error).__name__}: {error}"
    return tuple(sorted(VALID_EC_TYPES)), ""


def transport_facts() -> tuple[str, bool, str]:
    """The version of ZeroMQ, whether it has CURVE, and pyzmq's import error (empty: none)."""
    try:
        import zmq
    except (ImportError, OSError) as error:
        return "", False, f"{type(error).__name__}: {error}"
    return zmq.zmq_version(), bool(zmq.has("curve")), ""


def missing_kernel_features() -> tuple[str, ...]:
    """Features that the agent needs and this kernel or sandbox lacks."""
    missing = []
    if not start_ticks(os.getpid()):
        missing.append("/proc")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        missing.append("pidfd_open")
    try:
        os.close(os.memfd_create("memckpt:doctor", os.MFD_CLOEXEC))
    except OSError:
        missing.append("memfd_create")
    return tuple(missing)


def try_sockets() -> str:
    """The error of listening on an agent's socket; empty: none."""
    try:
        Listener().close()
    except OSError as error:
        return str(error)
    return ""


def systemd_service(cgroup: str) -> str | None:
    """The systemd service of a process, from its ``/proc/PID/cgroup``; None: none, or a scope (terminal, session)."""
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd"):
            unit = path.rpartition("/")[2]
            if unit.endswith(".service"):
                return unit
    return None


def ask_agent(run: Path) -> tuple[Status | None, str]:
    """The status of the run's agent on this node, and the error of asking it (empty: none)."""
    try:
        return ask_status(AgentAddress.of(run)), ""
    except MemckptError as error:
        return None, str(error)


def descriptor_limits() -> tuple[int | None, int | None]:
    """The soft and the hard limit on open files; None: unlimited."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def job_nodes(agent: Status | None) -> int:
    """Number of nodes of the job, from the agent, Slurm or torchrun; 1: unknown."""
    linked = len(agent.peers.links) + 1 if agent is not None and agent.peers is not None else 1
    numbers = [os.environ.get(name, "") for name in ("SLURM_JOB_NUM_NODES", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    slurm, ranks, local = (int(number) if number.isdecimal() else 0 for number in numbers)
    return max(linked, slurm, ranks // local if local else 1)


def look_into_store(store: Store, run: Path | None) -> StoreFacts:
    """The contents of a store, and other runs in it or beside it; `run`: that it should belong to, None: any."""
    beside = _runs_beside(run) if run is not None else []
    url = store.url
    try:
        catalog, missing = read_within(store, _STORAGE_SECONDS)
        kept = kept_run(run) if run is not None else ""
        if kept:
            refuse_other(url, catalog.owner, kept, run)
    except ForeignStateError as error:
        return StoreFacts(url, foreign=str(error), beside=tuple(beside))
    except MemckptError as error:
        return StoreFacts(url, problem=str(error), beside=tuple(beside))
    there = without(catalog, missing)
    points, whole = stored_points(there), there.complete
    return StoreFacts(
        url,
        checkpoints=len(whole),
        step=points[0].step if points else None,
        nbytes=whole[0].nbytes if whole else 0,
        wrong=(*catalog.damaged.values(), *missing.values(), *catalog.unreadable.values()),
        others=catalog.others,
        beside=tuple(beside),
        owner=catalog.owner if run is None else "",
    )


def _runs_beside(run: Path) -> list[str]:
    resolved = run.resolve()
    found = (path.parent for path in resolved.parent.glob("*/run.json") if path.parent.resolve() != resolved)
    return sorted(directory.name for directory in found)[:_NAMED_RUNS]


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of a path's file system, from the content of ``/proc/self/mounts``."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.replace(r"\040", " ")
        # A later mount at the same point covers an earlier one.
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= best:
            best, kind = len(point), found
    return kind


def try_disk(store: LocalStore, nbytes: int) -> DiskFacts:
    """Write and sync a temporary file at a store's location, of at most a quarter of the free bytes, or of 4 KiB."""
    root = store.root.resolve()
    directory = next(one for one in (root, *root.parents) if one.is_dir())
    kind = filesystem_of(directory, Path("/proc/self/mounts").read_text())
    free = shutil.disk_usage(directory).free
    size = min(nbytes, int(free * _TRIAL_SHARE))
    rated = size >= min(nbytes, _RATE_BYTES)
    size = size if rated else _LEAST_BYTES
    data = os.urandom(min(size, _CHUNK_BYTES))  # random, so that file systems cannot compress it
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".memckpt-doctor-") as file:
            started = time.perf_counter()
            for begin in range(0, size, len(data)):
                file.write(data[: size - begin])
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
    except OSError as error:
        return DiskFacts(str(directory), kind, free, None, str(error))
    return DiskFacts(str(directory), kind, free, size / seconds if rated else None)


def try_store(store: Store) -> tuple[float, str]:
    """Write, list, read and delete a small object. Returns the seconds taken, and the error (empty: none)."""
    directory = f"doctor-{secrets.token_hex(4)}"
    path, data = f"{directory}/trial", os.urandom(1024)
    started = time.perf_counter()
    try:
        store.write(path, data)
        try:
            listed, found = store.find(directory), store.read(path)
        finally:
            store.delete(path)
    except StorageError as error:
        return 0.0, str(error)
    if listed != [path] or found != data:
        return 0.0, f"{store.url}: an object read back differs from the one written"
    return time.perf_counter() - started, ""


#: More bytes than a disk's own cache hides.
_TRIAL_BYTES = 64 << 20


def examine(run: Path | None, url: str | None) -> Iterator[Check]:
    """Run all checks, the quick ones first."""
    yield checks.check_python(sys.version_info[:3])
    yield checks.check_kernel(platform.release(), missing_kernel_features())
    agent, service = None, None
    if run is not None:
        agent, problem = ask_agent(run)
        yield checks.check_agent(agent.pid if agent is not None else None, problem)
        if agent is not None:
            yield checks.check_alarms(tuple(alarms_of(agent)))
            yield checks.check_advice(agent.advice, agent.advice_reason)
    yield checks.check_sockets(try_sockets())
    yield checks.check_memory(available_bytes(), min((one.limit for one in memory_limits()), default=None))
    with contextlib.suppress(OSError):  # a kernel without control groups
        service = systemd_service(Path("/proc/self/cgroup").read_text())
    container = any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
    container = container or "KUBERNETES_SERVICE_HOST" in os.environ
    yield checks.check_survival(os.environ.get("SLURM_JOB_ID"), service, container)
    yield from _examine_software()
    peers, problem = configured_peers()
    yield checks.check_descriptors(*descriptor_limits(), job_nodes(agent), peers)
    yield checks.check_settings(problem)
    yield checks.check_erasure(*erasure_facts(), peers)
    yield checks.check_transport(*transport_facts(), peers)
    if run is None:
        yield from _examine_storage(url or str(Path.cwd()), None, agent)
    elif url is not None or not problem:  # else the location of checkpoints is unknown
        yield from _examine_storage(url or place_of(run, None), run, agent)


def _examine_software() -> Iterator[Check]:
    import_error, threads, on_accelerator = torch_facts()
    torch = checks.check_torch(installed_version("torch"), import_error)
    yield torch
    if torch.outcome == "ok":
        yield checks.check_cores(len(os.sched_getaffinity(0)), cpu_quota(), threads, on_accelerator)
    yield checks.check_lightning(installed_version("lightning"), installed_version("pytorch-lightning"))
    for name, purpose in {
        "accelerate": "training with Accelerate",
        "safetensors": "memckpt export --format safetensors",
        "s3fs": "storage at s3://",
    }.items():
        yield checks.check_optional(name, installed_version(name), purpose)


def _examine_storage(url: str, run: Path | None, agent: Status | None) -> Iterator[Check]:
    driver = checks.check_driver(url, {name: installed_version(name) for name in ("s3fs", "gcsfs", "adlfs")})
    if driver is not None and driver.outcome == "problem":
        yield driver
        return
    try:
        store = open_store(url)
    except ConfigurationError as error:
        yield Check("storage", "problem", str(error), "correct --url, MEMCKPT_STORAGE_URL or storage.url")
        return
    if isinstance(store, LocalStore):
        disk = try_disk(store, _TRIAL_BYTES)
        yield from checks.check_disk(disk)
    else:
        disk = None
        seconds, problem = try_store(store)
        yield checks.check_store(store.url, seconds, problem)
        if run is None and problem:
            return
    if run is None and disk is not None:
        return
    found = look_into_store(store, run)
    yield checks.check_content(found)
    if found.others or found.beside:
        yield checks.check_other_runs(found)
    if found.nbytes:
        yield from checks.check_room(found.nbytes, disk, None if agent is not None else available_bytes())
