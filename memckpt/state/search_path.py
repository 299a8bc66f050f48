"""Search path of the user's modules: trainers send it to the processes that redo their steps.

A script's own directory is on `sys.path` of its process only, as are directories that it has added.
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
    """The directories on `sys.path`, in order, without those of Python itself and of installed packages."""
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
