"""Variables of a training loop that hold what nobody carries: averages of the weights, target networks, generators.

A record carries what hangs on the model and what the session was given. What stands in a variable beside them starts
over at a resume. So the loop's variables are looked at, and what changes is named while there is time to register it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import logging
import math
import random
import sys
import time
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import CodeType, FrameType
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from memckpt.capture.beside.attributes import (
    LIBRARIES,
    attributes_of,
    is_container,
    module_trace,
    storage_of,
    tensor_trace,
    tensors_in,
)
from memckpt.capture.data.own_state import carried_generators
from memckpt.state import codec, rng
from memckpt.state.tensors import local, same_bits, why_not_held

_log = logging.getLogger("memckpt")
#: Share of the time that pairs of looks may take, behind the first ones: each look takes milliseconds.
_SHARE = 0.002
#: Objects in a variable are looked into, and objects that are attributes of these.
_DEPTH = 2
#: Containers are looked into as deep.
_DEPTH_OF_CONTAINERS = 2
#: Most functions that are looked into, most members of all containers there, and of one: a look takes milliseconds.
_MOST_FRAMES, _MOST_MEMBERS, _MOST_IN_ONE = 8, 20_000, 4096
#: Classes of containers, without those of the user, which would run code.
_CONTAINERS = {dict, OrderedDict, defaultdict, list, tuple, deque}
#: Who calls one of these in a function may keep the dict of its variables, which a look would fill anew.
_ASKS_FOR_VARIABLES = frozenset({"locals", "vars", "dir", "exec", "eval"})
_PLAIN = {type(None), bool, int, float, complex, str, bytes}
#: First elements that tell whether a tensor may equal another one.
_FEW = 8
#: Tensors of a variable that are sampled for a resume, and elements of each.
_SAMPLED, _SAMPLED_ELEMENTS = 64, 16
#: What loaders and samplers of libraries draw from, and what leads there.
_PARTS_OF_LOADERS = ("generator", "synchronized_generator", "sampler", "batch_sampler", "dataset")
#: Generators whose states each commit looks at: some microseconds for each.
_MOST_GENERATORS = 16
#: Frameworks with loops of their own: state beside the model stands in modules and callbacks there.
_LOOPS = frozenset({"lightning", "pytorch_lightning", "transformers"})


@dataclass(frozen=True)
class _Seen:
    """A tensor as a look has found it, with a trace of its values.

    `container`: what it is in, until the next commit; None where that is too much for its device to be kept so long.
    """

    container: object
    tensor: weakref.ref[torch.Tensor]
    trace: Any


@dataclass
class _Generator:
    """A generator in a variable: a digest of the state in which it was found, and its seed at the last commit.

    `seedings`: number of commits in a row since each of which it was seeded anew. From two on each step seeds it.
    """

    found: rng.AnyGenerator
    first: bytes
    seed: int | None = None
    seedings: int = 0


@dataclass
class _Found:
    """Findings of a look: modules by name, and tensors in containers by the name of the outermost one.

    `met`: what is carried or has been looked into, by `id`; `left`: number of members and objects that still may be.
    `roots`: by name of a module or container, the variable that leads to it; `bound`: all variables.
    """

    met: set[int]
    left: int = _MOST_MEMBERS
    modules: dict[str, nn.Module] = field(default_factory=dict)
    tensors: defaultdict[str, dict[str, tuple[object, torch.Tensor]]] = field(default_factory=lambda: defaultdict(dict))
    generators: dict[str, rng.AnyGenerator] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)


class LoopVariables:
    """Looks at the variables of the functions that lead to a commit, in pairs of successive commits.

    An average is written in place, or its tensors are replaced in a container that stays. What a step makes anew, as
    copies of the gradients, is in a new container: the old one is kept for a step, so that none comes in its place.
    Only tensors of the shapes of all that is trained are an average.

    Args:
        owners: objects that are carried, and all that hangs on them.
        trained: the modules whose parameters are trained.
        inexact: called with the reason when something changes that is not carried.
    """

    #: Those of all sessions in this process: what one carries is no loss to another.
    _all: ClassVar[weakref.WeakSet[LoopVariables]] = weakref.WeakSet()

    def __init__(
        self,
        owners: Callable[[], Iterable[object]],
        trained: Callable[[], Iterable[nn.Module]],
        inexact: Callable[[str], None],
    ) -> None:
        self.owners = owners
        self._trained = trained
        self._inexact = inexact
        self._captures = 0
        self._has_begun_pair = False
        #: When the next pair of looks is due, by the clock of `time.perf_counter`.
        self._due = math.inf
        self._modules: dict[str, tuple[weakref.ref[nn.Module], Any]] = {}
        self._tensors: dict[str, _Seen] = {}
        #: Samples of what the last look has found and nobody carries, by name: its variable, bytes of some elements.
        #: Each record has them.
        self.samples: dict[str, tuple[str, torch.Tensor]] = {}
        #: Generators that the last look has found and nobody carries, by name.
        self._generators: dict[str, _Generator] = {}
        #: By name, digests of the states of those that have drawn, and that not each step seeds. Each record has them.
        self.drawn: dict[str, bytes] = {}
        #: The variables that lead to what the look has found, by its name.
        self._roots: Mapping[str, str] = {}
        #: Names of which all has been said.
        self._said: set[str] = set()
        self._all.add(self)

    def look(self, provided: Mapping[str, Any]) -> None:
        """Say what has changed since the last look; called in each commit. `provided`: values that are carried."""
        begins, ends = self._begins_pair(), self._has_begun_pair
        if begins or ends:
            began = time.perf_counter()
            self.samples = {}
            found, carried = self._find_all(provided)
            self._compare_modules(found.modules, carried)
            self._compare_tensors(found.tensors, carried, begins)
            self._keep_generators(found.generators)
            now = time.perf_counter()
            self._due = now + 2 * (now - began) / _SHARE
        self._has_begun_pair = begins
        self._follow_draws()

    def _begins_pair(self) -> bool:
        """Whether this look and the next one are compared: in many of the first commits, then as time allows."""
        number, self._captures = self._captures, self._captures + 1
        return not number & (number - 1) or time.perf_counter() >= self._due

    def _keep_generators(self, found: Mapping[str, rng.AnyGenerator]) -> None:
        before, self._generators = self._generators, {}
        for name, generator in list(found.items())[:_MOST_GENERATORS]:
            known = before.get(name)
            with _skipping(name):
                if known is None or known.found is not generator:
                    known = _Generator(generator, _digest(generator))
                self._generators[name] = known

    def _follow_draws(self) -> None:
        """Note the states of generators that have drawn since they were found: what never draws may begin anyhow."""
        drawn = {}
        for name, each in self._generators.items():
            with _skipping(name):
                seed = each.found.initial_seed() if isinstance(each.found, torch.Generator) else None
                each.seedings, each.seed = each.seedings + 1 if seed != each.seed else 0, seed
                now = _digest(each.found)
                if (now != each.first or name in self.drawn) and each.seedings < 2:
                    drawn[name] = now
        self.drawn = drawn

    def differing_draws(self, drawn: Mapping[str, bytes]) -> list[str]:
        """Names of those of :attr:`drawn` that are in another state in this process than there."""
        if not drawn:
            return []
        self._keep_generators(self._find_all({})[0].generators)
        found = self._generators
        return [name for name, state in drawn.items() if name in found and _digest(found[name].found) != state]

    def not_restored(self, samples: Mapping[str, tuple[str, torch.Tensor]], provided: Mapping[str, Any]) -> list[str]:
        """Why a resume is not exact: variables are not what they were by the :attr:`samples` of the resumed record.

        Looked at where training is about to go on. What is not bound by then may be made behind it.
        """
        if not samples:
            return []
        self.samples = {}
        found, carried = self._find_all(provided)
        self._compare_modules(found.modules, carried)
        self._compare_tensors(found.tensors, carried, False)
        reasons = []
        for name, (root, held) in samples.items():
            if name in self.samples:
                _, now = self.samples[name]
                differs = held.numel() > 0 and not torch.equal(now.cpu(), held.cpu())
            else:  # carried by now, or the variable has something else
                differs = name not in found.roots and root in found.bound and found.left > 0
            if not differs:
                continue
            self._said.add(name)
            reasons.append(
                f"{name} is not carried, and is not what it was behind that step; make it an attribute of the model, "
                "give it to attach() in extra_modules, or register() an object that has it, with its `attributes`"
            )
        self._modules, self._tensors = {}, {}
        return reasons

    def _find_all(self, provided: Mapping[str, Any]) -> tuple[_Found, _Carried]:
        """Contents of the variables of the calls that lead here, and what is carried."""
        carried = _Carried(chain.from_iterable(each.owners() for each in list(self._all)), provided)
        found = _Found(carried.objects | set(map(id, carried_generators())))
        for frame in _frames():
            where = "" if frame.f_code.co_name == "<module>" else f" of {frame.f_code.co_name}()"
            for name, value in _variables_of(frame).items():
                if not name.startswith("__"):
                    found.bound.add(f"the variable {name}{where}")
                    with _skipping(name):
                        _find(found, name, f"the variable {{}}{where}", value, _DEPTH)
        self._roots = found.roots
        return found, carried

    def _compare_modules(self, found: Mapping[str, nn.Module], carried: _Carried) -> None:
        before, self._modules = self._modules, {}
        for name, module in found.items():
            if name not in self._said:
                with _skipping(name):
                    self._compare_module(name, module, before.get(name, (None, None)), carried)

    def _compare_module(
        self, name: str, module: nn.Module, before: tuple[weakref.ref[nn.Module] | None, Any], carried: _Carried
    ) -> None:
        tensors = [one for one in chain(module.parameters(), module.buffers()) if not why_not_held(one) and one.numel()]
        if all(map(carried.has, tensors)):
            return
        self._modules[name] = weakref.ref(module), module_trace(module)
        held, trace = before
        changes = held is not None and held() is module and self._modules[name][1] != trace
        copies = all(map(carried.equals, tensors))
        self._take_sample(name, [] if copies else tensors)
        if changes and not copies:
            what = f"{name}, a {type(module).__qualname__}, changes and is not carried"
            self._say(name, f"{what}; make it an attribute of the model, or give it to attach() in extra_modules")

    def _compare_tensors(
        self, found: Mapping[str, Mapping[str, tuple[object, torch.Tensor]]], carried: _Carried, is_first: bool
    ) -> None:
        trained = [_shapes(each for each in module.parameters() if each.requires_grad) for module in self._trained()]
        trained = [shapes for shapes in trained if shapes]
        before, self._tensors = self._tensors, {}
        for name, tensors in found.items():
            if name not in self._said:
                with _skipping(name):
                    self._compare_container(name, tensors, before, trained, carried, is_first)

    def _compare_container(
        self,
        name: str,
        tensors: Mapping[str, tuple[object, torch.Tensor]],
        before: Mapping[str, _Seen],
        trained: Sequence[Counter[torch.Size]],
        carried: _Carried,
        is_first: bool,
    ) -> None:
        held = {path: each for path, each in tensors.items() if not why_not_held(each[1])}
        if not _covers(held, trained):  # a look at what is carried is dearer
            return
        held = {path: each for path, each in held.items() if not carried.has(each[1])}
        if not _covers(held, trained):
            return
        copies = all(carried.equals(one) for _, one in held.values())
        self._take_sample(name, [] if copies else [one for _, one in held.values()])
        keeps = is_first and _has_room([one for _, one in held.values()])
        for path, (container, one) in held.items():
            # A view that a write to its base has left behind raises an error where it is asked whether it is a leaf.
            if one.requires_grad and (one._is_view() or not one.is_leaf):
                continue
            now = self._tensors[path] = _Seen(container if keeps else None, weakref.ref(one), tensor_trace(one))
            then = before.get(path)
            if then is None:
                continue
            written = then.tensor() is one and then.trace != now.trace
            replaced = then.container is container and then.tensor() is not one
            if (written or replaced) and not carried.equals(one):
                what = f"{name}: its tensors change and are not carried"
                self._say(name, f"{what}; register() an object that has them, with its `attributes`")
                return

    def _take_sample(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Take a sample of uncarried tensors; none of copies of what is carried, of which it counts that they exist."""
        sample = torch.empty(0, dtype=torch.uint8)
        held = [local(one).detach() for one in tensors[:_SAMPLED]]
        if len({one.device for one in held}) == 1:
            strided = (one.reshape(-1)[:: max(1, one.numel() // _SAMPLED_ELEMENTS)] for one in held)
            sample = torch.cat([one[:_SAMPLED_ELEMENTS].contiguous().view(torch.uint8) for one in strided])
        self.samples[name] = self._roots[name], sample

    def _say(self, name: str, what: str) -> None:
        self._said.add(name)
        self._inexact(what)


class _Carried:
    """Objects, and the memory of tensors, that are carried."""

    def __init__(self, owners: Iterable[object], provided: Mapping[str, Any]) -> None:
        self._owners = list(owners)
        inside = [each for one in self._owners if isinstance(one, nn.Module) for each in one.modules()]
        own = (value for one in inside for value in vars(one).values() if isinstance(value, rng.GENERATOR_TYPES))
        self.objects = {id(each) for each in (*self._owners, *inside, *own)}
        self._provided = list(_tensors_in(dict(provided)))

    @functools.cached_property
    def _tensors(self) -> list[torch.Tensor]:
        tensors = list(self._provided)
        for one in self._owners:
            if isinstance(one, nn.Module):
                tensors += chain(one.parameters(), one.buffers())
            elif isinstance(one, Optimizer):
                tensors += tensors_in(list(one.state.values()))
                tensors += tensors_in(one.param_groups)
            else:
                tensors += tensors_in(one if is_container(one) else attributes_of(one))
        return [each for each in tensors if not why_not_held(each)]

    @functools.cached_property
    def _memory(self) -> set[int]:
        return set(map(storage_of, self._tensors))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether its memory, or that of which it is a view, is that of something carried."""
        return storage_of(tensor) in self._memory

    def equals(self, tensor: torch.Tensor) -> bool:
        """Whether something carried has the same values: it is a copy. Values on a device would have to be waited for:
        there it is one if a value that is provided has its shape."""
        if tensor.device.type != "cpu":
            return any((each.shape, each.dtype) == (tensor.shape, tensor.dtype) for each in self._provided)
        return any(same_bits(local(tensor), one) for one in self._copies.get(_key(tensor), ()))

    @functools.cached_property
    def _copies(self) -> dict[Any, list[torch.Tensor]]:
        copies: dict[Any, list[torch.Tensor]] = {}
        for one in self._tensors:
            if one.device.type == "cpu":
                copies.setdefault(_key(one), []).append(local(one))
        return copies


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """As `tensors_in`, with arrays as tensors."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fc":
        yield torch.from_numpy(np.array(value))
    elif is_container(value):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)
    else:
        yield from tensors_in(value)


def _key(tensor: torch.Tensor) -> Any:
    """Differs for most tensors of other values; for one in host memory."""
    return tensor.shape, tensor.dtype, repr(local(tensor).flatten()[:_FEW].tolist())


def _shapes(tensors: Iterable[torch.Tensor]) -> Counter[torch.Size]:
    """Shapes of those that have elements: memory of none tells no copy from what is carried."""
    return Counter(one.shape for one in tensors if one.numel())


def _covers(held: Mapping[str, tuple[object, torch.Tensor]], trained: Iterable[Counter[torch.Size]]) -> bool:
    """Whether there are tensors of all shapes that are trained in some module."""
    shapes = _shapes(one for _, one in held.values())
    return any(shapes >= each for each in trained)


@contextlib.contextmanager
def _skipping(name: str) -> Iterator[None]:
    """Leave out a variable whose value cannot be looked at: nobody has asked for it, and training goes on."""
    try:
        yield
    except Exception:  # of the user's class, or of a library's: what it raises is no fault of the training
        _log.debug("memckpt: the variable %s is not looked at", name, exc_info=True)


def _frames() -> Iterator[FrameType]:
    """The calls of the script's functions that have led here, up to a framework's loop."""
    frame, left = sys._getframe(1), _MOST_FRAMES
    while (caller := frame.f_back) is not None and left:
        frame = caller
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _LOOPS:
            return
        if package not in LIBRARIES and not _asks_for_variables(frame.f_code):
            left -= 1
            yield frame


@functools.lru_cache(maxsize=256)
def _asks_for_variables(code: CodeType) -> bool:
    """Whether a function calls one of these built-in functions: `model.eval()`, say, is none."""
    if _ASKS_FOR_VARIABLES.isdisjoint(code.co_names):
        return False
    loads = (each for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return any(each.argval in _ASKS_FOR_VARIABLES for each in loads)


def _variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a call by name; nothing is kept alive by it.

    Up to Python 3.12 a call of a function keeps the dict that it was asked for, and with it what its variables held
    then: a batch on the device, say. Where nobody else has this dict it is emptied.
    """
    held = frame.f_locals
    found = dict(held)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(held) is dict and sys.getrefcount(held) <= 3:
        held.clear()
    return found


def _has_room(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether these may be kept for a step: on an accelerator, by the most memory that it has held until now."""
    left: dict[torch.device, int] = {}
    for one in tensors:
        device = one.device
        if device.type != "cpu" and device not in left:
            module = torch.get_device_module(device)
            if not (hasattr(module, "mem_get_info") and hasattr(module, "max_memory_allocated")):
                return False
            left[device] = module.mem_get_info(device)[1] - module.max_memory_allocated(device)
        if device.type != "cpu":
            left[device] -= 2 * one.nbytes
    return all(room > 0 for room in left.values())


def _find(found: _Found, name: str, text: str, value: Any, depth: int) -> None:
    """Add the modules, and the tensors in containers, of a variable or an attribute, and of objects below it."""
    left: list[tuple[str, Any, object, int]] = [(name, value, None, _DEPTH_OF_CONTAINERS)]
    while left and found.left > 0:
        path, one, container, inner = left.pop()
        kind: Any = type(one)
        found.left -= 1
        if kind in _PLAIN:
            continue
        if kind in _CONTAINERS:
            if inner and len(one) <= _MOST_IN_ONE and id(one) not in found.met:
                found.met.add(id(one))
                members = list(one.items() if issubclass(kind, dict) else enumerate(one))
                found.left -= len(members)
                # A key of another class has no name that costs nothing: its position stays as long as the dict does.
                labels = (key if type(key) is str else position for position, (key, _) in enumerate(members))
                named = zip(labels, members, strict=True)
                left += [(f"{path}.{label}", member, one, inner - 1) for label, (_, member) in named]
        elif issubclass(kind, torch.Tensor):
            if container is not None:
                found.tensors[text.format(name)][text.format(path)] = container, one
                found.roots[text.format(name)] = text.format(name.partition(".")[0])
        elif id(one) in found.met:
            continue
        elif issubclass(kind, nn.Module):
            found.met.add(id(one))
            found.modules[text.format(path)] = one
            found.roots[text.format(path)] = text.format(name.partition(".")[0])
        elif issubclass(kind, rng.GENERATOR_TYPES):
            if not issubclass(kind, random.SystemRandom):  # it has no state
                found.generators[text.format(path)] = one
        elif depth:
            found.met.add(id(one))
            looked_into = _is_looked_into(kind)
            for attribute, held in list(_attributes_inside(one, kind, looked_into).items()):
                _find(found, f"{path}.{attribute}", text, held, depth - looked_into)


def _attributes_inside(one: object, kind: Any, looked_into: bool) -> Mapping[str, Any]:
    if looked_into:
        return attributes_of(one)
    if issubclass(kind, (DataLoader, Sampler)):
        own = attributes_of(one)
        return {name: own[name] for name in _PARTS_OF_LOADERS if name in own}
    return {}


def _digest(generator: rng.AnyGenerator) -> bytes:
    return xxhash.xxh3_64_digest(codec.encode(rng.capture_generator(generator)))


def _is_looked_into(kind: Any) -> bool:
    """Whether objects of a class may hold an average: no library that is known not to has made it."""
    library = str(kind.__module__).partition(".")[0] in LIBRARIES
    return not (library or issubclass(kind, (Optimizer, type)))
