"""Processes of memckpt, seen from outside: their end, memory and CPU time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

#: Seconds until a process that does not answer is given up.
PATIENCE_SECONDS = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")


def end_agent(pid: int) -> None:
    """End an agent, and wait until its memory is free for the next case."""
    with contextlib.suppress(ProcessLookupError):
        agent = os.pidfd_open(pid)
        signal.pidfd_send_signal(agent, signal.SIGTERM)
        select.select([agent], [], [], PATIENCE_SECONDS)
        os.close(agent)


def children(pid: int) -> list[int]:
    """Pids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    user, system = stat[stat.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / _TICKS


def proportional_bytes(pid: int) -> int:
    """Proportional set size (PSS) of a process in bytes.

    File-backed pages are left out: they are libraries, shared by every process that uses torch.
    """
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, kibibytes, _ = line.split()
        fields[name] = int(kibibytes) * 1024
    return fields["Pss_Anon:"] + fields["Pss_Shmem:"]
