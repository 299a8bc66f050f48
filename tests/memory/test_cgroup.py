"""What control groups say of memory and cores, read from files made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from memckpt.memory.budget import MemoryLimit, cpu_quota, memory_limits


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def belongs_to(tmp_path: Path, *lines: str) -> Path:
    proc = tmp_path / "self"
    proc.write_text("".join(f"{line}\n" for line in lines))
    return proc


def group(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def test_every_enclosing_group_of_version_2_counts(tmp_path: Path, mount: Path) -> None:
    proc = belongs_to(tmp_path, "0::/job/step")
    group(mount / "job" / "step", memory__max="max", memory__current=70, cpu__max="150000 100000")
    group(mount / "job", memory__max=100, memory__current=80, cpu__max="max 100000")
    group(mount)
    assert memory_limits(proc, mount) == [MemoryLimit(100, 20)]
    assert cpu_quota(proc, mount) == 1.5


def test_page_cache_is_not_memory_in_use(tmp_path: Path, mount: Path) -> None:
    """A job that has read its data for days has a full group and yet all of its memory."""
    proc = belongs_to(tmp_path, "0::/")
    stat = "anon 10\ninactive_file 60\nactive_file 25\nslab_reclaimable 1"
    group(mount, memory__max=100, memory__current=99, memory__stat=stat)
    assert memory_limits(proc, mount) == [MemoryLimit(100, 87)]


def test_groups_of_version_1(tmp_path: Path, mount: Path) -> None:
    proc = belongs_to(tmp_path, "9:name=systemd:/", "4:memory:/pod/container", "1:cpu,cpuacct:/x", "0::/")
    stat = "total_inactive_file 5\ntotal_active_file 1"
    group(mount / "memory" / "pod", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=50)
    group(mount / "memory", memory__limit_in_bytes=100, memory__usage_in_bytes=50, memory__stat=stat)
    group(mount / "cpu" / "x", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    group(mount / "cpu", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    assert memory_limits(proc, mount) == [MemoryLimit(100, 56)]
    assert cpu_quota(proc, mount) == 0.5


def test_no_groups(tmp_path: Path, mount: Path) -> None:
    assert memory_limits(tmp_path / "nothing", mount) == []
    proc = belongs_to(tmp_path, "0::/gone")
    assert memory_limits(proc, mount) == []
    assert cpu_quota(proc, mount) is None
