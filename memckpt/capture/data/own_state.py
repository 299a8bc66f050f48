"""State of a loader's own objects: generators, and what its samplers keep.

A path such as ``batch_sampler.sampler.generator`` names the same object in two processes that build the same loader.
Generators are searched in everything below the loader's dataset, samplers and collate function: attributes, lists,
dicts, partials, bound methods, and what functions close over or name among their module's globals. What a sampler
keeps, such as the ``epoch`` of a distributed one or an order that it shuffles in place, is searched on samplers only.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import logging
import random
import re
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from memckpt.capture.data.sampler_tap import index_digest
from memckpt.errors import DataPositionError
from memckpt.state import rng
from memckpt.state.tensors import version

OwnState = dict[str, Any]
"""``{"generators": {path: state}, "attributes": {path: {name: value}}}``."""

Progress = dict[str, list[str]]
"""By path of a sampler or stream, names of the attributes that change while training runs."""

# Attributes that refer from a sampler or dataset to the one it wraps.
_EDGES = frozenset({"sampler", "_sampler", "batch_sampler", "base_sampler", "dataset", "data_source"})
#: Beginnings of the paths to objects that make samples.
_MAKERS = ("dataset", "collate_fn")
#: Objects that one walk looks at. A pipeline has tens of them; a cache of samples may have millions.
_MOST_OBJECTS = 4096
#: Elements of a container that are looked at together with everything else; those of larger ones come last.
_LARGE = 256
#: Places that are compared at each capture, to find a generator that was made or replaced since the walk.
_MOST_WATCHED = 512
#: Datasets of which numbers are compared.
_MOST_DATASETS = 8
#: Tensors in a tuple or list of a dataset that are looked at.
_MOST_TENSORS = 16
#: Elements of a container, and of an array, that a sampler keeps and each record carries.
_MOST_ELEMENTS = 4096
#: Containers that a sampler keeps; a library's class would lose what else it knows within another one. Sets are none:
#: in what order one is iterated depends on its history.
_KEPT_INSIDE = (list, tuple, dict, deque)
_KEPT = (*_KEPT_INSIDE, OrderedDict, defaultdict, Counter)
_KINDS = {"OrderedDict": OrderedDict, "Counter": Counter}
#: Elements of a list of a dataset that a checksum looks at.
_FEW_SAMPLED = 1024
#: Elements that a checksum of something larger looks at.
_MOST_SAMPLED = 2**16
_SCALARS = (bool, int, float, str, bytes, type(None))
_LEAVES = (
    *(*_SCALARS, complex, bytearray, torch.Tensor, np.ndarray, np.generic, torch.dtype, torch.device),
    *(type, ModuleType, CodeType, re.Pattern, PurePath, DataLoader, _BaseDataLoaderIter),
)
_CONTAINERS = (list, tuple, deque)
#: Packages whose objects are not looked into, and whose functions and classes name no generator of the user.
_NOT_SEARCHED = frozenset({"memckpt", "logging", "threading", "multiprocessing", "asyncio"})
_NO_USER_CODE = _NOT_SEARCHED | {"builtins", "torch", "torchdata", "numpy", "collections", "functools", "random"}
_SAMPLER_PACKAGES = frozenset({"torch", "torchdata", "accelerate", "transformers", "lightning", "pytorch_lightning"})
_LIBRARIES = _SAMPLER_PACKAGES | _NO_USER_CODE
#: Attributes that belong to the pass and not to the sampler's configuration. The second is that of Accelerate's and
#: HF's samplers, which may have drawn another value in this process.
_ALWAYS = ("epoch", "initial_seed")
_log = logging.getLogger("memckpt")


class _Reached(NamedTuple):
    """An object that a walk has found: its path, and the dict and key that refer to it, if a dict does."""

    path: str
    found: Any
    owner: dict[Any, Any] | None = None
    key: Any = None


#: Those of this process that have walked.
_walked: weakref.WeakSet[OwnObjects] = weakref.WeakSet()


class OwnObjects:
    """The objects that can be reached from a loader, found by one bounded walk that runs no code of theirs.

    Args:
        roots: returns the objects to begin with, by name.

    Attributes:
        stateless: path of a generator without a repeatable state (`random.SystemRandom`); empty if there is none.
        outgrown: paths of what samplers keep that was carried, and cannot be any more.
        lost: why the last :meth:`restore` could not restore everything, in words; empty if it could.
    """

    def __init__(self, roots: Callable[[], Mapping[str, object]]) -> None:
        self._roots = roots
        self._walked = False
        self._said_cut = False
        #: Copies of containers, their plain values, and whether there are containers in them.
        self._kept: dict[tuple[str, str], tuple[Any, Any, bool]] = {}
        self.stateless = ""
        self.lost = ""
        self.outgrown: dict[str, None] = {}

    def walk_objects(self) -> None:
        """Walk now. A capture walks again only where a place that the walk has noted has another object."""
        self._walked = True
        _walked.add(self)
        self.stateless = ""
        self._generators: dict[str, rng.AnyGenerator] = {}
        self._aliases: dict[str, rng.AnyGenerator] = {}
        self._samplers: dict[str, Any] = {}
        self._datasets: dict[str, Any] = {}
        self._streams: dict[str, Any] = {}
        self._places: dict[str, dict[Any, Any]] = {}
        self._watched: list[_Reached] = []
        self._sizes: list[tuple[dict[Any, Any], int]] = []
        for number, reached in enumerate(self._walk()):
            if number == _MOST_OBJECTS:
                self._say_cut(reached.path)
                break
            kind = type(reached.found)
            if issubclass(kind, random.SystemRandom):
                self.stateless = self.stateless or reached.path
            elif issubclass(kind, rng.GENERATOR_TYPES):
                self._generators[reached.path] = reached.found
            elif issubclass(kind, Dataset):
                if issubclass(kind, IterableDataset):
                    self._streams[reached.path] = reached.found
                elif len(self._datasets) < _MOST_DATASETS:
                    self._datasets[reached.path] = reached.found
            elif _is_sampler(reached.path, kind):
                self._samplers[reached.path] = reached.found

    def _say_cut(self, path: str) -> None:
        if not self._said_cut:
            self._said_cut = True
            _log.info(
                "memckpt: the search for random generators below a loader ends at loader.%s, after %d objects; one "
                "that lies beyond is not carried: make it an attribute of the dataset",
                path,
                _MOST_OBJECTS,
            )

    def _walk(self) -> Iterator[_Reached]:
        """Yield everything but leaves, each object once; what large containers have comes last."""
        seen = {id(each) for each in _global_generators()}
        soon = deque(_Reached(name, root) for name, root in self._roots().items())
        later: deque[Iterator[_Reached]] = deque()
        while soon or later:
            reached = soon.popleft() if soon else next(later[0], None)
            if reached is None:
                later.popleft()
                continue
            kind = type(reached.found)
            generator = issubclass(kind, rng.GENERATOR_TYPES)
            # A loader's sampler may be replaced, too, as Accelerate does.
            if reached.owner is not None and (generator or reached.found is None or reached.key in _EDGES):
                self._watch(reached)
            if issubclass(kind, _LEAVES) or kind.__module__.partition(".")[0] in _NOT_SEARCHED:
                continue
            if id(reached.found) in seen:
                if generator:
                    self._aliases[reached.path] = reached.found
                continue
            seen.add(id(reached.found))
            yield reached
            if generator:
                self._aliases[reached.path] = reached.found
                continue
            size, inside = self._inside(reached.path, reached.found, kind)
            if size > _LARGE:
                later.append(inside)
            else:
                soon.extend(inside)

    def _watch(self, reached: _Reached) -> None:
        if len(self._watched) < _MOST_WATCHED:
            self._watched.append(reached)

    def _inside(self, path: str, found: Any, kind: type) -> tuple[int, Iterator[_Reached]]:
        """What an object refers to, and how many elements it has."""
        if issubclass(kind, FunctionType):
            return 0, _of_function(path, found)
        if issubclass(kind, MethodType):
            return 0, iter([_Reached(path, found.__self__), _Reached(f"{path}()", found.__func__)])
        if issubclass(kind, BuiltinFunctionType):  # as a generator's own method
            return 0, iter([_Reached(f"{path}.__self__", found.__self__)])
        if issubclass(kind, functools.partial):
            return 0, iter([_Reached(f"{path}.{name}", getattr(found, name)) for name in ("func", "args", "keywords")])
        own = _own_dict(found)
        self._places[path] = own
        if own and len(self._sizes) < _MOST_WATCHED:
            self._sizes.append((own, len(own)))
        parts = [_of_class(path, found, own, kind), iter([_Reached(f"{path}.{n}", v, own, n) for n, v in own.items()])]
        # Unbound methods, which a subclass cannot replace.
        if issubclass(kind, dict):
            self._places[f"{path}[]"] = found
            if len(self._sizes) < _MOST_WATCHED:
                self._sizes.append((found, dict.__len__(found)))
            return dict.__len__(found), itertools.chain(_of_dict(path, found), *parts)
        for container in _CONTAINERS:
            if issubclass(kind, container):
                elements: Iterator[Any] = container.__iter__(found)
                numbered = enumerate(itertools.islice(elements, _MOST_OBJECTS))
                return container.__len__(found), itertools.chain(
                    (_Reached(f"{path}[{number}]", each) for number, each in numbered), *parts
                )
        return 0, itertools.chain(*parts)

    def _current(self) -> None:
        if (
            not self._walked
            or any(each.owner is not None and each.owner.get(each.key) is not each.found for each in self._watched)
            or any(dict.__len__(own) != size for own, size in self._sizes)
        ):
            self.walk_objects()

    # State

    def capture(self) -> OwnState:
        """The state of every generator and sampler, and the numbers of streams, which may count passes; by path."""
        return {
            "generators": self.capture_generators(),
            "attributes": {
                **{path: self._values(path, sampler) for path, sampler in self._samplers.items()},
                **{path: _small_numbers(stream) for path, stream in self._streams.items()},
            },
        }

    def capture_generators(self) -> dict[str, Any]:
        """The states of the generators alone, by path."""
        self._current()
        return {path: rng.capture_generator(each) for path, each in self._generators.items()}

    def _values(self, path: str, sampler: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in _own_dict(sampler).items():
            if name == "initial_seed" and isinstance(value, int):
                found[name] = str(value)  # torch's seeds have 64 bits, too many for the codec
            elif isinstance(value, _SCALARS):
                found[name] = value
            elif type(value) in (*_KEPT, torch.Tensor, np.ndarray):
                plain = self._plain(path, name, value)
                if plain is not None:
                    found[name] = plain
        return found

    def _plain(self, path: str, name: str, value: Any) -> Any:
        """A container or an array as a plain value, one object while unchanged; None for other and large ones."""
        if isinstance(value, _KEPT):
            before = self._kept.get((path, name))
            if before is not None and _is_same(before[0], value, before[2]):
                return before[1]
            copied = _copied(value, [_MOST_ELEMENTS])
            if copied is None:
                if before is not None:
                    self.outgrown[f"{path}.{name}"] = None
                return None
            plain = copied if type(value) is list else {"container": copied, "kind": type(value).__name__}
            self._kept[path, name] = copied, plain, bool(_parts(copied))
            return plain
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.layout != torch.strided or value.dtype == torch.bfloat16:
                return None
            value = value.detach().numpy()
        if value.dtype.hasobject or value.size > _MOST_ELEMENTS:
            return None
        return {"array": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}

    def numbers(self) -> dict[tuple[int, str], tuple[Any, int | float]]:
        """Datasets that are read by index, and the numbers among their attributes; by dataset and name."""
        self._current()
        return {
            (id(dataset), name): (dataset, value)
            for dataset in self._datasets.values()
            for name, value in _own_dict(dataset).items()
            if type(value) in (int, float)
        }

    def choices(self) -> dict[str, int]:
        """Checksums of the numbers, and lists and arrays of some, that decide which samples datasets give; by path."""
        self._current()
        return {
            f"{path}.{name}": digest
            for path, dataset in self._datasets.items()
            for name, value in _own_dict(dataset).items()
            if (digest := _digest_of_numbers(value)) is not None
        }

    def copied(self) -> dict[str, Any]:
        """Checksums and numbers by which a copy of the datasets chooses samples, see :meth:`choices`; by path."""
        return {
            "choices": self.choices(),
            "numbers": {
                f"{path}.{name}": value
                for path, dataset in self._datasets.items()
                for name, value in _small_numbers(dataset).items()
            },
        }

    @contextmanager
    def with_numbers(self, numbers: Mapping[str, int | float]) -> Iterator[None]:
        """Give datasets these numbers, by path, within the block."""
        places = [
            (_own_dict(dataset), name, numbers[f"{path}.{name}"])
            for path, dataset in self._datasets.items()
            for name in _own_dict(dataset)
            if f"{path}.{name}" in numbers
        ]
        before = [own[name] for own, name, _ in places]
        try:
            for own, name, value in places:
                own[name] = value
            yield
        finally:
            for (own, name, _), value in zip(places, before, strict=True):
                own[name] = value

    def versions(self) -> dict[tuple[int, str], tuple[Any, list[int]]]:
        """How often torch saw tensors of the datasets written that the last walk found; called for each batch."""
        found = {}
        for dataset in self._datasets.values():
            for name, value in _own_dict(dataset).items():
                tensors = value if isinstance(value, (list, tuple)) and len(value) <= _MOST_TENSORS else [value]
                # What requires a gradient is a model's.
                if tensors and all(isinstance(one, torch.Tensor) and not one.requires_grad for one in tensors):
                    found[id(dataset), name] = dataset, [version(one) for one in tensors]
        return found

    def with_places(self) -> list[Any]:
        """Objects whose place in the data is carried with that of the loader."""
        self._current()
        return [*self._samplers.values(), *self._streams.values()]

    def has_loading_streams(self) -> bool:
        """Whether a stream has a state of its own that it can be set to; whoever carries it sets its place."""
        self._current()
        return any(callable(getattr(type(each), "load_state_dict", None)) for each in self._streams.values())

    def unknown_samplers(self) -> list[str]:
        """Classes of the samplers that are no library's."""
        self._current()
        kinds = [type(sampler) for sampler in self._samplers.values()]
        return [kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] not in _SAMPLER_PACKAGES]

    def uncarried(self) -> dict[str, int]:
        """Checksums of what the samplers keep and no capture carries, by path: what is large, and other objects."""
        self._current()
        found = {}
        for path, sampler in self._samplers.items():
            carried = self._values(path, sampler)
            for name, value in _own_dict(sampler).items():
                # What other samplers and datasets keep is looked at there.
                if name not in carried and name not in _EDGES and not isinstance(value, (*_SCALARS, Dataset, Sampler)):
                    found[f"{path}.{name}"] = _digest(value, [_MOST_SAMPLED])
        return found

    def restore(self, state: OwnState, progress: Progress | None = None) -> None:
        """Set everything to `state`.

        A generator that is not there yet, as it is made with the first sample, is made here. Where that is not
        possible, :attr:`lost` says so.

        Args:
            progress: the sampler attributes to set; None for all of them. It excludes a sampler's configuration (batch
                size, rank): a difference there has to show as different indices.

        Raises:
            DataPositionError: a generator of the loader itself or of a sampler is missing, or one has another type.
        """
        self._current()
        if not state["generators"].keys() <= self._aliases.keys():
            self.walk_objects()
        self.lost = ""
        for path, generator_state in state["generators"].items():
            with _naming(path):
                if path in self._aliases:
                    rng.restore_generator(self._aliases[path], generator_state)
                else:
                    self._make(path, generator_state)
        for path, values in state["attributes"].items():
            sampler = self._samplers.get(path, self._streams.get(path))
            if sampler is not None:
                names = values if progress is None else progress.get(path, ())
                for name in names:
                    if name in values and not _set_value(_own_dict(sampler), name, values[name]):
                        self.lost = (
                            f"loader.{path}.{name} was a defaultdict in the run that is continued, whose default is "
                            f"not known, and is not there at the resume; make it in the sampler's __init__()"
                        )

    def _make(self, path: str, state: dict[str, Any]) -> None:
        """Make a generator at a path where there is none."""
        where, _, name = path.rpartition(".")
        place, key = self._places.get(where), name
        if path.endswith("]"):
            where, _, label = path[:-1].rpartition("[")
            place = self._places.get(f"{where}[]") if label[:1] != "#" else None
            key = ast.literal_eval(label) if place is not None else ""
        if place is not None and place.get(key) is None:
            place[key] = rng.make_generator(state)
        elif path.startswith(_MAKERS):
            self.lost = (
                f"expected a random generator at loader.{path}, as in the run that is continued, found none; it starts "
                "in another state: make it together with the dataset, and not with a sample"
            )
        else:
            raise DataPositionError(
                f"expected a random generator at loader.{path}, as in the run that is continued, found none; "
                "build the loader in the same way in both runs"
            )


