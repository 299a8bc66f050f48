"""Memory that a process on this node may still allocate, and the check of base and log against it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memckpt.errors import MemoryBudgetError
from memckpt.user_messages import nbytes_text

#: Fraction of the available memory left free for everything else.
_HEADROOM = 0.05


def available_bytes() -> int:
    """Bytes that can still be allocated: the machine's available memory, or less in a limiting cgroup."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *(each.left for each in memory_limits())])


def check_budget(
    needed: int, already_held: int, budget: int | None, detail: str, given_back: int = 0, coming: int = 0
) -> None:
    """Refuse an allocation that cannot fit, with MemoryBudgetError; `detail` breaks the figure down for the message.

    `already_held` bytes stay while the new ones are written; `given_back`, not among them, are freed before; `coming`
    are available still, and promised to others. `budget` is the limit on all together, at most the machine's memory,
    as None is: missing anonymous memory shows up as an OOM kill, never as an error.
    """
    room, source = int(available_bytes() * (1 - _HEADROOM)) + given_back - coming, "available memory"
    if budget is not None and budget - already_held < room:
        room, source = budget - already_held, "agent.memory_budget_bytes"
    if needed > room:
        raise MemoryBudgetError(
            f"expected room for {nbytes_text(needed)} of base and log on this node ({detail}), found "
            f"{nbytes_text(max(0, room))} ({source}); lower anchor_period_steps or slots, choose redo='eager', raise "
            "the budget, or give the job more memory"
        )


_MOUNT = Path("/sys/fs/cgroup")
_PROC = Path("/proc/self/cgroup")
#: Version 1 expresses "no limit" as a number beyond all memory.
_NO_LIMIT = 2**60
#: By whether a group is of version 2: files of its limit and of what it uses, and fields of what it can reclaim.
_NAMES = {
    True: ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


class MemoryLimit(NamedTuple):
    """The memory limit of one control group, and the bytes that may still be allocated below it."""

    limit: int
    left: int


def _directories(controller: str, proc: Path, mount: Path) -> Iterator[tuple[Path, bool]]:
    """The control groups around this process, innermost first, each with whether it is of version 2.

    In a container the path may lead nowhere: its own group is then mounted at the top, the last one here.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        second = controllers == ""
        if not second and controller not in controllers.split(","):
            continue
        top = mount if second else mount / controller
        inner = top / path.lstrip("/")
        for directory in (inner, *inner.parents):
            yield directory, second
            if directory == top:
                break


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(directory: Path, names: tuple[str, ...]) -> int:
    """Bytes of page cache charged to a group: a job that reads much fills its limit with it, at no loss."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines)
    return sum(int(fields.get(name, 0)) for name in names)


def memory_limits(proc: Path = _PROC, mount: Path = _MOUNT) -> list[MemoryLimit]:
    """All memory limits that apply to this process; empty if there are none."""
    limits = []
    for directory, second in _directories("memory", proc, mount):
        limit_file, used_file, reclaimable = _NAMES[second]
        limit, used = _number(directory / limit_file), _number(directory / used_file)
        if limit is not None and used is not None and limit < _NO_LIMIT:
            limits.append(MemoryLimit(limit, max(0, min(limit, limit - used + _reclaimable(directory, reclaimable)))))
    return limits


def _quota(directory: Path, second: bool) -> float | None:
    try:
        if second:
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() else None  # "max", or -1: no limit


def cpu_quota(proc: Path = _PROC, mount: Path = _MOUNT) -> float | None:
    """Cores' worth of time that this process may use; None without a limit."""
    quotas = [_quota(directory, second) for directory, second in _directories("cpu", proc, mount)]
    return min((quota for quota in quotas if quota is not None), default=None)


def usable_cores() -> float:
    """Cores that this process may use: its affinity, or less if a control group limits it."""
    cores, quota = float(len(os.sched_getaffinity(0))), cpu_quota()
    return cores if quota is None else min(cores, quota)
