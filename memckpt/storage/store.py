"""Durable files: the one module that writes to a disk or an object store.

A file either exists, complete and durable, or does not exist. On a local file system that takes a temporary name, a
write, an fsync, a rename, and an fsync of the directory; an object store shows an object only when its upload is
complete. Several files are committed together by a commit file, which is written last.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast
from urllib.parse import urlsplit

import msgspec
import xxhash

from memckpt.errors import ConfigurationError, MemckptError, StorageAwayError, StorageError, StorageFullError
from memckpt.storage.drain import Draining, let_go

_log = logging.getLogger("memckpt.storage")
_PIECE_BYTES = 8 << 20
#: Errors of file systems that do not support syncing directories.
_REFUSED_SYNCS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
#: Errors of a full disk or an exhausted quota.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Errors of file systems without hard links.
_REFUSED_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
#: Part of the name of a file that is being written.
_PARTIAL = ".partial-"
#: Time limits for object stores, in seconds: the libraries' defaults wait minutes for a server that does not answer.
_TIME_LIMITS: dict[str, dict[str, Any]] = {
    scheme: {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"total_max_attempts": 3}}}
    for scheme in ("s3", "s3a")
}
#: Schemes whose uploads appear under their name only when complete. Elsewhere a finished file is renamed.
_SHOW_WHOLE_UPLOADS = {"abfs", "abfss", "az", "gcs", "gs", "oss", "s3", "s3a"}


class StoredFile(msgspec.Struct, frozen=True):
    """A file's path in the store, its size in bytes and its checksum."""

    path: str
    nbytes: int
    xxh3: str


class HashingStream(io.RawIOBase):
    """Writes to a file, counting and hashing the bytes. Closing it does not close the file.

    Attributes:
        failed: the first error of a write; None: none. The caller may have replaced it by an error of its own.
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
        """Paths of all files below a directory, in order.

        Args:
            prefix: the directory.
            unfinished: whether files that are being written are included.
            unlisted: receives directories below `prefix` that cannot be listed, with the reason; None: an error.
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

    def let_go(self, path: str) -> None:
        """Drop a file from the page cache."""
        return

    def free(self) -> int | None:
        """Free bytes; None: unknown."""
        return None

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


def is_missing(error: StorageError) -> bool:
    """Whether the error is that of a missing file."""
    return isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError))


def finished_name(path: str) -> str:
    """The final path of a file that may be unfinished."""
    return path.partition(_PARTIAL)[0]


def _partial_name(path: str) -> str:
    return f"{path}{_PARTIAL}{secrets.token_hex(4)}"


def _is_of_storage(error: Exception) -> bool:
    """Whether an error comes from storage, and not from its caller.

    The libraries below fsspec raise errors of their own (missing credentials, unknown host) that are no OSError: any
    class outside the standard library counts as one of these.
    """
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, (OSError, RuntimeError)) or package not in sys.stdlib_module_names


@contextlib.contextmanager
def _errors(action: str, store: Store, path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, MemckptError) or not _is_of_storage(error):
            raise
        text = f"could not {action} {path} in {store.url}: {type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in _FULL:
            free = store.free()
            found = "" if free is None else f" ({free} bytes are free now)"
            raise StorageFullError(text + found, free=free) from error
        raise StorageError(text) from error


