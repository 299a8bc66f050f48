"""Child processes of the pytest process: run, killed, found and waited for."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

#: Longest life of a child in seconds; then it hangs, dumps its stack, and ends.
CHILD_SECONDS = 60
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def run_child(body: Callable[[], None], log: Path) -> None:
    """Run the child's body and exit. Never returns."""
    # Frameworks collect garbage explicitly, which would write to, and so copy, every page from before the fork.
    gc.freeze()
    code = 3
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(sys.stderr)
        faulthandler.dump_traceback_later(CHILD_SECONDS, exit=True, file=sys.stderr)
        remove_log_handlers()
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def remove_log_handlers() -> None:
    """Remove the handlers of all loggers: some write to descriptors that a child closes and uses anew."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):
            for handler in list(logger.handlers):
                logger.removeHandler(handler)


def die_after(seconds: float) -> None:
    """Make the kernel end this process after so many seconds, whatever it does then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def live_on() -> None:
    """Cancel `die_after`."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that has started it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children(of: int | str = "self") -> set[int]:
    """Process ids of a process's children, including zombies; none if it has ended."""
    found: set[int] = set()
    gone = suppress(FileNotFoundError, ProcessLookupError)
    with gone:
        for task in Path(f"/proc/{of}/task").iterdir():
            with gone:  # a thread that ends meanwhile passes its children to another one; they show at the next look
                found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "?"


def reap(pid: int, limit: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if not select.select([handle], [], [], limit)[0]:
            return False
    finally:
        os.close(handle)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return True


def be_subreaper(on: bool) -> None:
    """Adopt our children's orphans, so that they can be found."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def kill_and_wait(pid: int, limit: float = 20.0) -> None:
    """Send SIGKILL, and wait for the end of the process (its zombie may stay)."""
    handle = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        if not select.select([handle], [], [], limit)[0]:
            raise TimeoutError(f"pid {pid} does not die")
    finally:
        os.close(handle)


def memory_of_ours(pid: int | str) -> list[str]:
    """Mappings and descriptors of a process that belong to memckpt's shared memory or sockets."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = [line for line in maps if "memfd:memckpt" in line]
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue  # the descriptor of this listing
        if "memfd:memckpt" in target:
            found.append(f"fd {fd.name} -> {target}")
    return found


#: What hides devices of CUDA, ROCm, XPU and Ascend.
HIDING = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)


def hides_devices(pid: int) -> bool:
    """Whether a process was started without accelerators: a context takes memory of the first one."""
    return {f"{name}=-1" for name in HIDING} <= set(Path(f"/proc/{pid}/environ").read_text().split("\0"))
