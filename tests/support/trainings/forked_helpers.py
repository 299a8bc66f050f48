"""Helper processes of a lab's agent, forked from it instead of started anew.

The agent has torch already; a new Python would take four seconds of a core to import it again. What runs in it is the
same main function with the same arguments, descriptors and parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from memckpt.processes import helper, helper_process
from tests.support.cluster.processes import remove_log_handlers

#: Those that import torch.
_WITH_TORCH = ("memckpt.agent.saving.writer.checkpoint_writer", "memckpt.recovery.auditor")


class ForkedProcess:
    """As much of :class:`subprocess.Popen` as a helper process takes."""

    def __init__(self, arguments: Sequence[str], pass_fds: Sequence[int]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(arguments, pass_fds)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            handle = os.pidfd_open(self.pid)
            try:
                if not select.select([handle], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            finally:
                os.close(handle)
        code = self.poll()
        assert code is not None
        return code


def fork_helpers() -> None:
    """Have this process, an agent, fork the helpers that would import torch."""
    started = subprocess.Popen

    def start(arguments: Sequence[str], *, pass_fds: Sequence[int], **options: Any) -> Any:
        *_, module = arguments[:4]
        if module in _WITH_TORCH:
            return ForkedProcess(arguments[2:], pass_fds)
        return started(arguments, pass_fds=pass_fds, **options)

    helper_process.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


def _run(arguments: Sequence[str], pass_fds: Sequence[int]) -> None:
    """Become the helper. Never returns."""
    code = 1
    try:
        gc.freeze()  # what the agent holds is not ours to collect
        faulthandler.cancel_dump_traceback_later()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _let_go(pass_fds)
        remove_log_handlers()
        sys.argv = [*arguments]
        code = helper.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _let_go(kept: Sequence[int]) -> None:
    """Close the agent's descriptors, and unmap its memory, as a new program would."""
    first = 3
    for fd in sorted(kept):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:memckpt" in line:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin))
