"""Metadata of torch.distributed.checkpoint: which tensors a checkpoint has, and where their shards lie.

The ``.metadata`` file is a pickle. It is read through an allow-list: a file that names anything else is refused before
any of it is executed. Merging the metadata of several processes makes one checkpoint of what they wrote.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from memckpt.errors import DamagedStateError
from memckpt.storage.format import MERGED, is_inside
from memckpt.storage.store import Store, StoredFile

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