def changed(before: OwnState, now: OwnState) -> Progress:
    """The attributes of samplers and streams that differ between two captures, and what always belongs to the pass."""
    progress: Progress = {}
    for path, values in now["attributes"].items():
        old = before["attributes"].get(path, {})
        names = [name for name in values if name in _ALWAYS or name not in old or _differs(old[name], values[name])]
        if names:
            progress[path] = names
    return progress


def _small_numbers(found: Any) -> dict[str, int | float]:
    """The numbers and flags among an object's attributes that the codec takes."""
    own = _own_dict(found).items()
    return {
        name: value
        for name, value in own
        if type(value) in (bool, int, float) and (value != value or abs(value) < 2**63)
    }


def _differs(before: Any, now: Any) -> bool:
    # A container is one object while it is unchanged; by comparison, dicts in another order are equal.
    return before is not now and (before != now or isinstance(now, list) or "container" in now)


def carried_generators() -> Iterator[object]:
    """All generators that are carried in this process: the global ones, and those below the loaders followed here."""
    yield from _global_generators()
    for each in list(_walked):
        yield from each._aliases.values()


# What a walk follows


def _global_generators() -> Iterator[object]:
    """The generators that every capture of the global ones carries."""
    yield torch.default_generator
    yield from rng.device_generators()
    yield random.getstate.__self__  # type: ignore[attr-defined]  # the module's own instance
    yield np.random.get_state.__self__  # type: ignore[attr-defined]  # likewise


