"""Scratch space on a disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory on a disk, if any file system has one; else a memory-backed one."""
    for candidate in (tempfile.gettempdir(), "/var/tmp", os.getcwd()):
        if os.access(candidate, os.W_OK) and not _is_memory(Path(candidate)):
            break
    with tempfile.TemporaryDirectory(prefix="memckpt-bench-", dir=candidate, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _is_memory(path: Path) -> bool:
    """Whether a path is on a memory-backed file system."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        if str(path.resolve()).startswith(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind in ("tmpfs", "ramfs")
