"""Attributes of the user's objects, by dotted name: read at each commit, written back on a resume.

State that hooks keep in attributes (a curriculum's level, a moving threshold) is in no state_dict(). Generators, and
objects with state_dict() and load_state_dict(), are carried by their state, also those that nobody has named.
"""

from __future__ import annotations

import array
import copy
import functools
import itertools
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from memckpt.capture.beside.modules import is_metric
from memckpt.capture.data.iteration import followed
from memckpt.errors import ConfigurationError, ForeignStateError, UnsupportedStateError
from memckpt.state import codec, rng
from memckpt.state.tensors import local, version, why_not_held
from memckpt.user_messages import nbytes_text

_MISSING = object()
#: Key of the captured form of an object; its value is the kind: "generator" or "state".
_OBJECT = "\0object"
#: Largest state of an object, in bytes, that is carried although nobody has named it: each commit copies it.
_LARGE = 256 << 10
#: Objects are looked for in every 64th capture, the 1st, 2nd, 4th, 8th ..., and those that find a new one in its place.
_LOOK_EVERY = 64
#: Objects whose state others carry (positions of loaders, records of optimizers), or which have plenty of it.
_OTHERS = (nn.Module, torch.optim.Optimizer, DataLoader)
#: Our own packages: their objects hold what is carried already.
_OURS = frozenset({"memckpt", "lightning_memckpt", "accelerate_plugin", "transformers_memckpt"})
LIBRARIES = _OURS.union(
    sys.stdlib_module_names, ("torch", "numpy", "lightning", "pytorch_lightning", "accelerate", "transformers")
)
_CONTAINERS = (dict, list, tuple, deque)
#: Attributes of each module: torch looks into these.
MODULE_NAMES = frozenset(vars(nn.Module()))
#: Members of a container that are looked at where one may have come: its size has changed, or one was None.
_FEW_MEMBERS = 64
#: Members of a container that are looked at.
_MOST_MEMBERS = 4096
#: Tensors of a module that nobody carries, and elements of each, that are compared.
_FEW_SAMPLED = 8
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_ARRAYS = frozenset({torch.Tensor, torch.Size, torch.dtype, torch.device, np.ndarray, array.array})

#: Root objects of dotted names, looked up on each call: a framework creates some of them late.
Roots = Callable[[], Mapping[str, object]]


