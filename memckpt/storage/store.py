"""Durable files: the interface of a directory or an object store.

A file either exists, complete and durable, or does not exist. Several files are committed together by a commit file,
which is written last.
"""

from __future__ import annotations

import contextlib
import errno
import io
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple, TypeVar

import msgspec
import xxhash

from memckpt.errors import MALFORMED, DamagedStateError, MemckptError, StorageAwayError, StorageError, StorageFullError

T = TypeVar("T")
_PIECE_BYTES = 8 << 20
#: Errors of a full disk or an exhausted quota.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Part of the name of a file that is being written.
_PARTIAL = ".partial-"


class StoredFile(msgspec.Struct, frozen=True):
    """A file's path in the store, its size in bytes and its checksum."""

    path: str
    nbytes: int
    xxh3: str


class HashingStream(io.RawIOBase):
    """Writes to a file, counting and hashing the bytes. Closing it does not close the file.

    `failed`: the first error of a write, which the caller may have replaced by another one; None: none.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self._nbytes = 0
        self.failed: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        # In pieces: an upload copies each buffer that it is given.
        for start in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._hash.update(piece)
            try:
                self._file.write(piece)
            except Exception as error:
                self.failed = self.failed or error
                raise
        self._nbytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._nbytes

    def close(self) -> None:
        return

    def stored(self, path: str) -> StoredFile:
        """The description of the file written at `path`."""
        return StoredFile(path, self._nbytes, self._hash.hexdigest())


class Store(ABC):
    """A directory or a bucket's prefix. Paths are relative, with forward slashes.

    Every method raises StorageError, with the path, when the storage fails.
    """

    url: str

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[HashingStream]:
        """Write a file. It exists, durably, when the block ends, and does not if the block raised."""
        with _errors("write", self, path), self._replacing(path) as file:
            stream = HashingStream(file)
            try:
                yield stream
            except Exception as error:
                # On a full disk torch's zip writer reports only an unexpected position.
                if stream.failed is not None and error is not stream.failed:
                    raise stream.failed from error
                raise
            if stream.failed is not None:
                raise stream.failed

    def write(self, path: str, data: bytes) -> StoredFile:
        """Write a small file."""
        with self.create(path) as stream:
            stream.write(data)
        return stream.stored(path)

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a small file unless it exists; False: it exists. In a directory one of concurrent calls wins."""
        with _errors("write", self, path):
            return self._write_new(path, data)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file for reading; it is seekable."""
        with _errors("read", self, path), self._open(path) as file:
            yield file

    def read(self, path: str) -> bytes:
        """Read a small file."""
        with self.open(path) as file:
            return file.read()

    def find(self, prefix: str, unfinished: bool = False, unlisted: dict[str, str] | None = None) -> list[str]:
        """Paths of all files below a directory, in order; with `unfinished`, also of those that are being written.

        `unlisted` receives directories below `prefix` that cannot be listed, with the reason; None: an error.
        """

        def refuse(path: str, error: Exception) -> None:
            if unlisted is None or path == prefix:
                raise error
            unlisted[path] = f"could not list {path} in {self.url}: {type(error).__name__}: {error}"

        with _errors("list", self, prefix):
            return sorted(path for path in self._find(prefix, refuse) if unfinished or _PARTIAL not in path)

    def delete(self, path: str) -> None:
        """Delete a file durably; a missing file is no error."""
        with _errors("delete", self, path):
            self._delete(path)

    def move(self, path: str, to: str) -> None:
        """Move a file to an unused path; a missing file is no error."""
        with _errors("move", self, path), contextlib.suppress(FileNotFoundError):
            self._move(path, to)

    def drop_cached(self, path: str) -> None:
        """Drop a file from the page cache."""
        return

    def free(self) -> int | None:
        """Free bytes; None: unknown."""
        with _errors("look for room at", self, "."):
            return self._free()

    def delete_directory(self, path: str) -> None:
        """Delete all files below a directory, including unfinished ones."""
        for file in self.find(path, unfinished=True):
            self.delete(file)

    @abstractmethod
    def _replacing(self, path: str) -> contextlib.AbstractContextManager[IO[bytes]]: ...

    @abstractmethod
    def _write_new(self, path: str, data: bytes) -> bool: ...

    @abstractmethod
    def _open(self, path: str) -> contextlib.AbstractContextManager[IO[bytes]]: ...

    @abstractmethod
    def _find(self, prefix: str, refused: Callable[[str, Exception], None]) -> Iterator[str]:
        """Yield paths. `refused` is called for each directory that cannot be listed, and may raise."""

    @abstractmethod
    def _move(self, path: str, to: str) -> None: ...

    @abstractmethod
    def _delete(self, path: str) -> None: ...

    def _free(self) -> int | None:
        return None


def is_missing(error: StorageError) -> bool:
    """Whether the error is that of a missing file."""
    return isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError))


def read_json(store: Store, path: str, missing: T, kind: type[T], expected: str, remedy: str) -> T:
    """The content of a small JSON file; `missing` where there is none.

    Raises StorageError if it cannot be read, DamagedStateError if it has other content.
    """
    try:
        return msgspec.json.decode(store.read(path), type=kind)
    except StorageError as error:
        if is_missing(error):
            return missing
        raise
    except MALFORMED as error:
        raise DamagedStateError(
            f"{path} in {store.url}: expected {expected}, found something else ({error}). {remedy}"
        ) from error


def finished_name(path: str) -> str:
    """The final path of a file that may be unfinished."""
    return path.partition(_PARTIAL)[0]


def partial_name(path: str) -> str:
    """A new path for a file while it is written."""
    return f"{path}{_PARTIAL}{secrets.token_hex(4)}"


def is_of_storage(error: Exception) -> bool:
    """Whether an error comes from storage, and not from its caller.

    The libraries below fsspec raise their own errors (missing credentials, unknown host) that are no OSError: any
    class outside the standard library counts as one of these.
    """
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, (OSError, RuntimeError)) or package not in sys.stdlib_module_names


@contextlib.contextmanager
def _errors(action: str, store: Store, path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, MemckptError) or not is_of_storage(error):
            raise
        text = f"could not {action} {path} in {store.url}: {type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in _FULL:
            free = store.free()
            found = "" if free is None else f" ({free} bytes are free now)"
            raise StorageFullError(text + found, free=free) from error
        raise StorageError(text) from error


def store_is_away(url: str, witness: str) -> StorageAwayError:
    """The error of a store whose witness file is missing."""
    return StorageAwayError(
        f"{url} is not there any more: it has no {witness}. It was moved, or its disk is not mounted. Nothing is "
        "written in its place; bring it back, and it is used again"
    )


def matches(store: Store, file: StoredFile, progress: Callable[[int], None] | None = None) -> str | None:
    """Read a file and compare its size and checksum. Returns the difference; None: there is none.

    `progress` is called with the bytes read since its last call. Raises StorageError if the file exists and cannot be
    read: its content may be good.
    """
    digest, nbytes = xxhash.xxh3_64(), 0
    try:
        with store.open(file.path) as stream:
            while chunk := stream.read(_PIECE_BYTES):
                digest.update(chunk)
                nbytes += len(chunk)
                if progress is not None:
                    progress(len(chunk))
    except StorageError as error:
        if is_missing(error):
            return f"{file.path}: the file is missing"
        raise
    if nbytes != file.nbytes:
        return f"{file.path}: expected {file.nbytes} bytes, found {nbytes}"
    if digest.hexdigest() != file.xxh3:
        return f"{file.path}: expected checksum {file.xxh3}, found {digest.hexdigest()}"
    return None


class Examined(NamedTuple):
    """Problems of examined files: those proved damaged, and those that could not be read and may be good."""

    damaged: list[str]
    unreadable: list[str]


def examine(store: Store, files: Iterable[StoredFile], progress: Callable[[int], None] | None = None) -> Examined:
    """Read files and compare sizes and checksums, with `progress` as for :func:`matches`."""
    found = Examined([], [])
    for file in files:
        try:
            problem = matches(store, file, progress)
        except StorageError as error:
            found.unreadable.append(str(error))
            continue
        if problem is not None:
            found.damaged.append(problem)
    return found


def verify_files(store: Store, files: Iterable[StoredFile], progress: Callable[[int], None] | None = None) -> list[str]:
    """Read files and compare sizes and checksums. Returns the problems; raises StorageError if one cannot be read."""
    found = examine(store, files, progress)
    if found.unreadable:
        raise StorageError("; ".join(found.unreadable))
    return found.damaged


def read_back(store: Store, files: Sequence[StoredFile]) -> None:
    """Verify files that have just been written, and drop them from the page cache. Raises StorageError."""
    problems = verify_files(store, files)
    if problems:
        raise StorageError(f"files just written cannot be read back: {'; '.join(problems)}")
    for file in files:
        store.drop_cached(file.path)