def _own_dict(found: Any) -> dict[Any, Any]:
    """An object's attributes, without asking its class."""
    try:
        own = object.__getattribute__(found, "__dict__")
    except AttributeError:
        return {}
    return own if type(own) is dict else {}


def _of_class(path: str, found: Any, own: Mapping[Any, Any], kind: type) -> Iterator[_Reached]:
    """What the classes of an object refer to: slots, generators, and what their methods close over or name."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in _NO_USER_CODE:
            continue
        for name, value in list(vars(each).items()):
            if isinstance(value, MemberDescriptorType):
                try:
                    yield _Reached(f"{path}.{name}", value.__get__(found))
                except AttributeError:  # a slot without a value
                    continue
            elif issubclass(type(value), (FunctionType, staticmethod, classmethod)):
                yield _Reached(f"{path}.{name}()", getattr(value, "__func__", value))
            elif name not in own and issubclass(type(value), rng.GENERATOR_TYPES):
                yield _Reached(f"{path}.{name}", value)


def _of_function(path: str, function: FunctionType) -> Iterator[_Reached]:
    """What a function closes over, has as a default, and names among the globals of its module."""
    if (function.__module__ or "builtins").partition(".")[0] in _NO_USER_CODE:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield _Reached(f"{path}.{name}", cell.cell_contents)
        except ValueError:  # a cell that is still empty
            continue
    for number, value in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
        yield _Reached(f"{path}.<default {number}>", value)
    names = function.__globals__
    for name in _names(function.__code__):
        if name in names:
            yield _Reached(f"{path}.{name}", names[name], names, name)


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    """Names of globals and attributes in a function and in the functions that it defines."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return (*code.co_names, *itertools.chain(*inner))


