"""Starting a node's agent from a trainer, and the hand-shake that says whether it came up."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from memckpt.config import AgentConfig
from memckpt.errors import AgentError, ConfigurationError
from memckpt.processes.address import AgentAddress
from memckpt.processes.handles import ProcessHandle, parent_of
from memckpt.protocol.descriptors import readable

_log = logging.getLogger("memckpt")
_READY = "ready"
#: Ends what the agent says. The end of the pipe would not do: a process that was forked meanwhile may have it, too.
_END = "\0"
#: How long a process that was killed may take to end.
_END_SECONDS = 5.0


def report_ready(fd: int) -> None:
    """In the agent: it answers from now on.

    Raises:
        AgentError: whoever started it is gone, or waits no more.
    """
    try:
        os.write(fd, f"{_READY}{_END}".encode())
    except BrokenPipeError as error:
        raise AgentError("the process that has started this agent is gone, or waits for it no more") from error
    os.close(fd)


def report_failure(fd: int, error: BaseException) -> None:
    """In the agent: why it could not start. Ignored when it had reported readiness before."""
    try:
        os.write(fd, f"{type(error).__name__}: {error}{_END}".encode())
        os.close(fd)
    except OSError:
        return


def make_run_dir(run_dir: Path) -> None:
    """Make a run directory, if it is not there. Raises ConfigurationError if that cannot be, or it is read-only."""
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
            f"{expected}, found {run_dir}, where uid {os.geteuid()} may not write, or that is mounted read-only; name "
            "another one, or change its owner or its mount"
        )


def spawn_agent(address: AgentAddress, config: AgentConfig) -> int:
    """Start the agent, which is no child of this process, and wait until it answers; returns its process id.

    Of several agents started at the same time one wins; the others report that, and their starters connect to the
    winner. The agent belongs to whoever uses it, and ends by itself when nobody does.

    Raises:
        AgentError: it did not come up; the message has what it said and where its log is.
        ConfigurationError: the run directory cannot be made, or not be written to.
    """
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
    # It ends as soon as it has started the agent.
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
            "process of a container, or a child subreaper, as launchers make their workers. What ends this process may "
            "end the agent, and what it holds. Start `memckpt agent %s` outside of it, before training",
            pid,
            address.run_dir,
        )
    return pid


def _start(address: AgentAddress, config: AgentConfig, report_fd: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "memckpt.agent",
        str(address.run_dir),
        "--node",
        address.node,
        "--linger-seconds",
        str(config.linger_seconds),
        "--niceness",
        str(config.niceness),
        "--ready-fd",
        str(report_fd),
    ]
    package_root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        # The trainer's directory need not be the one it was started from, nor its path on sys.path be inherited.
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")])),
    }
    with address.log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            pass_fds=[report_fd],
        )


def _read(fd: int, deadline: float) -> tuple[str, bool]:
    """What is said until all of it is, or all have closed the other end; and whether that took too long."""
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
    """Kill the process that a starter has named, if it has, and wait for its end."""
    if not line:
        return
    pid, ticks = (int(word) for word in line.split())
    with contextlib.suppress(ProcessLookupError):
        process = ProcessHandle.of(pid, ticks)
        try:
            process.kill()
            process.wait(_END_SECONDS)
        finally:
            process.close()
