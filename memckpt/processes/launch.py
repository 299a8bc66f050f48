"""Start of a node's agent by a trainer, the handshake of success or failure, and where processes find modules."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from memckpt.config import AgentConfig
from memckpt.errors import AgentError, ConfigurationError
from memckpt.processes.address import AgentAddress
from memckpt.processes.handles import ProcessHandle, parent_of
from memckpt.protocol.descriptors import readable

_log = logging.getLogger("memckpt")
_READY = "ready"
#: End mark of the agent's report. The pipe's end would not do: a process forked meanwhile may hold it open.
_END = "\0"
#: Longest time, in seconds, that a killed process may take to end.
_END_SECONDS = 5.0


def report_ready(fd: int) -> None:
    """Report, in the agent, that it answers. Raises AgentError: its starter is gone, or no longer waits."""
    try:
        os.write(fd, f"{_READY}{_END}".encode())
    except BrokenPipeError as error:
        raise AgentError("the process that started this agent is gone, or no longer waits for it") from error
    os.close(fd)


def report_failure(fd: int, error: BaseException) -> None:
    """Report, in the agent, why it could not start. Ignored if it has reported readiness before."""
    try:
        os.write(fd, f"{type(error).__name__}: {error}{_END}".encode())
        os.close(fd)
    except OSError:
        return


def make_run_dir(run_dir: Path) -> None:
    """Create a run directory if it is missing. Raises ConfigurationError if that fails, or it is read-only."""
    expected = "run_dir: expected a directory, or a path at which one can be made, that this process may write to"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{expected}, found {run_dir} ({error.strerror}: {error.filename}); name another one, or move away what is "
            "in its place"
        ) from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{expected}, found {run_dir}, which uid {os.geteuid()} may not write to, or which is read-only; name "
            "another one, or change its owner or its mount"
        )


def spawn_agent(address: AgentAddress, config: AgentConfig) -> int:
    """Start the agent, detached, until it answers; returns its pid. Raises AgentError or ConfigurationError."""
    make_run_dir(address.run_dir)
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        starter = _start(address, config, write_fd)
    except OSError as error:
        os.close(read_fd)
        raise AgentError(f"the agent could not be started: {error}") from error
    finally:
        os.close(write_fd)
    try:
        said, timed_out = _read(read_fd, time.monotonic() + config.start_seconds)
    finally:
        os.close(read_fd)
    # The starter ends as soon as it has started the agent.
    if timed_out:
        starter.kill()
    status = starter.wait()
    line, _, outcome = said.removesuffix(_END).partition("\n")
    if timed_out:
        _end_agent(line)
        raise AgentError(f"the agent did not answer within {config.start_seconds:.0f} s; see {address.log_path}")
    if outcome != _READY:
        detail = outcome or (f"it ended with status {status}" if status else "it has died")
        raise AgentError(f"the agent could not be started: {detail}; see {address.log_path}")
    pid = int(line.split()[0])
    if parent_of(pid) == os.getpid():
        _log.warning(
            "memckpt: the agent (pid %d) has become a child of this process, which adopts orphans: it is the first "
            "process of a container, or a child subreaper, as launchers make their workers. A kill of this process may "
            "end the agent, and the state that it holds. Start `memckpt agent %s` outside of it, before training",
            pid,
            address.run_dir,
        )
    return pid


def _start(address: AgentAddress, config: AgentConfig, report_fd: int) -> subprocess.Popen[bytes]:
    options = {
        "--node": address.node,
        "--linger-seconds": config.linger_seconds,
        "--niceness": config.niceness,
        "--ready-fd": report_fd,
    }
    words = [str(word) for option in options.items() for word in option]
    with address.log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "memckpt.agent", str(address.run_dir), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**helper_environment(), "OMP_WAIT_POLICY": "passive"},
            start_new_session=True,
            pass_fds=[report_fd],
        )


def _read(fd: int, deadline: float) -> tuple[str, bool]:
    """The report, up to its end mark or the pipe's end; and whether the deadline passed."""
    said = b""
    while not said.endswith(_END.encode()):
        if not readable(fd, deadline - time.monotonic()):
            return said.decode(errors="replace"), True
        part = os.read(fd, 1 << 16)
        if not part:
            break
        said += part
    return said.decode(errors="replace"), False


def _end_agent(line: str) -> None:
    """Kill the process that a starter has named, if any, and wait for its end."""
    if not line:
        return
    pid, ticks = (int(word) for word in line.split())
    with contextlib.suppress(ProcessLookupError), contextlib.closing(ProcessHandle.of(pid, ticks)) as process:
        process.kill()
        process.wait(_END_SECONDS)


# What another process finds: modules, and no device

#: Variables of CUDA, ROCm (which reads the first, too), XPU and Ascend. No accelerator has this number; an empty mask
#: of XPU would hide none.
_HIDING = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)  # fmt: skip
_NO_DEVICES = dict.fromkeys(_HIDING, "-1")


def hide_devices() -> None:
    """Have this process and its children open no accelerator, whose context takes up to 0.6 GiB; not in a trainer."""
    os.environ.update(_NO_DEVICES)


def helper_environment() -> dict[str, str]:
    """This process's environment for an agent and its helpers, which find this package and no accelerator."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **_NO_DEVICES}


def user_search_path() -> tuple[str, ...]:
    """The directories on `sys.path`, without those of Python and installed packages, for processes that redo steps."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [Path(each) for each in (*own, *site.getsitepackages(), site.getusersitepackages())]
    found = []
    for entry in sys.path:
        directory = Path(entry or os.curdir).absolute()
        # The rest of the standard library, such as lib-dynload or a zip file, lies in or beside one of these.
        if directory.is_dir() and not any(directory.is_relative_to(each) for each in installed):
            found.append(str(directory))
    return tuple(dict.fromkeys(found))


def extend_search_path(directories: Sequence[str]) -> None:
    """Search these directories for modules, too, before installed packages, as the process that named them does."""
    new = [each for each in directories if each not in sys.path]
    if new:
        sys.path[:0] = new
        importlib.invalidate_caches()
