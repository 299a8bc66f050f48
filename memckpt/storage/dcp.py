"""Tensors in a store in the format of torch.distributed.checkpoint, which stock tools read.

A directory has one file of tensors, each as `torch.save` writes it, and a pickle that says where in it they are. A rank
may hold a shard of a tensor: it is written and read at its offset in the whole. DCP's own planners, writers and readers
are for ranks that write together, and copy a tensor more often. Tensors are read with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import IO, Any, ClassVar, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from memckpt.errors import DamagedStateError, MemckptError
from memckpt.state.spec import Shard
from memckpt.state.tensors import fill
from memckpt.storage.format import MERGED, is_inside
from memckpt.storage.store import Store, StoredFile

#: The file of tensors, as DCP names it.
_DATA = "__0_0.distcp"


def _chunk(tensor: torch.Tensor, shard: Shard | None) -> ChunkStorageMetadata:
    offsets = torch.Size(shard.offsets) if shard is not None else torch.Size([0] * tensor.dim())
    return ChunkStorageMetadata(offsets, tensor.size())


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave torch's own checksums out, which torch never checks: a commit file's make them unnecessary.

    They cost more than the rest of a write.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def save(
    store: Store,
    directory: str,
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard] | None = None,
) -> tuple[StoredFile, ...]:
    """Write host tensors by name; returns the files of the checkpoint. Raises StorageError.

    `shards`: offsets in larger tensors, by name; tensors not named are whole.
    """
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    path = f"{directory}/{_DATA}"
    with _without_crc32(), store.create(path) as stream:
        for name, tensor in tensors.items():
            shard = (shards or {}).get(name)
            size = tensor.size() if shard is None else torch.Size(shard.whole)
            if not tensor.numel() and size.numel():
                continue  # an empty shard: another one at its offset may not be empty
            chunk, start = _chunk(tensor, shard), stream.tell()
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            # torch writes all of a view's storage.
            torch.save(tensor.detach() if whole else tensor.detach().clone(), cast("IO[bytes]", stream))
            entries[name] = TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), size, [chunk])
            places[MetadataIndex(name, chunk.offsets)] = _StorageInfo(_DATA, start, stream.tell() - start)
    # Flat names, as DCP's own planner writes them for a flat dictionary.
    metadata = Metadata(entries, {name: (name,) for name in entries}, places)
    return stream.stored(path), store.write(f"{directory}/{MERGED}", pickle.dumps(metadata))


def load_into(
    store: Store,
    directory: str,
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard] | None = None,
    below: Sequence[str] | None = None,
) -> None:
    """Read tensors by name, in place, from the stored shards that overlap them.

    The subdirectories `below` hold the checkpoint together; None: `directory` itself does. The rest is as for
    :func:`save`. Raises DamagedStateError if the files lack tensors or have others, StorageError if unreadable.
    """
    metadata = _metadata(store, directory, below)
    by_file: dict[str, list[ReadItem]] = defaultdict(list)
    try:
        for name, tensor in tensors.items():
            entry = metadata.state_dict_metadata.get(name)
            for item in _pieces(directory, name, tensor, (shards or {}).get(name), entry):
                by_file[metadata.storage_data[item.storage_index].relative_path].append(item)
        for path, items in by_file.items():
            with store.open(f"{directory}/{path}") as file:
                for item in items:
                    place = metadata.storage_data[item.storage_index]
                    _read_piece(file, place, item, tensors[item.dest_index.fqn].detach())
    except (MemckptError, MemoryError):
        raise
    except Exception as error:  # damaged files can raise anything
        raise DamagedStateError(f"{directory} cannot be read: {type(error).__name__}: {error}") from error


def _pieces(what: str, name: str, tensor: torch.Tensor, shard: Shard | None, entry: object) -> list[ReadItem]:
    """The pieces of stored shards that fill a tensor; together they must cover all of it."""
    whole = tensor.size() if shard is None else torch.Size(shard.whole)
    if not isinstance(entry, TensorStorageMetadata):
        if not tensor.numel():
            return []
        raise DamagedStateError(f"{what}: expected the tensor {name}, found none")
    if entry.size != whole:
        raise DamagedStateError(
            f"{what}: expected {name} of shape {list(whole)}, found one of shape {list(entry.size)}"
        )
    items = create_read_items_for_chunk_list(name, entry, [_chunk(tensor, shard)]) if tensor.numel() else []
    elements = sum(prod(item.lengths) for item in items)
    if elements != tensor.numel():
        raise DamagedStateError(f"{what}: expected {tensor.numel()} elements of {name}, found {elements}")
    return items


def _read_piece(file: IO[bytes], place: _StorageInfo, item: ReadItem, target: torch.Tensor) -> None:
    view: Any = _create_file_view(cast("io.IOBase", file), place.offset, place.length)
    stored = torch.load(view, map_location="cpu", weights_only=True)
    for dim, (at, start, length) in enumerate(zip(item.storage_offsets, item.dest_offsets, item.lengths, strict=True)):
        stored, target = stored.narrow(dim, at, length), target.narrow(dim, start, length)
    if stored.shape != target.shape:
        raise ValueError(f"expected {item.dest_index.fqn} of shape {list(target.shape)}, found {list(stored.shape)}")
    fill(target, stored)


def _metadata(store: Store, directory: str, below: Sequence[str] | None) -> Metadata:
    if below is not None:
        return merged(store, directory, below)
    return read_metadata(store.read(f"{directory}/{MERGED}"))


def names(
    store: Store, directory: str, below: Sequence[str] | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, unsharded shapes and dtypes of a checkpoint's tensors; `below` as for :func:`load_into`."""
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in _metadata(store, directory, below).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


# Metadata, of which nothing is executed

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
    """The one enumeration's member, in place of `getattr`, by which Python 3.11.0 to 3.11.3 pickle it."""
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
    """Decode a ``.metadata`` file. Raises DamagedStateError if it is none, or names files outside of its directory."""
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

    If several directories have the same shard, the first one's counts. Raises DamagedStateError if they do not belong
    to one checkpoint, StorageError if a file cannot be read.
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


def write_merged(store: Store, directory: str, below: Sequence[str]) -> StoredFile:
    """Write merged metadata, so that stock tools read one checkpoint. Every process writes the same content."""
    return store.write(f"{directory}/{MERGED}", pickle.dumps(merged(store, directory, below)))
