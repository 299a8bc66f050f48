"""Tensors in a store in the format of torch.distributed.checkpoint, which stock tools read.

DCP's own ``.metadata`` is a pickle. Here it is read through an allow-list: a file that names anything else is refused
before anything of it runs. Tensors are read with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from memckpt.errors import DamagedStateError, MemckptError
from memckpt.storage.store import Store, StoredFile

_METADATA = ".metadata"
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "collections": {"OrderedDict"},
}


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise DamagedStateError(f"expected the metadata of a checkpoint, found {module}.{name} in it")
        return super().find_class(module, name)


def read_metadata(data: bytes) -> Metadata:
    """Decode a ``.metadata`` file. Raises DamagedStateError for anything that does not belong there."""
    try:
        metadata = _Metadata(io.BytesIO(data)).load()
    except DamagedStateError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedStateError(f"the metadata cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise DamagedStateError(f"expected the metadata of a checkpoint, found a {type(metadata).__name__}")
    return metadata


class _StoreFiles(FileSystemBase):
    """A store as DCP's writer and reader see it; notes what is written."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._renamed_later: dict[str, bytes] = {}
        self.written: list[StoredFile] = []

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        name = os.fspath(path)
        if mode == "rb":
            with self._store.open(name) as file:
                yield file
        elif name.endswith(".tmp"):  # the metadata, which DCP renames; a store's files need no such care
            buffer = io.BytesIO()
            yield buffer
            self._renamed_later[name] = buffer.getvalue()
        else:
            with self._store.create(name) as stream:
                yield stream
            self.written.append(stream.stored(name))

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.written.append(self._store.write(os.fspath(new_path), self._renamed_later.pop(os.fspath(path))))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        return

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # every checkpoint has a directory of its own

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._store.delete(os.fspath(path))


class _Writer(FileSystemWriter):
    def __init__(self, store: Store, directory: str) -> None:
        super().__init__(directory, sync_files=False)
        self.fs: Any = _StoreFiles(store)
        self.path: Any = directory


class _Reader(FileSystemReader):
    def __init__(self, store: Store, directory: str) -> None:
        super().__init__(directory)
        self.fs: Any = _StoreFiles(store)
        self.path: Any = directory

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(f"{self.path}/{_METADATA}", "rb") as file:
            metadata = read_metadata(file.read())
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


@contextlib.contextmanager
def _alone(what: str) -> Iterator[None]:
    """Use DCP in one process; what fails is raised as what it is."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, (MemckptError, MemoryError)):
                raise cause from None
        raise DamagedStateError(f"{what}: {'; '.join(f'{type(one).__name__}: {one}' for one in causes)}") from error


@contextlib.contextmanager
def _crc32(wanted: bool) -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(wanted)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def save(
    store: Store, directory: str, tensors: dict[str, torch.Tensor], *, crc32: bool = True
) -> tuple[StoredFile, ...]:
    """Write host tensors; returns the files that make up the checkpoint. Raises StorageError.

    Args:
        crc32: put torch's own checksums into the files, which it never checks and which cost more than all the rest
            of the work. Not needed where a commit file with better ones goes along.
    """
    writer = _Writer(store, directory)
    with _alone(f"{directory} cannot be written"), _crc32(crc32):
        dcp_save(dict(tensors), storage_writer=writer, no_dist=True)
    return tuple(writer.fs.written)


def load_into(store: Store, directory: str, tensors: dict[str, torch.Tensor]) -> None:
    """Read tensors by name into those given, in place.

    Raises:
        DamagedStateError: the files do not hold them.
        StorageError: they cannot be read.
    """
    with _alone(f"{directory} cannot be read"):
        dcp_load(dict(tensors), storage_reader=_Reader(store, directory), no_dist=True)


def names(store: Store, directory: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of the tensors of a checkpoint."""
    metadata = _Reader(store, directory).read_metadata()
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
