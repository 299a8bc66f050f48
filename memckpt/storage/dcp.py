"""Tensors in a store in the format of torch.distributed.checkpoint, which stock tools read.

A rank may hold a shard of a tensor. It is written and read at its offset in the whole, as DCP does for a DTensor, but
by one process without communication. Tensors are read with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from memckpt.errors import DamagedStateError, MemckptError
from memckpt.state.spec import Shard
from memckpt.state.tensors import fill
from memckpt.storage.format import MERGED, is_inside
from memckpt.storage.store import Store, StoredFile


class _StoreFiles(FileSystemBase):
    """A store as a file system for DCP's writer and reader; lists the files written."""

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
        elif name.endswith(".tmp"):  # the metadata, which DCP renames; a store's writes are atomic already
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
    """Reads one directory, or several directories below it as one checkpoint."""

    def __init__(self, store: Store, directory: str, below: Sequence[str] | None) -> None:
        super().__init__(directory)
        self._store = store
        self._below = below
        self.fs: Any = _StoreFiles(store)
        self.path: Any = directory

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._below is None:
            metadata = read_metadata(self._store.read(f"{self.path}/{MERGED}"))
        else:
            metadata = merged(self._store, self.path, self._below)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _chunk(tensor: torch.Tensor, shard: Shard | None) -> ChunkStorageMetadata:
    offsets = torch.Size(shard.offsets) if shard is not None else torch.Size([0] * tensor.dim())
    return ChunkStorageMetadata(offsets, tensor.size())


class _SavePieces(SavePlanner):
    """Writes each tensor at its offset in the whole; other processes write the rest."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards
        self._tensors: dict[str, torch.Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._tensors = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(name, tensor) for name, tensor in self._tensors.items() if self._is_there(name)])

    def _is_there(self, name: str) -> bool:
        """Whether a shard is to be written. An empty one is not: another shard at its offset may not be empty."""
        shard = self._shards.get(name)
        return shard is None or bool(self._tensors[name].numel()) or not prod(shard.whole)

    def _item(self, name: str, tensor: torch.Tensor) -> WriteItem:
        shard = self._shards.get(name)
        chunk = _chunk(tensor, shard)
        size = tensor.size() if shard is None else torch.Size(shard.whole)
        properties = TensorProperties.create_from_tensor(tensor)
        data = TensorWriteData(chunk, properties, size)
        return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        entries: dict[str, Any] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None
            entries[item.index.fqn] = TensorStorageMetadata(data.properties, data.size, [data.chunk])
        # Flat names, as DCP's own planner writes them for a flat dictionary.
        return all_plans, Metadata(entries, {name: (name,) for name in entries})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._tensors[write_item.index.fqn]


class _LoadPieces(LoadPlanner):
    """Fills each tensor from the stored shards that overlap it; together they must cover all of it."""

    def __init__(self, what: str, shards: Mapping[str, Shard]) -> None:
        self._what = what
        self._shards = shards
        self._tensors: dict[str, torch.Tensor] = {}
        self._found: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._tensors = state_dict
        self._found = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name, tensor in self._tensors.items() for item in self._items(name, tensor)])

    def _items(self, name: str, tensor: torch.Tensor) -> list[ReadItem]:
        shard = self._shards.get(name)
        whole = tensor.size() if shard is None else torch.Size(shard.whole)
        entry = self._found.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            if not tensor.numel():
                return []
            raise DamagedStateError(f"{self._what}: expected the tensor {name}, found none")
        if entry.size != whole:
            raise DamagedStateError(
                f"{self._what}: expected {name} of shape {list(whole)}, found one of shape {list(entry.size)}"
            )
        items = create_read_items_for_chunk_list(name, entry, [_chunk(tensor, shard)]) if tensor.numel() else []
        elements = sum(prod(item.lengths) for item in items)
        if elements != tensor.numel():
            raise DamagedStateError(f"{self._what}: expected {tensor.numel()} elements of {name}, found {elements}")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._target(read_item)
        return target.clone() if target.is_inference() or 0 in target.stride() else target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        target = self._target(read_item)
        if tensor.data_ptr() != target.data_ptr():
            fill(target.detach(), tensor)

    def _target(self, read_item: ReadItem) -> torch.Tensor:
        target = self._tensors[read_item.dest_index.fqn]
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        return target

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("only tensors are asked for")

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise AssertionError("only tensors are asked for")


@contextlib.contextmanager
def _alone(what: str) -> Iterator[None]:
    """Use DCP in one process, and raise the cause of a failure in place of DCP's wrapper."""
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
    store: Store,
    directory: str,
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard] | None = None,
    *,
    crc32: bool = True,
) -> tuple[StoredFile, ...]:
    """Write host tensors; returns the files of the checkpoint. Raises StorageError.

    Args:
        store, directory: destination.
        tensors: tensors by name.
        shards: offsets in larger tensors, by name; tensors not named are whole.
        crc32: write torch's own checksums, which torch never checks and which cost more than the rest of the write.
            A commit file with checksums makes them unnecessary.
    """
    writer = _Writer(store, directory)
    with _alone(f"{directory} cannot be written"), _crc32(crc32):
        dcp_save(dict(tensors), storage_writer=writer, planner=_SavePieces(shards or {}), no_dist=True)
    return tuple(writer.fs.written)


