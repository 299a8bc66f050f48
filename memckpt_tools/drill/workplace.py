"""A copy of the working directory for each run of a drill: the user's results stay, and all runs begin alike."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from memckpt.errors import DrillError
from memckpt.user_messages import nbytes_text

#: Larger files are linked and not copied: data and weights, which a script reads.
_LINKED_BYTES = 16 << 20
#: Directories that a script writes nothing of its own into.
_LINKED_NAMES = frozenset({".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__"})
#: Most files of a copy, and most bytes.
_MOST_FILES, _MOST_BYTES = 20_000, 1 << 30
#: File that marks the directory of a drill: none is copied.
_MARK = ".memckpt-drill"
#: Most entries of a directory above the working directory that are linked.
_MOST_BESIDE = 5_000


class Workplace:
    """Copies of `source`, the working directory, for the runs of the drill in `place`; no drill's place is copied."""

    def __init__(self, source: Path, place: Path) -> None:
        self._source = source.resolve()
        (place / _MARK).touch()
        self._versions: dict[Path, tuple[int, int]] = {}
        self._copies: dict[Path, Path] = {}

    def of(self, run: Path) -> Path:
        """The working directory of the run that has the directory `run`; made when it is first asked for.

        The directories above it have the same names, and links to what is beside it: ``../data`` is found. Raises
        DrillError: it has too much to be copied, or cannot be.
        """
        if run not in self._copies:
            copy = run / "work" / self._source.relative_to("/")
            try:
                self._copy(self._source, copy)
                self._link_what_is_beside(copy)
            except DrillError:
                shutil.rmtree(run / "work")
                raise
            except OSError as error:
                shutil.rmtree(run / "work", ignore_errors=True)
                raise DrillError(
                    f"expected a working directory that can be copied, found {error}; start the drill in another one, "
                    "or with --in-place, where the script writes over its own results"
                ) from error
            self._copies[run] = copy
        return self._copies[run]

    def changed(self, own: Collection[Path] = ()) -> list[Path]:
        """Files of the working directory, but for the drill's `own`, that have changed since.

        Large ones are linked, and a script's paths may be absolute.
        """
        return [path for path, before in self._versions.items() if path not in own and _version(path) != before]

    def _copy(self, source: Path, copy: Path) -> None:
        files = nbytes = 0
        copy.mkdir(parents=True)
        for entry in self._entries(source):
            target, path = copy / Path(entry.path).relative_to(source), Path(entry.path)
            if entry.is_symlink():
                self._copy_link(path, target)
            elif entry.is_dir():
                if _is_linked(path):
                    target.symlink_to(path)
                else:
                    target.mkdir()
            elif entry.is_file():
                size = entry.stat().st_size
                files, nbytes = files + 1, nbytes + (size if size <= _LINKED_BYTES else 0)
                if files > _MOST_FILES or nbytes > _MOST_BYTES:
                    raise DrillError(
                        f"expected a working directory of at most {_MOST_FILES:,} files and {nbytes_text(_MOST_BYTES)} "
                        f"in files of up to {nbytes_text(_LINKED_BYTES)}, as each run gets a copy; found more in "
                        f"{source}. Start the drill in a directory with the script alone, or with --in-place, where "
                        "the script writes over its own results"
                    )
                self._versions.setdefault(path, _version(path))
                if size > _LINKED_BYTES or not os.access(path, os.R_OK):
                    target.symlink_to(path)
                else:
                    shutil.copy2(path, target)

    def _entries(self, directory: Path) -> Iterator[os.DirEntry[str]]:
        """All below a directory, each directory before what is in it; what is linked is not entered."""
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda each: each.name)
        for entry in entries:
            if os.path.exists(os.path.join(entry.path, _MARK)):
                continue
            yield entry
            if entry.is_dir(follow_symlinks=False) and not _is_linked(Path(entry.path)):
                yield from self._entries(Path(entry.path))

    def _copy_link(self, link: Path, target: Path) -> None:
        """A link to something that is copied leads to the copy, another one where it has always led."""
        leads_to = link.parent / os.readlink(link)
        with contextlib.suppress(ValueError):
            inside = Path(os.path.normpath(leads_to)).relative_to(self._source)
            above = len(link.parent.relative_to(self._source).parts)
            target.symlink_to(Path(*[".."] * above) / inside)
            return
        target.symlink_to(leads_to)

    def _link_what_is_beside(self, copy: Path) -> None:
        source = self._source
        while source != source.parent:
            with contextlib.suppress(PermissionError):  # then the script cannot list it either
                beside = sorted(os.listdir(source.parent))
                for name in beside if len(beside) <= _MOST_BESIDE else ():
                    if name != source.name:
                        (copy.parent / name).symlink_to(source.parent / name)
            source, copy = source.parent, copy.parent


def _is_linked(directory: Path) -> bool:
    return directory.name in _LINKED_NAMES or (directory / "pyvenv.cfg").exists()


def _version(path: Path) -> tuple[int, int]:
    """Differs once a file has been written to; -1: it is gone."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return -1, -1
    return found.st_size, found.st_mtime_ns