def _of_dict(path: str, found: dict[Any, Any]) -> Iterator[_Reached]:
    for number, (key, value) in enumerate(list(itertools.islice(dict.items(found), _MOST_OBJECTS))):
        label = repr(key) if type(key) in _SCALARS else f"#{number}"
        yield _Reached(f"{path}[{label}]", value, found, key)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise DataPositionError(f"the generator at loader.{path} cannot be restored: {error}") from error


# What samplers keep


def _is_sampler(path: str, kind: type) -> bool:
    names = path.split(".")
    return issubclass(kind, Sampler) or (names[-1].endswith("sampler") and _EDGES.issuperset(names))


def _is_same(before: Any, value: Any, nested: bool) -> bool:
    """Whether a container has what its copy had, in the same order; comparing is far faster than copying.

    Args:
        nested: whether there are containers in it.
    """
    try:
        if before != value or (isinstance(value, dict) and [*before] != [*value]):
            return False
    except (ValueError, RuntimeError):  # an array has come into it, of which no comparison is true or false
        return False
    return not nested or all(_is_same(*both, True) for both in zip(_parts(before), _parts(value), strict=True))


def _parts(value: Any) -> list[Any]:
    """Containers in a container."""
    parts = value.values() if isinstance(value, dict) else value
    return [each for each in parts if type(each) in _KEPT_INSIDE]


