"""Durable files: the one place where bytes go to a disk or an object store.

A file is either there, whole and safe from a power cut, or not there at all. On a local file system that takes a
temporary name, a write, an fsync, a rename, and an fsync of the directory; an object store shows an object only when
its upload is complete. What belongs together is made so by a commit file, which is written last.
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
#: With these a file system says that it does not sync directories; any other error is one.
_REFUSED_SYNCS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
#: With these it says that it has no room: on the disk, or left to this user.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: With these it says that it has no hard links.
_REFUSED_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
#: What a file is called while it is written; such files are leftovers once nobody writes.
_PARTIAL = ".partial-"
#: Else a server that says nothing is waited for by each library in its own way, for minutes.
_TIME_LIMITS: dict[str, dict[str, Any]] = {
    scheme: {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"total_max_attempts": 3}}}
    for scheme in ("s3", "s3a")
}
#: Where an upload shows under its name when it is complete, and not before. Elsewhere a finished file is renamed.
_SHOW_WHOLE_UPLOADS = {"abfs", "abfss", "az", "gcs", "gs", "oss", "s3", "s3a"}


class StoredFile(msgspec.Struct, frozen=True):
    """A file by its path in the store, with what must be found there."""

    path: str
    nbytes: int
    xxh3: str


class HashingStream(io.RawIOBase):
    """Passes bytes on to a file, counts and hashes them. Closing it does nothing: whoever opened the file ends it.

    Attributes:
        failed: the first error of a write; None: there was none. Whoever writes may hide it behind one of its own.
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
        # In pieces: an upload keeps a copy of what it is given.
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
        """What has been written, as it must be found under `path`."""
        return StoredFile(path, self._nbytes, self._hash.hexdigest())


class Store(ABC):
    """A directory or a bucket's prefix. Paths are relative, with forward slashes.

    Every method raises StorageError, with the path, for what the storage cannot do.
    """

    url: str

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[HashingStream]:
        """Write a file: it is there, durably, when the block has ended, and not at all if it raised."""
        with _errors("write", self, path), self._replacing(path) as file:
            stream = HashingStream(file)
            try:
                yield stream
            except Exception as error:
                # torch's writer of zip files says of a full disk only that it is not where it expected to be.
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
        """Write a small file unless there is one; False if there is. Of several at once a directory lets one win."""
        with _errors("write", self, path):
            return self._write_new(path, data)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        """Read a file; seekable."""
        with _errors("read", self, path), self._open(path) as file:
            yield file

    def read(self, path: str) -> bytes:
        """All of a small file."""
        with self.open(path) as file:
            return file.read()

    def find(self, prefix: str, unfinished: bool = False, unlisted: dict[str, str] | None = None) -> list[str]:
        """Paths of all files below a directory, in order; those that are being written only with `unfinished`.

        Args:
            prefix: the directory.
            unfinished: see above.
            unlisted: takes the paths of directories below it that cannot be listed, and why; None: that is an error.
        """

        def refuse(path: str, error: Exception) -> None:
            if unlisted is None or path == prefix:
                raise error
            unlisted[path] = f"could not list {path} in {self.url}: {type(error).__name__}: {error}"

        with _errors("list", self, prefix):
            return sorted(path for path in self._find(prefix, refuse) if unfinished or _PARTIAL not in path)

    def delete(self, path: str) -> None:
        """Delete a file durably; one that is not there is no error."""
        with _errors("delete", self, path):
            self._delete(path)

    def move(self, path: str, to: str) -> None:
        """Give a file another path, at which there is none; one that is not there is no error."""
        with _errors("move", self, path), contextlib.suppress(FileNotFoundError):
            self._move(path, to)

    def let_go(self, path: str) -> None:
        """Keep nothing in memory of a file that was read: others need the room."""
        return

    def free(self) -> int | None:
        """Bytes that can be written before it is full; None: nobody says."""
        return None

    def delete_directory(self, path: str) -> None:
        """Delete all files below a directory, unfinished ones too."""
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
        """`refused` is told of directories that cannot be listed, and may raise."""

    @abstractmethod
    def _move(self, path: str, to: str) -> None: ...

    @abstractmethod
    def _delete(self, path: str) -> None: ...


def is_missing(error: StorageError) -> bool:
    """Whether a file could not be read because it is not there."""
    return isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError))


def finished_name(path: str) -> str:
    """The path that a file gets once it is whole."""
    return path.partition(_PARTIAL)[0]


def _partial_name(path: str) -> str:
    return f"{path}{_PARTIAL}{secrets.token_hex(4)}"


