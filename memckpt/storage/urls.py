"""The store that a directory's path or a URL names: a directory, or files of fsspec."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from memckpt.errors import ConfigurationError
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Store, is_of_storage, partial_name


def open_store(url: str, witness: str = "") -> Store:
    """The store for a directory's path or a URL; `witness` as for a LocalStore, ignored by others.

    Raises ConfigurationError if no installed package can open it, or the URL is incomplete.
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
    return ObjectStore(url)


_log = logging.getLogger("memckpt.storage")
#: Time limits for object stores, in seconds: the libraries' defaults wait minutes for a server that does not answer.
_TIME_LIMITS: dict[str, dict[str, Any]] = {
    scheme: {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"total_max_attempts": 3}}}
    for scheme in ("s3", "s3a")
}
#: Schemes whose uploads appear under their name only when complete. Elsewhere a finished file is renamed.
_SHOW_WHOLE_UPLOADS = {"abfs", "abfss", "az", "gcs", "gs", "oss", "s3", "s3a"}


class ObjectStore(Store):
    """A prefix in an object store of fsspec: ``s3://bucket/prefix``, ``gs://``, ``memory://``."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        scheme, bucket = urlsplit(url)[:2]
        self._shows_whole = scheme in _SHOW_WHOLE_UPLOADS
        if self._shows_whole and not bucket:
            raise ConfigurationError(
                f"storage.url: expected a bucket after {scheme}:// ({scheme}://bucket/prefix), found {url!r}"
            )
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
        written = target if self._shows_whole else self._at(partial_name(path))
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
            if not is_of_storage(error):
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
            if not is_of_storage(error):
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
