"""The store that a directory's path or a URL names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from memckpt.errors import ConfigurationError
from memckpt.storage.local_store import LocalStore
from memckpt.storage.object_store import ObjectStore
from memckpt.storage.store import Store


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
    return ObjectStore(url)