def _copied(value: Any, left: list[int]) -> Any:
    """A copy of nested containers of scalars; None if there is anything else in them, or more than `left`."""
    left[0] -= len(value)
    if left[0] < 0:
        return None
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    copies = []
    for each in parts:
        if type(each) in _KEPT_INSIDE:
            each = _copied(each, left)
            if each is None:
                return None
        elif type(each) not in _SCALARS:
            return None
        copies.append(each)
    if isinstance(value, dict):
        return dict(zip(copies[: len(value)], copies[len(value) :], strict=True))
    return deque(copies, value.maxlen) if isinstance(value, deque) else type(value)(copies)


def _digest(value: Any, left: list[int], depth: int = 3) -> int:
    """A checksum of at most `left` elements of what a sampler keeps; also of an object whose class is the user's."""
    kind = type(value)
    if issubclass(kind, (torch.Tensor, np.ndarray)):
        flat = value.detach().cpu().reshape(-1) if issubclass(kind, torch.Tensor) else value.reshape(-1)
        return index_digest([*value.shape, flat[:: 1 + len(flat) // _MOST_SAMPLED]], 0)
    if issubclass(kind, (set, frozenset)):
        return zlib.crc32(repr((len(value), sum(one for one in value if type(one) is int))).encode())
    if issubclass(kind, _CONTAINERS) and len(value) > _MOST_SAMPLED:
        return index_digest([len(value), *list(value)[:: len(value) // _MOST_SAMPLED]], 0)
    if issubclass(kind, dict):
        parts = [part for item in itertools.islice(dict.items(value), left[0]) for part in item]
    elif issubclass(kind, _CONTAINERS):
        parts = list(value)
    elif issubclass(kind, (*_LEAVES, FunctionType, nn.Module)) or kind.__module__.partition(".")[0] in _LIBRARIES:
        return index_digest(value, 0)
    else:
        parts = list(_own_dict(value).values())
    if not depth:  # of what leads back to its holder, a trainer, there is no end
        return len(parts)
    left[0] -= len(parts)
    return index_digest([len(parts), *(_digest(each, left, depth - 1) for each in parts if left[0] > 0)], 0)


def _digest_of_numbers(value: Any) -> int | None:
    """A checksum of a number, or of a list or array of integers: indices, lengths, weights; None for anything else."""
    if type(value) in (bool, int, float):
        return index_digest(value, 0)
    integers = isinstance(value, np.ndarray) and value.dtype.kind == "i" and not isinstance(value, np.memmap)
    if integers or type(value) in (list, tuple, range):
        sampled = value[:: 1 + len(value) // _FEW_SAMPLED]
        if integers or all(type(one) in (int, float) or isinstance(one, np.integer) for one in sampled):
            return index_digest([len(value), *sampled], 0)
    return None


def _set_value(own: dict[Any, Any], name: str, value: Any) -> bool:
    """Set one attribute, in place where others may refer to it; False where it cannot be made anew."""
    live = own.get(name)
    if name == "initial_seed" and isinstance(value, str):
        own[name] = int(value)
    elif isinstance(value, list):
        fresh = _copied(value, [_MOST_ELEMENTS])  # positions share theirs
        if type(live) is list:
            live[:] = fresh
        else:
            own[name] = fresh
    elif isinstance(value, dict) and "container" in value:
        fresh = copy.deepcopy(value["container"])
        if isinstance(live, (dict, deque)):  # with what else it knows, as a default
            live.clear()
            live.extend(fresh) if isinstance(live, deque) else live.update(fresh)
        elif value["kind"] == "defaultdict":
            return False
        else:
            own[name] = _KINDS[value["kind"]](fresh) if value["kind"] in _KINDS else fresh
    elif isinstance(value, dict):
        array = np.frombuffer(value["array"], dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        if isinstance(live, torch.Tensor) and live.shape == array.shape:
            live.copy_(torch.from_numpy(array))
        elif isinstance(live, torch.Tensor):
            own[name] = torch.from_numpy(array)
        elif isinstance(live, np.ndarray) and live.shape == array.shape and live.flags.writeable:
            live[...] = array
        else:
            own[name] = array
    else:
        own[name] = value
    return True
