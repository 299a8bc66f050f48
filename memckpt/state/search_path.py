"""Where a user's modules are found: trainers know it, and the processes that redo their steps have to be told.

A script's own directory is on `sys.path` of its process only, as is what it has added there.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path


def user_search_path() -> tuple[str, ...]:
    """The directories on `sys.path`, in their order, that Python itself and what is installed do not live in."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [Path(each) for each in (*own, *site.getsitepackages(), site.getusersitepackages())]
    found = []
    for entry in sys.path:
        directory = Path(entry or os.curdir).absolute()
        # The rest of the standard library, as lib-dynload or a zip file, is in or beside a directory of its own.
        if directory.is_dir() and not any(directory.is_relative_to(each) for each in installed):
            found.append(str(directory))
    return tuple(dict.fromkeys(found))


def extend_search_path(directories: Sequence[str]) -> None:
    """Find modules in these directories, too, before what is installed, as the process that named them does."""
    new = [each for each in directories if each not in sys.path]
    if new:
        sys.path[:0] = new
        importlib.invalidate_caches()