class Attributes:
    """The attributes that a user has named.

    Args:
        names: ``"module.level"``, ``"callbacks.Curriculum.level"``: a root, then attributes, keys of dicts, or indices.
        roots: the root objects by name; a root's own name may contain dots.

    Raises:
        ConfigurationError: a name is malformed or given twice.
    """

    def __init__(self, names: Iterable[str], roots: Roots) -> None:
        self.names = checked_names(names)
        self._roots = roots
        #: Values that a commit could not carry, as text, in the order of discovery.
        self.left_out: dict[str, None] = {}
        #: Modules whose tensors the session has; a name of one of them asks for nothing more.
        self.staged: set[nn.Module] = set()

    def check(self) -> None:
        """Check, as training starts, that every attribute can be carried.

        Raises:
            ConfigurationError: an attribute does not exist.
            UnsupportedStateError: a value would not survive encoding; names the attribute and its type.
        """
        for name in self.names:
            value = self._value(name)
            if value is _MISSING:
                raise ConfigurationError(
                    f"attributes: expected {name!r} to exist when training starts, found no such attribute; "
                    f"names begin with one of {sorted(self._roots())}. Set it in __init__() or setup(), or take it out "
                    "of `attributes`"
                )
            if self._is_staged(value):
                continue
            if (found := unstorable(_captured(value), "")) is not None:
                raise UnsupportedStateError(f"attribute {name}{found[0]}", found[1])

    def capture(self) -> dict[str, Any]:
        """The current values; they may share memory with live ones until they are encoded.

        A value that can no longer be encoded is left out and listed in :attr:`left_out`; training goes on.
        """
        values = {}
        for name in self.names:
            if self._is_staged(value := self._value(name)):
                continue
            value = _captured(value)
            found = ("", "nothing") if value is _MISSING else unstorable(value, "")
            if found is None:
                values[name] = value
            else:
                self.left_out.setdefault(f"attribute {name}{found[0]} ({found[1]})")
        return values

    def objects(self) -> list[Any]:
        """The values that exist."""
        return [value for name in self.names if (value := self._value(name)) is not _MISSING]

    def present(self) -> dict[str, Any]:
        """Copies of the values that exist already, before training starts."""
        live = ((name, self._value(name)) for name in self.names)
        values = [(name, _captured(value)) for name, value in live if not self._is_staged(value)]
        return {
            name: copy.deepcopy(value)
            for name, value in values
            if value is not _MISSING and unstorable(value, "") is None
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Write copies of the values that :meth:`capture` returned to the objects that exist.

        Raises:
            ForeignStateError: a generator has become one of another kind.
        """
        for name in self.names:
            if name in values:
                self._restore(name, values[name])

    def _restore(self, name: str, value: Any) -> bool:
        """Write a copy of one value back; False if its holder, or an object with a state, is not there."""
        holder, last = self._find(name)
        if holder is _MISSING:
            return False
        value = copy.deepcopy(value)
        kind = value.get(_OBJECT) if isinstance(value, dict) else None
        live = _step(holder, last) if kind is not None else None
        if kind is None:
            _set(holder, last, value)
        elif isinstance(live, rng.GENERATOR_TYPES):
            try:
                rng.restore_generator(live, value["state"])
            except ValueError as error:
                raise ForeignStateError(
                    f"attribute {name}: {error}; make it as the run that is continued did, or start over with "
                    "resume='never'"
                ) from error
        elif kind == "generator" and (live is None or live is _MISSING):
            _set(holder, last, rng.make_generator(value["state"]))
        elif live is not None and _is_stateful(live):
            live.load_state_dict(value["state"])
        else:
            return False
        return True

    def _is_staged(self, value: Any) -> bool:
        return isinstance(value, nn.Module) and value in self.staged

    def _value(self, name: str) -> Any:
        holder, last = self._find(name)
        return _MISSING if holder is _MISSING else _step(holder, last)

    def _find(self, name: str) -> tuple[Any, str]:
        """The object that holds the attribute (`_MISSING` if there is none), and the attribute's own name."""
        roots = self._roots()
        # The longest root wins: `callbacks.A.B` may itself be a root.
        root = max((each for each in roots if name.startswith(f"{each}.")), key=len, default=None)
        if root is None:
            return _MISSING, ""
        held: Any = roots[root]
        *parts, last = name[len(root) + 1 :].split(".")
        for part in parts:
            held = _step(held, part)
            if held is _MISSING:
                break
        return held, last


class FoundObjects(Attributes):
    """Generators and objects with a state that hang on the roots, or on modules below them, and that nobody has named.

    Args:
        roots: the root objects by name.
        elsewhere: objects that are carried by other means.
        inexact: called with the reason when one changes that is not carried.
        named: how a user names such an object, the end of a sentence with a place for the name.
    """

    def __init__(
        self, roots: Roots, elsewhere: Callable[[], Iterable[object]], inexact: Callable[[str], None], named: str
    ) -> None:
        super().__init__((), roots)
        self._elsewhere = elsewhere
        self._inexact = inexact
        self._named = named
        self._captures = 0
        #: Places that an object with a state may come to: an attribute that is None, by dict and name; a container.
        self._empty: list[tuple[dict[str, Any], str]] = []
        self._sized: list[tuple[Any, int, int, bool]] = []
        #: Objects that have no state yet: their state_dict() raises.
        self._stateless: list[Any] = []
        #: Names of the objects by `id`, as they were found first.
        self._first_names: dict[int, str] = {}
        #: Objects that are too large to be carried unasked, with a trace of their state as it was found.
        self._watched: dict[str, Any] = {}
        #: Their tensors, as long as nothing has been said of them: a write is seen in the commit behind it.
        self._unchanged: list[tuple[weakref.ref[torch.Tensor], int]] = []
        #: Modules with tensors that nobody carries, and a trace of these; weak, as a script replaces copies of a model.
        self._modules: dict[str, tuple[weakref.ref[nn.Module], Any]] = {}
        #: Plain tensors by name, as the last look has found them, and attributes of which all is known.
        self._plain: dict[str, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._known: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """The states of all that have been found."""
        power_of_two = not self._captures & (self._captures - 1)
        if power_of_two or self._captures % _LOOK_EVERY == 0 or self._may_have_come():
            self._find_objects()
        self._captures += 1
        for name, (reference, trace) in list(self._modules.items()):
            module = reference()
            if module is None:
                del self._modules[name]
            elif module_trace(module) != trace:
                self._say_module(name, module)
        try:
            return self.capture()
        except Exception:  # the look leaves out the one that raises, and says so
            self._find_objects()
            return self.capture()

    def _say_module(self, name: str, module: nn.Module) -> None:
        self._inexact(
            f"{name}, a {type(module).__qualname__}, changes and is not carried: it came while training ran, or its "
            "tensors cannot be held; make it before training begins"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; says which are not there any more."""
        for name, value in state.items():
            try:
                problem = "" if self._restore(name, value) else "it is not there at the resume"
            except Exception as error:  # nobody has asked for it: it is said, and training goes on
                problem = f"its load_state_dict() raises {type(error).__name__}: {error}"
            if problem:
                self._inexact(f"{name} had a state in the run that is continued, and {problem}")

    def _may_have_come(self) -> bool:
        """Whether one may have been made since the last look: on a name that was None, a new one, or in a container."""
        filled = [value for own, name in self._empty if (value := own.get(name)) is not None]
        if any(_is_kept(one) or any(map(_is_kept, _few(one))) for one in filled):
            return True
        if any(_has_state(one) for one in self._stateless):
            return True
        if any((one := held()) is None or version(one) != written for held, written in self._unchanged):
            return True
        for number, (place, size, objects, has_none) in enumerate(self._sized):
            if has_none or len(place) != size:
                self._sized[number] = place, len(place), objects, has_none
                if _count_kept(place) > objects:
                    return True
        return False

    def _find_objects(self) -> None:
        elsewhere = list(chain(self._elsewhere(), followed()))
        roots = self._roots()
        modules = [each for each in chain(roots.values(), elsewhere) if isinstance(each, nn.Module)]
        carried = {id(each) for each in chain(elsewhere, *(module.modules() for module in modules))}
        metrics = {id(vars(one)) for module in modules for one in module.modules() if is_metric(one)}
        plain: list[tuple[str, str, torch.Tensor, bool]] = []
        found: dict[int, dict[str, Any]] = {}
        self._empty, self._sized, self._stateless, self._unchanged = [], [], [], []
        for own, attribute, name, of_object in _attributes_below(roots):
            if own[attribute] is None:
                self._empty.append((own, attribute))
            for path, one in _members(name, own[attribute]):
                if is_container(one):
                    self._sized.append((one, len(one), _count_kept(one), any(each is None for each in _few(one))))
                elif issubclass(type(one), torch.Tensor) and id(own) not in metrics:
                    plain.append((name, path, one, of_object))
                # An object's other objects are its own business: they may be there to be given to another.
                elif id(one) not in carried and (issubclass(type(one), nn.Module) if of_object else _is_kept(one)):
                    found.setdefault(id(one), {}).setdefault(path, one)
        self._sized += [(own, len(own), _count_kept(own), False) for own, _, _ in _owners_below(roots)]
        staged = {_address(one) for each in modules for one in _staged(each)} - {None}
        names, first_names = [], {}
        for known, paths in found.items():
            # Of several names the one that it had first: others may be set anew in each step.
            name = self._first_names.get(known, "")
            name = name if name in paths else next(iter(paths))
            first_names[known] = name
            if isinstance(paths[name], nn.Module):
                self._watch_module(name, paths[name], staged)
            elif self._can_carry(name, paths[name], staged):
                names.append(name)
        # Others were made for the state.
        self._unchanged = [(held, written) for held, written in self._unchanged if held() is not None]
        self.names, self._first_names = tuple(names), first_names
        self._watch_tensors(plain, [one for each in modules for one in _staged(each)], [*tensors_in(elsewhere)])

    def _watch_tensors(
        self,
        found: list[tuple[str, str, torch.Tensor, bool]],
        staged: list[torch.Tensor],
        carried: list[torch.Tensor],
    ) -> None:
        """Say of which attribute tensors change that nobody carries: averages, say, which are no buffers.

        What is new in each step, or belongs to an object of a script's class, is an average where there are tensors of
        the shapes of all that is trained, and a result, or scratch memory, else.
        """
        known, self._plain = self._plain, {}
        staged = [one for one in {id(each): each for each in staged}.values() if not why_not_held(one)]
        trained = Counter(one.shape for one in staged if one.requires_grad)
        shapes: defaultdict[str, Counter[torch.Size]] = defaultdict(Counter)
        found = [each for each in found if not why_not_held(each[2])]
        for name, _, one, _ in found:
            shapes[name][one.shape] += 1
        for name, path, one, of_object in found:
            # A view that a write to its base has left behind raises an error where it is asked whether it is a leaf.
            result = one.requires_grad and (one._is_view() or not one.is_leaf)
            if result or name in self._known:
                continue
            self._plain[path] = weakref.ref(one), tensor_trace(one)
            held, trace = known.get(path, (None, None))
            if held is None or (held() is one and self._plain[path][1] == trace):
                continue
            is_average = bool(trained) and path != name and shapes[name] >= trained
            if is_average or (held() is one and not of_object):
                views = {*map(storage_of, staged)}
                if storage_of(one) not in views and not any(each is one or same(each, one) for each in carried):
                    self._known.add(name)
                    what = f"{name}: its tensors change and are not carried"
                    self._inexact(f"{what}; make them buffers of a module, or name it in `attributes`")

    def _watch_module(self, name: str, module: nn.Module, staged: set[int | None]) -> None:
        tensors = list(_staged(module))
        if tensors and not all(_address(one) in staged for one in tensors):
            self._modules.setdefault(name, (weakref.ref(module), module_trace(module)))

    def _can_carry(self, name: str, value: Any, staged: set[int | None]) -> bool:
        """Whether an object's state is carried; says why not, once it changes."""
        try:
            state = _captured(value)
        except Exception as error:  # it has no state, or none to be had unasked
            if name in self.names:
                self._inexact(f"{name} is not carried any more: its state_dict() raises {error}")
            else:
                self._stateless.append(value)  # as before it is fitted
            return False
        wraps = any(_address(tensor) in staged for tensor in tensors_in(state))
        if wraps:  # it would load the model a second time
            reason = "its state has tensors of the model, too"
        elif codec.unencodable_paths(state):
            reason = "its state cannot be stored"
        elif (nbytes := sum(tensor.nbytes for tensor in tensors_in(state))) > _LARGE:
            reason = f"each step would copy its {nbytes_text(nbytes)}; {self._named.format(name)} to carry it"
        else:
            return True
        if name in self.names:
            self._inexact(f"{name}, a {type(value).__qualname__}, is not carried any more: {reason}")
        trace = _trace(state, staged)
        if self._watched.setdefault(name, trace) != trace:
            self._inexact(f"{name}, a {type(value).__qualname__}, changes and is not carried: {reason}")
        elif not wraps:
            self._unchanged += [(weakref.ref(one), version(one)) for one in tensors_in(state)]
        return False


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names that a user has given, validated.

    Raises:
        ConfigurationError: a name is not dotted, or is given twice.
    """
    if isinstance(names, str):
        raise ConfigurationError(f"attributes: expected a list of names, found the str {names!r}")
    found = tuple(names)
    for name in found:
        if not isinstance(name, str) or not all(name.split(".")) or "." not in name:
            raise ConfigurationError(f"attributes: expected dotted names as 'module.level', found {name!r}")
    if twice := sorted({name for name in found if found.count(name) > 1}):
        raise ConfigurationError(f"attributes: expected each name once, found {twice[0]!r} again")
    return found


def modules_beside(modules: Iterable[nn.Module], owners: Mapping[str, object]) -> dict[str, nn.Module]:
    """Modules that none of these contains, by a name that is stable over restarts.

    They are attributes of the owners or of modules below these, or members of a container there: an average of the
    weights, hidden from parameters(). Those whose tensors are all known are wrappers. Those with tensors that cannot be
    held, or are on another device, are left out: nobody has asked for them.
    """
    inside = {id(each) for module in modules for each in module.modules()}
    known = {id(tensor) for module in modules for tensor in _all_tensors(module)}
    devices = {tensor.device for module in modules for tensor in _all_tensors(module)}
    found: dict[str, nn.Module] = {}
    looked: Mapping[str, object] = owners
    while looked:
        new: dict[str, nn.Module] = {}
        for own, attribute, name, _ in _attributes_below(looked):
            for path, one in _members(name, own[attribute]):
                if not issubclass(type(one), nn.Module) or id(one) in inside or isinstance(one, torch.jit.ScriptModule):
                    continue
                tensors = list(_all_tensors(one))
                if tensors and known.issuperset(map(id, tensors)):
                    continue
                if any(why_not_held(each) or each.device not in devices for each in tensors):
                    continue
                inside.update(map(id, one.modules()))
                known.update(map(id, tensors))
                new[path] = one
        found.update(new)
        looked = new
    return found


def standing_at(owners: Mapping[str, object], name: str) -> nn.Module | None:
    """The module that stands now where :func:`modules_beside` has found one of that name; None if there is none."""
    held, last = Attributes((), lambda: owners)._find(name)
    found = _MISSING if held is _MISSING else _step(held, last)
    return found if issubclass(type(found), nn.Module) else None


def _all_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit for bit; False if one cannot be stored."""
    if codec.unencodable_paths([one, other]):
        return False
    return codec.encode(one) == codec.encode(other)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _captured(value: Any) -> Any:
    """The value itself, or the captured form of an object with a state."""
    if isinstance(value, rng.GENERATOR_TYPES):
        try:
            return {_OBJECT: "generator", "state": rng.capture_generator(value)}
        except ValueError:  # SystemRandom, which has no state
            return value
    if _is_stateful(value) and not isinstance(value, type):
        return {_OBJECT: "state", "state": value.state_dict()}
    return value


def _has_state(value: Any) -> bool:
    try:
        value.state_dict()
    except Exception:  # it has none yet
        return False
    return True


def _step(held: Any, part: str) -> Any:
    if isinstance(held, dict):
        return held.get(_key_of(held, part), _MISSING)
    if isinstance(held, (list, tuple, deque)) and part.isdecimal():
        return held[int(part)] if int(part) < len(held) else _MISSING
    return getattr(held, part, _MISSING)


def _set(holder: Any, last: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[_key_of(holder, last)] = value
    elif isinstance(holder, (list, deque)):
        holder[int(last)] = value
    else:
        setattr(holder, last, value)


def _owners_below(roots: Mapping[str, object]) -> Iterator[tuple[dict[str, Any], str, bool]]:
    """The attributes, as dicts, of the roots, of modules below them, and of objects of a script's classes on these.

    Each comes with its owner's name, and whether that is such an object: an average without a state, say.
    """
    met: set[int] = set()
    for root, held in roots.items():
        for path, owner in held.named_modules() if isinstance(held, nn.Module) else [("", held)]:
            own, start = attributes_of(owner), ".".join(filter(None, (root, path)))
            yield own, start, False
            for attribute in [each for each in own if each not in MODULE_NAMES]:
                for name, one in _members(f"{start}.{attribute}", own[attribute]):
                    if _is_stateless(one) and id(one) not in met:
                        met.add(id(one))
                        yield attributes_of(one), name, True


def attributes_of(owner: object) -> dict[str, Any]:
    """Its attributes, without a call of its code: an object may stand for one that is elsewhere, or is gone."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _attributes_below(roots: Mapping[str, object]) -> Iterator[tuple[dict[str, Any], str, str, bool]]:
    """Each attribute there, without those that each module has: dict, key, name, and whether it is an object's."""
    for own, start, of_object in _owners_below(roots):
        for name in [each for each in own if each not in MODULE_NAMES]:
            yield own, name, f"{start}.{name}", of_object


def is_container(value: Any) -> bool:
    """Asks the class, as all below do: a proxy would ask what it stands for."""
    return issubclass(type(value), _CONTAINERS)


def _members(name: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """A value, or the members of a container and of containers in it, by dotted name; containers, too."""
    yield name, value
    if depth and is_container(value):
        named = value.items() if issubclass(type(value), dict) else enumerate(value)
        inner = depth - 1 if len(value) <= _FEW_MEMBERS else 0
        for key, one in list(itertools.islice(named, _MOST_MEMBERS)):  # at once: other threads may write to it
            if (label := _label(key)) != "" and (inner or not is_container(one)):
                yield from _members(f"{name}.{label}", one, inner)


def _label(key: Any) -> str:
    """A key of a dict as a part of a dotted name; empty where it is another one in each process."""
    text = key if isinstance(key, str) else repr(key)
    return "" if " at 0x" in text else text.replace(".", "\N{MIDDLE DOT}")


def _key_of(held: dict[Any, Any], part: str) -> Any:
    """The key of that label; the label itself where there is none."""
    if part in held:
        return part
    if part.lstrip("-").isdecimal() and int(part) in held:
        return int(part)
    return next((key for key in held if _label(key) == part), part)


def _few(value: Any) -> Iterator[Any]:
    """The first and the last members of a container, where new ones come."""
    if not is_container(value):
        return iter(())
    members = value.values() if isinstance(value, dict) else value
    first = itertools.islice(members, _FEW_MEMBERS)
    return chain(first, itertools.islice(reversed(members), min(_FEW_MEMBERS, max(len(value) - _FEW_MEMBERS, 0))))


def _is_object(value: Any) -> bool:
    """Whether it is a generator, or has a state that nobody else carries. Asks the class: its objects may run code."""
    kind: Any = type(value)
    return _is_object_class(kind)


@functools.lru_cache(maxsize=4096)
def _is_object_class(kind: type[Any]) -> bool:
    if issubclass(kind, rng.GENERATOR_TYPES):
        return True
    methods = (getattr(kind, name, None) for name in ("state_dict", "load_state_dict"))
    other = issubclass(kind, (*_OTHERS, type)) or str(kind.__module__).partition(".")[0] in _OURS
    return not other and all(map(callable, methods))


def _is_kept(value: Any) -> bool:
    """Whether it is such an object, or a module."""
    kind = type(value)
    return kind not in _PLAIN and (_is_object(value) or issubclass(kind, nn.Module))


def _is_stateless(value: Any) -> bool:
    """Whether it is of a script's class that has no state to capture."""
    kind: Any = type(value)
    return _is_stateless_class(kind)


@functools.lru_cache(maxsize=4096)
def _is_stateless_class(kind: Any) -> bool:
    library = str(kind.__module__).partition(".")[0] in LIBRARIES  # a class may have a property of that name
    return not (library or issubclass(kind, (*_OTHERS, type, torch.Tensor)) or _is_object_class(kind))


def _count_kept(container: Any) -> int:
    """Members of a container, or of an object's attributes, that are, or have, such an object or module."""
    own = isinstance(container, dict) and "_parameters" in container
    members = [one for key, one in container.items() if key not in MODULE_NAMES] if own else _few(container)
    return sum(any(map(_is_kept, _few(one))) if is_container(one) else _is_kept(one) for one in members)


def module_trace(module: nn.Module) -> list[Any]:
    """Something that differs if its tensors have changed; writes through ``.data`` are seen on the CPU only."""
    tensors = list(_all_tensors(module))
    return [*map(tensor_trace, tensors[:_FEW_SAMPLED]), *map(_trace, tensors[_FEW_SAMPLED:])]


def tensor_trace(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu" or why_not_held(tensor):
        return _trace(tensor)
    return _trace(tensor), repr(local(tensor).flatten()[:_FEW_SAMPLED].tolist())  # a NaN equals no NaN


def _staged(module: nn.Module) -> Iterator[torch.Tensor]:
    return (tensor for tensor in chain(module.parameters(), module.buffers()) if tensor.numel())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _CONTAINERS):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def _address(tensor: torch.Tensor) -> int | None:
    """Address of the values; None where they cannot be copied."""
    return None if why_not_held(tensor) else local(tensor).data_ptr()


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the memory that views of a tensor share."""
    return local(tensor).untyped_storage().data_ptr()


def _trace(value: Any, known: Collection[int | None] = ()) -> Any:
    """Something that differs if a state has changed, without reading its tensors; not those at a `known` address."""
    if isinstance(value, torch.Tensor):
        address = _address(value)
        return None if address in known else (address or id(value), version(value))
    if isinstance(value, dict):
        return {key: _trace(one, known) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_trace(one, known) for one in value]
    return value if type(value) in _PLAIN else id(value)


def unstorable(value: Any, path: str) -> tuple[str, str] | None:
    """Path and type of the first value that would not survive encoding; None if all do.

    Stricter than the codec, which decodes other subclasses as their base.
    """
    kind = type(value)
    if kind is dict and _OBJECT in value:
        paths = codec.unencodable_paths(value["state"])
        return (path, f"of which {paths[0]}") if paths else None
    if kind in _PLAIN:
        return None
    parts: Iterable[tuple[object, Any]]
    if kind in (dict, OrderedDict, Counter) or (kind is defaultdict and codec.keeps_default(value)):
        parts = chain(((f"key {key!r}", key) for key in value), value.items())
    elif kind in (list, tuple, set, frozenset, deque):
        parts = enumerate(value)
    elif kind in _ARRAYS or isinstance(value, np.generic):
        return None if not codec.unencodable_paths(value) else (path, _name(kind))
    else:
        return path, _name(kind)
    found = (unstorable(one, f"{path}.{part}") for part, one in parts)
    return next((each for each in found if each is not None), None)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