def _is_of_storage(error: Exception) -> bool:
    """Whether an error comes from storage, and not from whoever uses it.

    Below fsspec each kind of store has libraries of its own, with errors of their own (missing credentials, a host
    that is not found) that are no OSError: any class that is neither ours nor Python's is taken for one of these.
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
        witness: a file that is in it while the store is there; without it nothing is written, as that would go to
            where the disk is to be mounted. Empty: the directory is made if it is not there.
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
        except BaseException:  # raised again: what is half-written goes, an interrupt included
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
        """Open a new file; a directory that another process finds empty and removes meanwhile is made once more."""
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
            return None  # a file system that does not count
        # Root may fill what is set aside for it. Too much is no harm here: a write says what is so.
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
            # What is not there holds nothing. What cannot be looked into might hold everything.
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
        """Otherwise every checkpoint would leave directories, and listing would take longer and longer."""
        while directory != self.root:
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass  # another node was faster
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.ENOTDIR):
                    raise
                return  # in use, mounted, or a link to another place
            directory = directory.parent


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable, where the file system lets directories be synced at all."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError as error:  # it may be written to, and not be listed
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


#: File systems that a warning has named.
_unsynced: set[int] = set()


def _say_unsynced(device: int, directory: str, reason: str) -> None:
    """Say it once for each file system: every file written would say it."""
    if device not in _unsynced:
        _unsynced.add(device)
        _log.warning(
            "the directory %s cannot be synced (%s): files are, but after a power cut the newest ones may be missing",
            directory,
            reason,
        )


class ObjectStore(Store):
    """Anything that fsspec reaches: ``s3://bucket/prefix``, ``gs://``, ``memory://``."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        scheme = urlsplit(self.url).scheme
        self._shows_whole = scheme in _SHOW_WHOLE_UPLOADS
        limits = {} if "config_kwargs" in fsspec.config.conf.get(scheme, {}) else _TIME_LIMITS.get(scheme, {})
        try:
            self._fs: Any
            # What another process has written must be seen: nothing that was listed is remembered.
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
        except BaseException:  # raised again: what is half-written goes, an interrupt included
            self._give_up(file, written, target)
            raise

    def _write_new(self, path: str, data: bytes) -> bool:
        if self._fs.exists(self._at(path)):
            return False
        self.write(path, data)
        return True

    def _give_up(self, file: Any, written: str, target: str) -> None:
        """Let nothing appear of what has been written so far."""
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
        # Closing a file completes its upload, and it is closed when it is collected, if it still can be.
        file.closed = True

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[IO[bytes]]:
        file = self._fs.open(self._at(path), "rb")
        try:
            yield file
        finally:
            file.close()

    def _find(self, prefix: str, refused: Callable[[str, Exception], None]) -> Iterator[str]:
        # One flat listing of a bucket. Elsewhere fsspec's own walk takes a directory that cannot be listed for empty.
        paths = self._fs.find(self._at(prefix)) if self._shows_whole else self._walk(self._at(prefix), refused)
        for found in paths:
            yield found.removeprefix(f"{self._root}/")

    def _walk(self, directory: str, refused: Callable[[str, Exception], None]) -> Iterator[str]:
        try:
            entries = self._fs.ls(directory, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return  # it is not there, or retention was faster
        except Exception as error:
            if not _is_of_storage(error):
                raise
            refused(directory.removeprefix(f"{self._root}/"), error)
            return
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                yield name
            elif name != directory:  # some list the directory with what is in it
                yield from self._walk(name, refused)

    def _move(self, path: str, to: str) -> None:
        if not self._shows_whole:  # a bucket has no directories
            self._fs.makedirs(self._at(to).rpartition("/")[0], exist_ok=True)
        self._fs.mv(self._at(path), self._at(to))

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))


def store_is_away(url: str, witness: str) -> StorageAwayError:
    """The error that says so."""
    return StorageAwayError(
        f"{url} is not there any more: it has no {witness}. It was moved, or its disk is not mounted. Nothing is made "
        "in its place; bring it back, and it is used again"
    )


def open_store(url: str, witness: str = "") -> Store:
    """The store for a directory's path or a URL; `witness`: as for a LocalStore, of no account for others.

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
    """Read a file and compare it with what must be there; what differs, in words, or None.

    `progress` is told of bytes as they are read.

    Raises:
        StorageError: it is there and cannot be read, which says nothing of what is in it.
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
            return f"{file.path}: it is not there"
        raise
    if nbytes != file.nbytes:
        return f"{file.path}: expected {file.nbytes} bytes, found {nbytes}"
    if digest.hexdigest() != file.xxh3:
        return f"{file.path}: expected checksum {file.xxh3}, found {digest.hexdigest()}"
    return None
