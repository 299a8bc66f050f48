"""What ``memckpt doctor`` finds out about this machine. Whatever it makes for that, it removes."""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path

from memckpt.agent.address import AgentAddress, Listener
from memckpt.agent.control import ask_status
from memckpt.agent.processes import start_ticks
from memckpt.arguments import config_from_environment
from memckpt.cli.checks import DiskFacts
from memckpt.config import ErasureConfig, MirrorConfig
from memckpt.errors import ConfigurationError, MemckptError, StorageError
from memckpt.storage.store import LocalStore, Store

_CHUNK_BYTES = 4 << 20


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_facts() -> tuple[str, int, bool]:
    """Why torch cannot be imported (empty: it can), the threads it computes with, and whether it sees CUDA."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that cannot be loaded
        return f"{type(error).__name__}: {error}", 0, False
    return "", torch.get_num_threads(), torch.cuda.is_available()


def configured_peers() -> tuple[ErasureConfig | MirrorConfig | None, str]:
    """The peers that the environment asks for, and what is wrong with its settings (empty: nothing)."""
    try:
        return config_from_environment().peers, ""
    except ConfigurationError as error:
        return None, str(error)


def erasure_facts() -> tuple[tuple[str, ...], str]:
    """The erasure codes that there are, and why pyeclib cannot be imported (empty: it can)."""
    try:
        from pyeclib.ec_iface import VALID_EC_TYPES
    except (ImportError, OSError) as error:
        return (), f"{type(error).__name__}: {error}"
    return tuple(sorted(VALID_EC_TYPES)), ""


def transport_facts() -> tuple[str, bool, str]:
    """The version of ZeroMQ, whether it has CURVE, and why pyzmq cannot be imported (empty: it can)."""
    try:
        import zmq
    except (ImportError, OSError) as error:
        return "", False, f"{type(error).__name__}: {error}"
    return zmq.zmq_version(), bool(zmq.has("curve")), ""


def locked_memory_limit() -> int | None:
    """Bytes that this process may lock; None: any number."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def missing_kernel_features() -> tuple[str, ...]:
    """What the agent builds on and this kernel, or sandbox, does not have."""
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
    """Why an agent could not listen here; empty: it could."""
    try:
        Listener().close()
    except OSError as error:
        return str(error)
    return ""


def systemd_service(cgroup: str) -> str | None:
    """The service that a process is in, by its ``/proc/PID/cgroup``; scopes (terminals, sessions) are none."""
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd"):
            unit = path.rpartition("/")[2]
            if unit.endswith(".service"):
                return unit
    return None


def own_service() -> str | None:
    try:
        return systemd_service(Path("/proc/self/cgroup").read_text())
    except OSError:
        return None


def in_container() -> bool:
    marked = any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
    return marked or "KUBERNETES_SERVICE_HOST" in os.environ


def ask_agent(run: Path) -> tuple[int | None, str]:
    """Pid of the run's agent on this node, and why it could not be asked."""
    try:
        found = ask_status(AgentAddress.of(run))
    except MemckptError as error:
        return None, str(error)
    return (found.pid if found is not None else None), ""


def nearest_directory(path: Path) -> Path:
    """The path, or the closest directory above it that exists."""
    path = path.resolve()
    return next(one for one in (path, *path.parents) if one.is_dir())


def filesystem_of(path: Path, mounts: str) -> str:
    """The kind of file system that a path is on, by the content of ``/proc/self/mounts``."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.replace(r"\040", " ")
        # Of two mounts at one point the later covers the earlier.
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= best:
            best, kind = len(point), found
    return kind


def try_disk(store: LocalStore, nbytes: int) -> DiskFacts:
    """Write and sync a temporary file where the store is, or would be."""
    directory = nearest_directory(store.root)
    kind = filesystem_of(directory, Path("/proc/self/mounts").read_text())
    free = shutil.disk_usage(directory).free
    data = os.urandom(_CHUNK_BYTES)  # nothing that a file system could compress
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".memckpt-doctor-") as file:
            started = time.perf_counter()
            for _ in range(max(1, nbytes // len(data))):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
    except OSError as error:
        return DiskFacts(str(directory), kind, free, None, str(error))
    return DiskFacts(str(directory), kind, free, max(nbytes, len(data)) / seconds)


def try_store(store: Store) -> tuple[float, str]:
    """Write, list, read and delete a small object: the seconds that it took, and what went wrong (empty: nothing)."""
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
        return 0.0, f"{store.url}: what was written is not what is read back"
    return time.perf_counter() - started, ""
