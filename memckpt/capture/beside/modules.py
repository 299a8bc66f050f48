"""The modules in sight: which tensors they hold, looked at in each commit, and state of theirs that is no tensor.

That is: training flags, numbers of torch's own modules (Dropout's `p`), extra state, and generators in attributes.
"""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memckpt.capture.by_value import Holder
from memckpt.state import codec, rng
from memckpt.state.tensors import why_not_held


def _imported(module: str, name: str) -> Any:
    """A class to compare with, if its module is loaded: importing it takes a second."""
    return getattr(sys.modules.get(module), name, ())


def is_metric(module: nn.Module) -> bool:
    """Whether a module is of torchmetrics: a Metric, also the user's own, or a collection of them."""
    kind: Any = type(module)
    return _is_metric_class(kind)


@functools.lru_cache(maxsize=4096)
def _is_metric_class(kind: type[Any]) -> bool:
    return any(each.__module__.partition(".")[0] == "torchmetrics" for each in kind.__mro__)


def is_fsdp2(module: nn.Module) -> bool:
    """Whether fully_shard was applied to the module."""
    return isinstance(module, _imported("torch.distributed.fsdp", "FSDPModule"))


def fsdp1_wrappers(model: nn.Module) -> list[Any]:
    """The FullyShardedDataParallel modules of a model, outermost first."""
    kind = _imported("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    return [one for one in model.modules() if isinstance(one, kind)]


def put_shards_in_place(model: nn.Module) -> None:
    """Put shards in place and free whole parameters. Every rank has to call this at the same time.

    FSDP2 and FSDP1 leave whole parameters allocated after a forward without a backward. The next forward uses them as
    they are: after a restore it would compute with outdated values.

    Otherwise some ranks would gather parameters in the next forward, and wait for ranks that do not.
    """
    for module in model.modules():
        if is_fsdp2(module):
            untyped: Any = module
            untyped.reshard()
    for wrapper in fsdp1_wrappers(model):
        handle = wrapper._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        # Before the first forward the whole parameter has no storage yet.
        if hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():
            handle.reshard(free_unsharded_flat_param=True)
            handle.post_reshard()


_dtype, _training = attrgetter("dtype"), attrgetter("training")
_memory = torch.UntypedStorage.nbytes
#: Numbers that no forward reads: most modules have no others, and looking at theirs would be most of the cost.
_UNREAD = {"training", "in_features", "out_features", "in_channels", "out_channels"}
#: Where torch keeps hooks of a module, a parameter and an optimizer.
_MODULE_HOOKS = attrgetter("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
#: The same of all modules, and of all optimizers.
_HOOKS_OF_ALL = {
    name: tuple(held for key, held in vars(sys.modules[kind.__module__]).items() if re.match("_global.*_hooks$", key))
    for name, kind in (("torch.nn", nn.Module), ("torch.optim", Optimizer))
}
#: Name prefixes that compiled, checkpointed and FullyShardedDataParallel modules add.
_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def without_wrappers(name: str) -> str:
    """A tensor's or module's name, without what wrappers of modules add to it."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


class ModuleTree:
    """A model and the modules beside it, walked only when something in them has been replaced.

    Args:
        roots: the modules by the prefix of their names; the model's is empty.
        optimizers: those that step them: their hooks are looked at, too.
        places: by prefix, what returns the module that stands where that root was found, or nothing.

    Attributes:
        modules: all modules by name; `metrics`: those of torchmetrics.
        roots: those of now.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer] = (),
        places: Mapping[str, Callable[[], nn.Module | None]] = MappingProxyType({}),
    ) -> None:
        self.roots = dict(roots)
        #: All prefixes, in the order that their names keep.
        self._prefixes = tuple(roots)
        self._places = places
        self._optimizers = {f"optimizer{index}": each for index, each in enumerate(optimizers)}
        self.modules: dict[str, nn.Module] = {}
        self.metrics: dict[str, nn.Module] = {}
        self._told: dict[str, None] = {}
        self._born_kinds: dict[str, str] = {}
        self._walk()
        self._born = self._numbers_now()
        self._born_kinds, self._born_hooks = self._kinds, self._hooked_now()

    def modules_now(self) -> dict[str, nn.Module]:
        """All modules that there are now, by name."""
        return {
            without_wrappers(".".join(filter(None, (prefix, path)))): module
            for prefix, root in self.roots.items()
            for path, module in root.named_modules()
        }

    def _walk(self) -> None:
        self.modules = self.modules_now()
        self.metrics = {name: one for name, one in self.modules.items() if is_metric(one)}
        # Scripted modules have no dicts: their tensors cannot be replaced.
        plain = [one for one in self.modules.values() if isinstance(one._parameters, dict)]
        self._children = [one._modules for one in plain]
        self._params = [one._parameters for one in plain]
        self._buffers = [one._buffers for one in plain]
        self._seen = self._describe_tree()
        self._seen_buffers = _values(self._buffers)
        self._seen_sizes = _sizes(self._seen_buffers)
        self._extra = [
            (name, one)
            for name, one in self.modules.items()
            if type(one).get_extra_state is not nn.Module.get_extra_state
        ]
        # Their places: a training may make them anew, as for each epoch.
        self._generators = [
            (f"{name}.{key}", vars(one), key)
            for name, one in self.modules.items()
            for key, value in vars(one).items()
            if isinstance(value, rng.GENERATOR_TYPES)
        ]
        self._kinds = {name: type(one).__qualname__ for name, one in self.modules.items()}
        born = self._born_kinds or self._kinds
        self._changed_kinds = {
            name: self._kinds.get(name) for name in {**born, **self._kinds} if self._kinds.get(name) != born.get(name)
        }
        self._hooked_tensors = {
            without_wrappers(f"{path}.{key}" if path else key): param
            for path, module in self.modules.items()
            for key, param in module._parameters.items()
            if param is not None
        }
        self._hook_places: list[Any] = []
        self._hook_count = (-1, -1)
        self._numbers = [(name, vars(one), names) for name, one in self.modules.items() if (names := _numbers_of(one))]
        self._read_numbers = [held.get for _, held, _ in self._numbers]
        self._names_of_numbers = [names for *_, names in self._numbers]
        self._seen_numbers: list[Any] = [None]
        self._changed: dict[str, dict[str, Any]] = {}

    def _describe_tree(self) -> tuple[list[Any], list[Any]]:
        """Modules and parameters, and their dtypes and sizes, which ``bfloat16()`` changes in place."""
        held = _values(self._params)
        params = [one for one in held if one is not None]
        return held + _values(self._children), [*map(_dtype, params), *_sizes(params)]

    def moved(self) -> bool:
        """Whether modules or parameters have been replaced, added or removed since the last call, or buffers by others.

        Not where a buffer is replaced by one of the same shape, as in ``self.mean = 0.9 * self.mean``. But where that
        is another module's, or was until then.
        """
        found = {prefix: find() for prefix, find in self._places.items()}
        replaced = any(one is not self.roots.get(prefix) for prefix, one in found.items())
        if replaced:
            now: dict[str, nn.Module | None] = {**self.roots, **found}
            self.roots = {prefix: one for prefix in self._prefixes if (one := now.get(prefix)) is not None}
        held, kinds = self._describe_tree()
        buffers = _values(self._buffers)
        # `resize_()` leaves a tensor what it is, and so does giving its memory up.
        same = _identical(held, self._seen[0]) and kinds == self._seen[1] and _sizes(buffers) == self._seen_sizes
        if same and not replaced and _all_alike(buffers, self._seen_buffers):
            self._seen_buffers = buffers
            return False
        self._walk()
        return True

    def holders(self) -> dict[str, tuple[Holder, str]]:
        """The dict and key of each parameter and buffer, by name: user code may replace a tensor at any time."""
        return {
            without_wrappers(f"{path}.{key}" if path else key): (there, key)
            for path, module in self.modules.items()
            for there in (module._parameters, module._buffers)
            for key in there
        }

    # State that is no tensor

    def describe(self, refused: Callable[[str], None]) -> dict[str, Any]:
        """Part of the rank state that :meth:`restore_modes` and :meth:`restore_extra_state` read.

        Args:
            refused: called with what cannot be carried, in words.
        """
        flags = list(map(_training, self.modules.values()))
        usual = 2 * sum(flags) >= len(flags)
        unusual = [name for name, flag in zip(self.modules, flags, strict=True) if flag != usual]
        changed = {name: {**values} for name, values in self._changed_numbers().items()}
        for name, values in changed.items():
            for key in [key for key, value in values.items() if codec.unencodable_paths(value)]:
                what = type(values.pop(key)).__qualname__
                refused(f"{key!r} of the module {name!r} is not carried: a {what} now")
        return {
            "training": [usual, unusual],
            "numbers": changed,
            "generators": {
                name: rng.capture_generator(one)
                for name, held, key in self._generators
                if isinstance(one := held.get(key), rng.GENERATOR_TYPES)
            },
            "extra": dict(self._extra_states(refused)),
        }

    def describe_structure(self) -> dict[str, Any]:
        """Part of the rank state that :meth:`not_repeated` reads: what has changed since this process began."""
        born, hooked = self._born_hooks, self._hooked_now()
        return {
            "kinds": self._changed_kinds,
            "hooks": {name: hooked.get(name, []) for name in {**born, **hooked} if hooked.get(name) != born.get(name)},
        }

    def _hooked_now(self) -> dict[str, list[str]]:
        """Names of the user's own hooks by module, parameter or optimizer; libraries hang theirs up as they need."""
        # torch numbers each hook that is hung up; one that is taken down leaves a place with fewer.
        if self._hook_count != (RemovableHandle.next_id, sum(map(len, self._hook_places))):
            held: list[tuple[str, tuple[Any, ...]]] = [(name, _MODULE_HOOKS(one)) for name, one in self.modules.items()]
            held += [(name, _TENSOR_HOOKS(one)) for name, one in self._hooked_tensors.items()]
            # A class that does not call its base's constructor has none.
            held += [(name, tuple(map(vars(one).get, _STEP_HOOKS))) for name, one in self._optimizers.items()]
            held += _HOOKS_OF_ALL.items()
            self._hooked, self._hook_places = {}, []
            for name, places in held:
                self._hook_places += filter(None, places)
                hooks = chain.from_iterable(place.values() for place in places if place)
                if found := [_name_of(hook) for hook in hooks if _is_users(hook)]:
                    self._hooked[name] = found
            self._hook_count = RemovableHandle.next_id, sum(map(len, self._hook_places))
        return self._hooked

    def not_repeated(self, described: Mapping[str, Any]) -> Iterator[str]:
        """Yield, in words, each change of the script while training ran that this process has not made again.

        Neither flags nor tensors: modules that came, went or were replaced, hooks that came or went.
        """
        told: set[str] = set()
        for name, kind in described["kinds"].items():
            is_now = self._kinds.get(name)
            if is_now == kind:
                continue
            told.add(name)
            if name.rpartition(".")[0] in told:
                continue  # what is below a module goes with it
            if not kind:
                yield f"the module {name!r} had gone while training ran, and is there again"
            elif not is_now:
                yield f"the module {name!r}, a {kind}, had come while training ran, and is there no more"
            else:
                yield f"the module {name!r} had become a {kind} while training ran, and is a {is_now}"
        for name, hooks in described["hooks"].items():
            now = self._hooked_now().get(name, [])
            if now != hooks:
                changed = f"lost the hook {now[-1]}" if len(hooks) < len(now) else f"got the hook {hooks[-1]}"
                again = "has it again" if len(hooks) < len(now) else "has it no more"
                yield f"{name!r} had {changed} while training ran, and {again}"

    def _numbers_now(self) -> dict[str, dict[str, Any]]:
        return {name: {key: held.get(key) for key in names} for name, held, names in self._numbers}

    def _changed_numbers(self) -> dict[str, dict[str, Any]]:
        """Numbers of the modules of which some are not as this process has made them."""
        # Runs for each number in each step: in one call.
        read = [*chain.from_iterable(map(map, self._read_numbers, self._names_of_numbers))]
        if not _identical(read, self._seen_numbers):
            self._seen_numbers, born = read, self._born
            self._changed = {name: now for name, now in self._numbers_now().items() if now != born.get(name, now)}
        return self._changed

    def _extra_states(self, refused: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
        for name, module in self._extra:
            value = module.get_extra_state()
            if paths := codec.unencodable_paths(value):
                refused(
                    f"get_extra_state() of the module {name!r} ({type(module).__qualname__}) returns {paths[0]}, which "
                    "cannot be carried; return numbers, strings, tensors, and lists and dicts of them"
                )
            else:
                yield name, value

    def restore_modes(self, described: Mapping[str, Any]) -> None:
        """Put back flags, numbers and generators."""
        usual, unusual = described["training"]
        different = set(unusual)
        for name, module in self.modules.items():
            module.training = usual != (name in different)
        for name, values in described["numbers"].items():
            if name in self.modules:
                vars(self.modules[name]).update(values)
        for name, held, keys in self._numbers:
            if name not in described["numbers"]:  # unchanged then; a later state may have been restored before this one
                held.update((key, value) for key, value in self._born.get(name, {}).items() if key in keys)
        for name, state in described["generators"].items():
            path, _, key = name.rpartition(".")
            held = vars(self.modules[path]) if path in self.modules else {}
            if isinstance(live := held.get(key), rng.GENERATOR_TYPES):
                rng.restore_generator(live, state)
            elif held:
                held[key] = rng.make_generator(state)
                self._generators.append((name, held, key))

    def restore_extra_state(self, described: Mapping[str, Any]) -> None:
        """Put back extra state; call after all tensors are restored."""
        for name, module in self._extra:
            if name in described["extra"]:
                module.set_extra_state(described["extra"][name])


#: Libraries that hang hooks on modules.
_LIBRARIES = frozenset({"torch", "memckpt", "lightning", "pytorch_lightning", "accelerate", "transformers", "peft"})


def _is_users(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0] not in _LIBRARIES


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _identical(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _sizes(tensors: list[Any]) -> list[int]:
    there = [one for one in tensors if one is not None]
    try:
        return [*map(torch.Tensor.numel, there), *map(_memory, map(torch.Tensor.untyped_storage, there))]
    except RuntimeError:  # a sparse one has no storage of its own
        return [
            *map(torch.Tensor.numel, there),
            *(0 if why_not_held(one) else _memory(one.untyped_storage()) for one in there),
        ]


def _all_alike(now: list[Any], before: list[Any]) -> bool:
    if _identical(now, before):
        return True
    return len(now) == len(before) and all(map(_alike, now, before)) and _first_places(now) == _first_places(before)


def _first_places(tensors: list[Any]) -> list[int]:
    """Find the first place of each tensor: lists of it are equal where the same places are tied."""
    first: dict[int, int] = {}
    return [first.setdefault(id(one), place) for place, one in enumerate(tensors)]


def _alike(now: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    if now is before:
        return True
    if now is None or before is None or why_not_held(now) or why_not_held(before):
        return False
    return now.shape == before.shape and now.dtype == before.dtype


def _numbers_of(module: nn.Module) -> list[str]:
    """Names of attributes that are numbers or words (`reduction`), or were made as None, as torch's class has them.

    Of a class of the user's own: those that its torch class declares.
    """
    kind: Any = type(module)
    own = vars(module) if kind.__module__.startswith("torch.") else _declared_by_torch(kind) & vars(module).keys()
    return [key for key in own if not (key in _UNREAD or key.startswith("_")) and _is_number(vars(module)[key])]


@functools.lru_cache(maxsize=4096)
def _declared_by_torch(kind: type[Any]) -> frozenset[str]:
    bases = (base for base in kind.__mro__ if base.__module__.startswith("torch."))
    return frozenset(chain.from_iterable(vars(base).get("__constants__", ()) for base in bases))


def _is_number(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_number, value))
    return value is None or type(value) in (bool, int, float, str)
