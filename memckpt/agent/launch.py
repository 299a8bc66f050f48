"""Starting a node's agent from a trainer, and the hand-shake that says whether it came up."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from memckpt.agent.address import AgentAddress
from memckpt.config import AgentConfig
from memckpt.errors import AgentError

_READY = b"ready"


def report_ready(fd: int) -> None:
    """In the agent: it answers from now on."""
    os.write(fd, _READY)
    os.close(fd)


def report_failure(fd: int, error: BaseException) -> None:
    """In the agent: why it could not start. Ignored when it had reported readiness before."""
    try:
        os.write(fd, f"{type(error).__name__}: {error}".encode())
        os.close(fd)
    except OSError:
        return


def spawn_agent(address: AgentAddress, config: AgentConfig) -> subprocess.Popen[bytes]:
    """Start the agent in a session of its own and wait until it answers.

    A session of its own, so that a launcher that kills the trainers' process group does not take it along. Of several
    agents started at the same time one wins; the others report that, and their starters connect to the winner.

    Raises:
        AgentError: it did not come up; the message has what it said and where its log is.
    """
    address.run_dir.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
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
        str(write_fd),
    ]
    package_root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        # The trainer's directory need not be the one it was started from, nor its path on sys.path be inherited.
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")])),
    }
    try:
        with address.log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=[write_fd],
            )
    except OSError as error:
        os.close(read_fd)
        raise AgentError(f"the agent could not be started: {error}") from error
    finally:
        os.close(write_fd)
    try:
        if not select.select([read_fd], [], [], config.start_seconds)[0]:
            process.kill()
            process.wait()
            raise AgentError(f"the agent did not answer within {config.start_seconds:.0f} s; see {address.log_path}")
        said = os.read(read_fd, 1 << 16)
    finally:
        os.close(read_fd)
    if said != _READY:
        process.wait()
        detail = said.decode(errors="replace") or f"it ended with status {process.returncode}"
        raise AgentError(f"the agent could not be started: {detail}; see {address.log_path}")
    return process