def load_into(
    store: Store,
    directory: str,
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard] | None = None,
    below: Sequence[str] | None = None,
) -> None:
    """Read tensors by name, in place.

    Args:
        store, directory: source.
        tensors: plain tensors to fill, by name.
        shards: offsets in larger tensors, by name; tensors not named are whole.
        below: subdirectories that hold the checkpoint together; None: `directory` itself holds it.

    Raises:
        DamagedStateError: the files lack tensors or have others.
        StorageError: the files cannot be read.
    """
    reader, planner = _Reader(store, directory, below), _LoadPieces(directory, shards or {})
    with _alone(f"{directory} cannot be read"):
        dcp_load(dict(tensors), storage_reader=reader, planner=planner, no_dist=True)


def names(
    store: Store, directory: str, below: Sequence[str] | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, unsharded shapes and dtypes of a checkpoint's tensors; `below` as for :func:`load_into`."""
    metadata = _Reader(store, directory, below).read_metadata()
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


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


def _member(of: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """The member of the one enumeration that metadata have, in place of `getattr`.

    Python 3.11.0 to 3.11.3 pickle members as `getattr(class, name)`.
    """
    if of is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise DamagedStateError(f"expected the metadata of a checkpoint, found attribute {name!r} of {of!r} in it")
    return _MEM_FORMAT_ENCODING.__members__[name]


class _Metadata(pickle._Unpickler):  # in Python: the one in C makes room for whatever index of a memo a file names
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        """Set an object's state, and never that of a class, which all of the process shares."""
        of = self.stack[-2]  # type: ignore[attr-defined]  # typeshed leaves it out
        if callable(of):
            raise DamagedStateError(f"expected the metadata of a checkpoint, found a state of {of!r} in it")
        super().load_build()  # type: ignore[misc]  # likewise

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise DamagedStateError(f"expected the metadata of a checkpoint, found {module}.{name} in it")
        return super().find_class(module, name)


def read_metadata(data: bytes) -> Metadata:
    """Decode a ``.metadata`` file.

    Raises:
        DamagedStateError: it is something else, or names files outside of its directory.
    """
    try:
        metadata = _Metadata(io.BytesIO(data)).load()
        paths = [info.relative_path for info in (getattr(metadata, "storage_data", None) or {}).values()]
        outside = [path for path in paths if not is_inside(path)]
    except DamagedStateError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedStateError(f"the metadata cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise DamagedStateError(f"expected the metadata of a checkpoint, found a {type(metadata).__name__}")
    if outside:
        raise DamagedStateError(
            f"expected paths of files in the store, found {outside[0]!r} in a checkpoint's metadata"
        )
    return metadata


def merged(store: Store, directory: str, below: Sequence[str]) -> Metadata:
    """The merged metadata of the directories `below`, as of a checkpoint written at once.

    If several directories have the same shard, the first one's counts.

    Raises:
        DamagedStateError: the directories do not belong to one checkpoint.
        StorageError: a file cannot be read.
    """
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    planner_data: dict[str, Any] = {}
    for name in below:
        metadata = read_metadata(store.read(f"{directory}/{name}/{MERGED}"))
        planner_data |= metadata.planner_data or {}
        for tensor, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise DamagedStateError(f"{directory}/{name}: expected tensors only, found {tensor}, which is not one")
            known = tensors.setdefault(tensor, TensorStorageMetadata(entry.properties, entry.size, []))
            if (known.size, known.properties.dtype) != (entry.size, entry.properties.dtype):
                raise DamagedStateError(
                    f"{directory}/{name}: expected {tensor} of {known.properties.dtype} and shape {list(known.size)}, "
                    f"as others have it, found {entry.properties.dtype} and {list(entry.size)}"
                )
            for chunk in entry.chunks:
                index = MetadataIndex(tensor, chunk.offsets)
                if index not in places:
                    info = (metadata.storage_data or {}).get(index)
                    if info is None:
                        raise DamagedStateError(f"{directory}/{name}: expected the position of {tensor}, found none")
                    known.chunks.append(chunk)
                    places[index] = dataclasses.replace(info, relative_path=f"{name}/{info.relative_path}")
    return Metadata(tensors, planner_data, places)


def encode_metadata(metadata: Metadata) -> bytes:
    """Encode a ``.metadata`` file."""
    return pickle.dumps(metadata)


def write_merged(store: Store, directory: str, below: Sequence[str]) -> StoredFile:
    """Write merged metadata, so that stock tools read one checkpoint. Every process writes the same content."""
    return store.write(f"{directory}/{MERGED}", encode_metadata(merged(store, directory, below)))