class LocalStore(Store):
    """A directory of a local or mounted file system.

    Args:
        root: the directory.
        witness: name of a file that must exist before anything is written, so that nothing goes to an empty mount
            point. Empty: a missing directory is created.
    """

    def __init__(self, root: Path, witness: str = "") -> None:
        self.root = root
        self.url = str(root)
        self._witness = witness

    @property
    def _is_away(self) -> bool:
        return bool(self._witness) and not (self.root / self._witness).exists()

    @contextlib.contextmanager
    def _replacing(self, path: str) -> Iterator[IO[bytes]]:
        target = self.root / path
        partial = target.with_name(_partial_name(target.name))
        try:
            with self._begin(partial) as file:
                draining = Draining(file)
                yield cast("IO[bytes]", draining)
                draining.finish()
            partial.replace(target)
        except BaseException:  # raised again after the unfinished file is deleted, also for an interrupt
            partial.unlink(missing_ok=True)
            raise
        sync_directory(target.parent)

    def _write_new(self, path: str, data: bytes) -> bool:
        target = self.root / path
        partial = target.with_name(_partial_name(target.name))
        try:
            with self._begin(partial) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            target.hardlink_to(partial)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _REFUSED_LINKS:
                raise
            if target.exists():
                return False
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        sync_directory(target.parent)
        return True

    def _begin(self, partial: Path) -> IO[bytes]:
        """Open a new file. A directory that another process removed as empty meanwhile is created once more."""
        if self._is_away:
            raise store_is_away(self.url, self._witness)
        try:
            self._make_directory(partial.parent)
            return partial.open("wb")
        except FileNotFoundError:
            self._make_directory(partial.parent)
            return partial.open("wb")

    def let_go(self, path: str) -> None:
        with self.open(path) as file:
            let_go(file.fileno())

    def free(self) -> int | None:
        if self._is_away:
            return None
        with _errors("look for room at", self, "."):
            found = os.statvfs(next(one for one in (self.root, *self.root.parents) if one.exists()))
        if not found.f_blocks:
            return None  # a file system without block counts
        # Root may use the reserved blocks. Too high a value is harmless: the write itself fails.
        return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)

    def _make_directory(self, directory: Path) -> None:
        missing = [one for one in (directory, *directory.parents) if not one.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for one in reversed(missing):
            sync_directory(one.parent)

    def _open(self, path: str) -> IO[bytes]:
        return (self.root / path).open("rb")

    def _find(self, prefix: str, refused: Callable[[str, Exception], None]) -> Iterator[str]:
        def refuse(error: OSError) -> None:
            # A missing directory is empty; an unreadable one may hold anything.
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                refused(PurePosixPath(Path(error.filename).relative_to(self.root)).as_posix(), error)

        for directory, _, names in os.walk(self.root / prefix, onerror=refuse):
            for name in names:
                yield PurePosixPath(Path(directory, name).relative_to(self.root)).as_posix()

    def _move(self, path: str, to: str) -> None:
        source, target = self.root / path, self.root / to
        self._make_directory(target.parent)
        source.replace(target)
        sync_directory(target.parent)
        sync_directory(source.parent)
        self._remove_empty(source.parent)

    def _delete(self, path: str) -> None:
        target = self.root / path
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
            sync_directory(target.parent)
        self._remove_empty(target.parent)

    def _remove_empty(self, directory: Path) -> None:
        """Remove empty directories: they would slow down every listing."""
        while directory != self.root:
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass  # removed by another node
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.ENOTDIR):
                    raise
                return  # in use, mounted, or a symbolic link
            directory = directory.parent


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, where the file system supports syncing directories."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError as error:  # a directory may be writable and not readable
        _say_unsynced(os.stat(directory).st_dev, str(directory), str(error))
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _REFUSED_SYNCS:
            raise
        _say_unsynced(os.fstat(fd).st_dev, str(directory), str(error))
    finally:
        os.close(fd)


#: Devices of file systems that a warning has named.
_unsynced: set[int] = set()


def _say_unsynced(device: int, directory: str, reason: str) -> None:
    """Warn once for each file system, not for every file."""
    if device not in _unsynced:
        _unsynced.add(device)
        _log.warning(
            "the directory %s cannot be synced (%s): files are synced, but the newest ones may be lost in a power cut",
            directory,
            reason,
        )


class ObjectStore(Store):
    """A prefix in an object store of fsspec: ``s3://bucket/prefix``, ``gs://``, ``memory://``."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        scheme = urlsplit(self.url).scheme
        self._shows_whole = scheme in _SHOW_WHOLE_UPLOADS
        limits = {} if "config_kwargs" in fsspec.config.conf.get(scheme, {}) else _TIME_LIMITS.get(scheme, {})
        try:
            self._fs: Any
            # Other processes write here, too: listings must not be cached.
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **limits)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(
                f"storage.url: expected a directory or a URL that fsspec can open, found {url!r} ({error}); "
                "s3:// needs the package s3fs, gs:// gcsfs"
            ) from error

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)

    @contextlib.contextmanager
    def _replacing(self, path: str) -> Iterator[IO[bytes]]:
        target = self._at(path)
        written = target if self._shows_whole else self._at(_partial_name(path))
        file = self._fs.open(written, "wb")
        try:
            yield file
            file.close()
            if written != target:
                self._fs.mv(written, target)
        except BaseException:  # raised again after the upload is discarded, also for an interrupt
            self._give_up(file, written, target)
            raise

    def _write_new(self, path: str, data: bytes) -> bool:
        if self._fs.exists(self._at(path)):
            return False
        self.write(path, data)
        return True

    def _give_up(self, file: Any, written: str, target: str) -> None:
        """Discard an unfinished upload."""
        try:
            if written != target:
                file.close()
                self._fs.rm_file(written)
                return
            file.discard()
        except Exception as error:
            if not _is_of_storage(error):
                raise
            _log.warning("an unfinished upload of %s may be left in the store: %s", target, error)
        # Closing completes the upload, and garbage collection closes a file that is not marked as closed.
        file.closed = True

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[IO[bytes]]:
        file = self._fs.open(self._at(path), "rb")
        try:
            yield file
        finally:
            file.close()

    def _find(self, prefix: str, refused: Callable[[str, Exception], None]) -> Iterator[str]:
        # One flat listing of a bucket. Elsewhere fsspec's own walk would treat an unreadable directory as empty.
        paths = self._fs.find(self._at(prefix)) if self._shows_whole else self._walk(self._at(prefix), refused)
        for found in paths:
            yield found.removeprefix(f"{self._root}/")

    def _walk(self, directory: str, refused: Callable[[str, Exception], None]) -> Iterator[str]:
        try:
            entries = self._fs.ls(directory, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return  # missing, or deleted by retention
        except Exception as error:
            if not _is_of_storage(error):
                raise
            refused(directory.removeprefix(f"{self._root}/"), error)
            return
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                yield name
            elif name != directory:  # some file systems list the directory itself
                yield from self._walk(name, refused)

    def _move(self, path: str, to: str) -> None:
        if not self._shows_whole:  # a bucket has no directories
            self._fs.makedirs(self._at(to).rpartition("/")[0], exist_ok=True)
        self._fs.mv(self._at(path), self._at(to))

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))


def store_is_away(url: str, witness: str) -> StorageAwayError:
    """The error of a store whose witness file is missing."""
    return StorageAwayError(
        f"{url} is not there any more: it has no {witness}. It was moved, or its disk is not mounted. Nothing is "
        "written in its place; bring it back, and it is used again"
    )


def open_store(url: str, witness: str = "") -> Store:
    """The store for a directory's path or a URL; `witness` as for a LocalStore, ignored by others.

    Raises:
        ConfigurationError: no installed package can open it, or the URL is incomplete.
    """
    split = urlsplit(url)
    if split.scheme in ("", "file"):
        return LocalStore(Path(split.path if split.scheme else url).resolve(), witness)
    # fsspec opens an incomplete URL as a local path.
    if "://" not in url:
        raise ConfigurationError(
            f"storage.url: expected a directory or a URL such as s3://bucket/prefix, found {url!r}; if it is a "
            f"directory: ./{url}"
        )
    if split.scheme in _SHOW_WHOLE_UPLOADS and not split.netloc:
        raise ConfigurationError(
            f"storage.url: expected a bucket after {split.scheme}:// ({split.scheme}://bucket/prefix), found {url!r}"
        )
    return ObjectStore(url)


def matches(store: Store, file: StoredFile, progress: Callable[[int], None] | None = None) -> str | None:
    """Read a file and compare its size and checksum. Returns the difference; None: there is none.

    `progress` is called with the bytes read since its last call.

    Raises:
        StorageError: the file exists and cannot be read; its content may be good.
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
