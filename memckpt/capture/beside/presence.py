"""Gradients that a step has used: their presence and kind, what becomes of them, and values that are carried.

Optimizers treat None and zeros differently. After ``zero_grad(set_to_none=False)`` a parameter that a batch does not
use has a gradient of zeros, and its optimizer steps it (decay, momentum). A parameter whose gradient is None is not
stepped. So a resume puts zeros where there was a gradient that is dropped before it is used again.

Few gradients are carried with every record, whatever becomes of them. Of many, those are carried that are still there,
and are not zeros, when the next backward comes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from memckpt.capture.beside.modules import fsdp1_wrappers
from memckpt.state.optimizers import dtype_name, dtype_of
from memckpt.state.tensors import give_gradient, is_dtensor, version

if TYPE_CHECKING:
    from memckpt.capture.live_state import LiveState

_log = logging.getLogger("memckpt")
#: None: no gradient. Else its layout ("dense" or "sparse"), its dtype and, if sparse, its number of sparse dimensions.
Kind = list[Any] | None
#: First word of the names of gradients that are copied by value.
GRADIENTS = "memckpt_gradients"
#: Bytes of gradients that are carried with every record.
FEW_BYTES = 64 << 10
#: Bytes of gradients that are carried until it is known what becomes of them.
UNKNOWN_BYTES = 16 << 20
#: Said where gradients are used that no record holds.
_USED = "gradients of the resumed step were {}, and no record holds them: they are zeros. {{}}"
_KEPT_NOW = "Those that were used are copied with each record from the next state on"
_KEEP = "Keep what you need of them in a buffer, or in an object that is registered, before the commit"
_READ = _USED.format("read before the next backward")
_LEFT = _USED.format("neither dropped nor zeroed before the next backward")
#: What :class:`_Dropped` may be given to without that its values are used. Most attributes are harmless, too.
_HARMLESS = frozenset(
    {"__set__", "dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__"}
    | {"zeros_like", "empty_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones", "__hash__"}
    | {"is_contiguous", "data_ptr", "get_device", "is_floating_point", "is_complex", "detach_", "requires_grad_"}
    | {"_has_compatible_shallow_copy_type", "untyped_storage", "_is_view", "is_inference", "is_conj", "is_neg"}
    | {"is_shared", "is_pinned", "is_same_size", "is_signed"}
)
#: Calls whose result does not depend on what was in their first argument; a product's does not if the factor is 0.
_OVERWRITES = frozenset({"zero_", "_foreach_zero_", "fill_", "copy_", "normal_", "uniform_", "__setitem__"})
_PRODUCTS = frozenset({"mul_", "__imul__", "_foreach_mul_"})
#: Calls that copy a tensor with its class and attributes.
_COPIES = frozenset({"__deepcopy__", "__reduce_ex__"})
#: A parameter whose gradient is looked at, and whether it is as it was at the last commit.
_Look: TypeAlias = "tuple[torch.Tensor, bool]"
#: Parameters on one device, and the norms of their gradients.
_Norms: TypeAlias = "tuple[list[torch.Tensor], torch.Tensor]"


class LeftGradients:
    """What becomes of gradients that a step has used, as far as observed; decides how much a record says of them.

    Of large gradients that are dropped or zeroed before the next backward a record says nothing: a resume watches the
    zeros in their place (:class:`DroppedGradients`). Of the others it says which are zero, and has their values if
    these are not too many. Those that a backward adds to are copied by value, like a buffer.

    Args:
        live: the live state.

    Attributes:
        kept: names of parameters whose gradients are copied by value.
        dropped: stands for gradients that were not restored, until each is used, dropped or overwritten.
    """

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self.dropped: DroppedGradients | None = None
        #: Parameters, by `id`, whose gradients do not matter behind a commit, as the last look at them has shown.
        self._known: set[int] = set()
        self._decisions = 0
        self._described: tuple[tuple[int, int] | None, list[Any]] = (None, [])
        #: Those whose gradients were zero at the last commit; on a device, at the last one of which the host knows it.
        self._zero: set[int] = set()
        self._looked: set[Hashable] = set()
        self._looks = 0
        #: Versions of large gradients at the last commit, by `id` of the parameter.
        self._versions: dict[int, int] = {}
        #: Norms on their way from a device: what they are of, and the event behind them.
        self._asked: list[tuple[list[_Look], torch.Tensor, torch.Event]] = []
        #: By family, the parameter that got the first gradient of the last backward; its gradient at the last commit.
        self._first: dict[Hashable, torch.Tensor] = {}
        self._was: dict[Hashable, tuple[Callable[[], torch.Tensor | None], int]] = {}
        self._zeros: dict[str, torch.Tensor] = {}
        self._kept_anew: set[str] = set()

    @property
    def kept(self) -> set[str]:
        found = (name.split(".", 1) for name in self._live.growth.changing if name.startswith(f"{GRADIENTS}."))
        return {name for _, name in found}

    def get(self, name: str) -> torch.Tensor | None:
        """The gradient of that parameter; zeros in its place where it is None."""
        param = self._live.parameter(name)
        return None if param is None else self.of(name, param)

    def of(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """As :meth:`get`, for a parameter at hand."""
        if param.grad is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return param.grad.detach() if isinstance(param.grad, _Dropped) else param.grad
        if name not in self._zeros or self._zeros[name].shape != param.shape:
            self._zeros[name] = torch.zeros_like(param, requires_grad=False)
        return self._zeros[name]

    def take_restored(self, name: str, param: torch.Tensor) -> torch.Tensor | None:
        """The kept gradient that was restored: the parameter's, or what was in its place."""
        return self._zeros.pop(name, param.grad)

    # Commits

    def describe_known(self) -> list[Any]:
        """Whether most parameters are known, and the names of the others; encoded anew where that has changed."""
        found = self._decisions, self._live.changes
        if self._described[0] != found:
            self._described = found, self.describe(self._known)
        return self._described[1]

    def describe(self, ids: Collection[int]) -> list[Any]:
        """Whether most parameters are among these, and the names of the others."""
        names: dict[bool, list[str]] = {True: [], False: []}
        for name, param in self._live.named_parameters():
            names[id(param) in ids].append(name)
        most = len(names[True]) > len(names[False])
        return [most, names[not most]]

    def described(self, most: bool, others: Iterable[str]) -> list[int]:
        """The inverse of :meth:`describe`, in the order of the parameters."""
        names = set(others)
        return [id(param) for name, param in self._live.named_parameters() if (name in names) != most]

    def resume(self, known: Sequence[Any], zero: set[int], versions: Mapping[int, int]) -> None:
        """Continue a process that has known what :meth:`describe_known` returned, and committed these gradients."""
        self._known = set(self.described(*known))
        self._decisions += 1
        self.committed(versions)
        self._zero = zero

    def committed(self, versions: Mapping[int, int]) -> set[int]:
        """Note that a record has ended, with the version counters of large gradients by the `id` of the parameter.

        Returns those of which it is not known that they do not matter.
        """
        self._versions = dict(versions)
        self._looked.clear()
        large = [(family, one.grad) for family, one in self._first.items() if id(one) in versions]
        self._was = {family: (weakref.ref(one), version(one)) for family, one in large if one is not None}
        if self._kept_anew:
            _log.info(
                "memckpt: gradients of %d parameter(s), %s among them, are used once more behind their step: read, or "
                "neither dropped nor zeroed before the next backward. They are copied with each record. Where that is "
                "not meant, zero them, or freeze the parameters",
                len(self._kept_anew),
                min(self._kept_anew),
            )
            self._kept_anew.clear()
        unknown = versions.keys() - self._known
        self._zero &= unknown
        return unknown

    def measure(self, params: Sequence[torch.Tensor]) -> tuple[list[_Norms], set[int]]:
        """Largest magnitudes of these gradients at a commit; by `id`, the parameters whose values a resume may need."""
        measured = _norms_of(params)
        for some, norms in measured:
            if norms.device.type == "cpu":  # else the host would wait
                here = {id(param): norm for param, norm in zip(some, norms.tolist(), strict=True)}
                self._zero -= here.keys()
                self._zero |= {key for key, norm in here.items() if not norm}
        return measured, set(map(id, params)) - self._zero

    # Backwards

    def compare_gradients(self, family: Hashable, members: Sequence[torch.Tensor], fired: torch.Tensor) -> None:
        """Look at the gradients of parameters that are about to get new ones; `fired` has just got the first one."""
        if family in self._looked:
            return
        strangers = [] if self._looked else self._strangers()
        if self.dropped is not None:
            self.dropped.end([*members, *strangers])
        if not self._looked:
            self._looks += 1
            while self._asked and self._asked[0][2].query():
                looks, norms, _ = self._asked.pop(0)
                self._judge(looks, norms, measured=False)
            self._look_at(strangers)
        self._looked.add(family)
        self._look_at(members, fired)
        self._judge_fired(family, members, fired)
        self._first[family] = fired

    def _judge_fired(self, family: Hashable, members: Sequence[torch.Tensor], fired: torch.Tensor) -> None:
        """Judge the one gradient that can't be read any more, if it was the first in the last backward, too."""
        if self._first.get(family) is not fired or id(fired) not in self._versions:
            return
        held, counted = self._was.get(family, (_nothing, 0))
        gradient = _grad(fired)
        if held() is not gradient and not torch.is_grad_enabled():
            self._settle(fired, True)
            return
        others = {id(one) for one in members if one.grad is not None and one is not fired}
        kept = {id(self._live.parameter(name)) for name in self.kept}
        if held() is not gradient:
            # A backward that makes a graph adds to it in a new tensor. It was dropped if those of the others were.
            self._settle(fired, True if not others and len(members) > 1 else None)
        elif version(gradient) > counted + 1:
            # Changed since the commit: to zeros, if those of the others are.
            self._settle(fired, bool(others) and others.isdisjoint(kept))
        elif id(fired) in self._known or id(fired) in self._zero:
            self._settle(fired, None)
        else:
            # Not zero at the commit, unless the host of a device does not know that yet.
            self._settle(fired, False if gradient.device.type == "cpu" or others & kept else None)

    def _strangers(self) -> list[torch.Tensor]:
        """Parameters in no optimizer that a backward may reach, and that nobody may ever zero."""
        if not self._versions:
            return []
        mine = {id(p) for one in self._live.optimizers for group in one.param_groups for p in group["params"]}
        named = self._live.named_parameters()
        return [param for _, param in named if id(param) not in mine and param.requires_grad]

    def _look_at(self, params: Sequence[torch.Tensor], fired: torch.Tensor | None = None) -> None:
        there = []
        for param in params:
            if id(param) in self._versions and param is not fired:
                if param.grad is not None:
                    there.append(param)
                elif id(param) not in self._known:
                    self._settle(param, True)
        # Reading values takes a while, and what was seen will most probably be again.
        if there and self._looks & (self._looks - 1):
            there = [param for param in there if self._is_to_be_read(param)]
        for some, norms in _norms_of(there):
            looks = [(param, self._is_as_at_commit(param)) for param in some]
            if self._looks <= 2 or norms.device.type == "cpu":
                self._judge(looks, norms, measured=norms.device.type == "cpu")
                continue
            # The host must not wait for the device in each step: it reads the norms at a later look.
            host = torch.empty_like(norms, device="cpu", pin_memory=True).copy_(norms, non_blocking=True)
            self._asked.append((looks, host, torch.accelerator.current_stream(norms.device).record_event()))

    def _is_to_be_read(self, param: torch.Tensor) -> bool:
        return id(param) not in (self._zero if self._is_as_at_commit(param) else self._known)

    def _is_as_at_commit(self, param: torch.Tensor) -> bool:
        return self._versions[id(param)] == version(_grad(param))

    def _judge(self, looks: Sequence[_Look], norms: torch.Tensor, measured: bool) -> None:
        """Judge gradients by their norms; `measured`: the host knows which were zero at the commit."""
        kept = []
        for (param, as_at_commit), norm in zip(looks, norms.tolist(), strict=True):
            if norm:
                kept.append(param)
            elif as_at_commit and (not measured or id(param) in self._zero or id(param) in self._known):
                self._settle(param, None)  # zero at the commit, too: that is measured there
                if not measured:
                    self._zero.add(id(param))
            else:
                self._settle(param, True)  # zeroed since, perhaps past the counter
        self.keep(kept)

    def _settle(self, param: torch.Tensor, matters_not: bool | None) -> None:
        """Note whether a gradient does not matter behind a commit; None: that is not known."""
        if matters_not is False:
            self.keep([param])
        elif (id(param) in self._known) != bool(matters_not):
            self._decisions += 1
            self._known ^= {id(param)}

    def keep(self, params: Sequence[torch.Tensor]) -> None:
        """Have the gradients of these parameters copied by value from the next generation on."""
        names = self._live.names() if params else {}  # what was replaced in its module since the commit has none
        found = {names[id(param)] for param in params if id(param) in names} - self.kept
        for param in params:
            self._settle(param, True)
        if found:
            self._kept_anew |= found
            self._live.growth.changing |= {f"{GRADIENTS}.{name}" for name in found}
            self._live.note_changes()


def _nothing() -> None:
    return None


def _grad(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def _norms_of(params: Iterable[torch.Tensor]) -> list[_Norms]:
    """Largest magnitudes of these parameters' gradients, for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for param in params:
        by_device.setdefault(_grad(param).device, []).append(param)
    return [
        (some, torch.stack(torch._foreach_norm([_grad(param) for param in some], torch.inf)))
        for some in by_device.values()
    ]


def describe_gradients(live: LiveState) -> dict[str, Any]:
    """Input of :func:`restore_gradients`, for the rank state: the common case, and exceptions by name."""
    present: list[str] = []
    absent: list[str] = []
    others: list[list[Any]] = []
    dense: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    sparse: dict[str, list[Any]] = {}
    for name, param in live.named_parameters():
        gradient = param.grad
        if gradient is None:
            absent.append(name)
            continue
        if gradient.dtype == param.dtype and not gradient.is_sparse:
            present.append(name)
        else:
            others.append([name, _kind(gradient)])
        if gradient.is_sparse:
            parts = gradient._indices(), gradient._values()
            if sum(part.nbytes for part in parts) <= FEW_BYTES:
                sparse[name] = [*parts, gradient.is_coalesced()]  # in their order: sums of the next step depend on it
        elif gradient.numel() and not is_dtensor(gradient) and type(gradient) is not _Dropped:
            dense.append((name, param, gradient))
    usual = len(present) > len(absent)
    found: dict[str, Any] = {"usual": usual, "unusual": absent if usual else present, "others": others}
    found["sparse"] = sparse
    large = sum(gradient.nbytes for *_, gradient in dense) > FEW_BYTES
    # Runs for each gradient of each step: a counter is read without a call.
    unknown = live.left.committed({id(param): one._version for _, param, one in dense} if large else {})
    found["known"] = live.left.describe_known()
    if unknown:
        dense = [each for each in dense if id(each[1]) in unknown]
        measured, needed = live.left.measure([param for _, param, _ in dense])
        found["norms"] = [[*live.left.describe({*map(id, params)}), norms] for params, norms in measured]
        dense = [each for each in dense if id(each[1]) in needed]
    if dense and (not large or (unknown and sum(gradient.nbytes for *_, gradient in dense) <= UNKNOWN_BYTES)):
        by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for name, _, gradient in dense:
            by_dtype.setdefault(gradient.dtype, []).append((name, gradient.detach().reshape(-1)))
        found["values"] = [
            [[name for name, _ in each], torch.cat([flat for _, flat in each])] for each in by_dtype.values()
        ]
    return found


def _kind(gradient: torch.Tensor) -> Kind:
    if gradient.is_sparse:
        return ["sparse", dtype_name(gradient.dtype), gradient.sparse_dim()]
    return ["dense", dtype_name(gradient.dtype)]


class DroppedGradients:
    """Zeros that stand for gradients whose values no record holds: it finds out whether they are used.

    Args:
        live: the live state, which has it until none of the zeros are left.
        params: the parameters.
        tell: called with the reason why the resume is not exact, where they are used.
    """

    def __init__(self, live: LiveState, params: Sequence[torch.Tensor], tell: Callable[[str], None]) -> None:
        self._live = live
        self._tell = tell
        #: By `id`, parameters whose gradients stand for others, unless they have got another one.
        self._standing = {id(param): param for param in params}
        self._overwritten: set[int] = set()
        self._told = False
        for param in params:
            param.grad = self.mark(_grad(param), id(param), whole=True)
        live.left.dropped = self if params else None

    def mark(self, gradient: torch.Tensor, of: int, whole: bool) -> _Dropped:
        """The same memory, as a tensor that says how it is used: all or a part of the gradient of a parameter."""
        marked = torch.Tensor._make_subclass(_Dropped, gradient)
        marked.owner, marked.of, marked.whole = self, of, whole
        return marked

    def overwrite(self, gradients: Sequence[_Dropped]) -> None:
        """Note that what some of them stood for is gone; not where they are a part of it."""
        whole = [one.of for one in gradients if one.whole]
        self._overwritten.update(whole)
        self._unmark(whole)

    def read(self, gradients: Sequence[_Dropped]) -> None:
        """Note a call that is given some of them and may use their values."""
        # Also of those that are no parameter's gradient any more: code may keep the last ones beside the next.
        if used := {one.of for one in gradients} - self._overwritten:
            self._tell_used(_READ, used)

    def end(self, params: Sequence[torch.Tensor]) -> None:
        """Put plain tensors in the place of those of `params`: a backward adds to them."""
        here = [id(param) for param in params if id(param) in self._standing]
        used = {id(param) for param in params if isinstance(param.grad, _Dropped)}
        self._unmark(set(here) - used)
        if used:
            self._tell_used(_LEFT, used)

    def _unmark(self, ids: Iterable[int]) -> list[torch.Tensor]:
        """Make the gradients of these parameters plain again; returns the parameters that had marked ones."""
        found = []
        for key in ids:
            param = self._standing.pop(key, None)
            if param is not None and isinstance(gradient := param.grad, _Dropped):
                gradient.__class__ = torch.Tensor  # type: ignore[assignment]  # the object stays: hooks may have it
                del gradient.owner, gradient.of, gradient.whole
                found.append(param)
        if not self._standing and self._live.left.dropped is self:
            self._live.left.dropped = None
        return found

    def _tell_used(self, used: str, ids: set[int]) -> None:
        """Say that training does not go on exactly, and keep these gradients from the next generation on."""
        params = self._unmark(ids)
        if not self._told:
            self._told = True
            self._tell(used.format(_KEPT_NOW if params else _KEEP))
        self._live.left.keep(params)


class _Dropped(torch.Tensor):
    """A gradient of :class:`DroppedGradients`."""

    owner: DroppedGradients
    of: int  #: `id` of the parameter
    whole: bool  #: whether it is all of that one's gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        first, *others = args or ((),)
        targets = _marked(first)
        marked = [*targets, *(one for each in (*others, *named.values()) for one in _marked(each))]
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in _COPIES:  # they look at the class
                args = args[0].detach(), *others
            found = func(*args, **named)
            if not marked:
                return found
            owner = marked[0].owner
            by_zero = name in _PRODUCTS and all(type(one) in (int, float) and one == 0 for one in others)
            if (by_zero or name in _OVERWRITES) and len(marked) == len(targets):
                if (
                    name != "__setitem__"
                    or others[0] is Ellipsis
                    or (type(others[0]) is slice and others[0] == slice(None))
                ):
                    owner.overwrite(targets)
                return found
            if name in _HARMLESS:
                return found
            in_place = name.endswith("_") and not name.endswith("__")
            if isinstance(found, torch.Tensor) and not in_place and found.layout is torch.strided:
                for one in marked:
                    if one is found:
                        return found
                    if _memory(one) == _memory(found):  # a view
                        return owner.mark(found, one.of, one.whole and one.numel() == found.numel())
            if name != "__get__":
                owner.read(marked)
        return found


def _marked(given: Any) -> list[_Dropped]:
    return [one for one in (given if isinstance(given, (list, tuple)) else (given,)) if isinstance(one, _Dropped)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def restore_gradients(live: LiveState, described: dict[str, Any]) -> list[torch.Tensor]:
    """Give every parameter that had a gradient its values, or zeros if no record has them, and None to every other.

    Returns the parameters whose gradients are such zeros.
    """
    unusual = set(described["unusual"])
    others = dict(described["others"])
    carried = {name: (values, at) for names, values in described.get("values", ()) for name, at in _places(live, names)}
    kept, dropped, dense = live.left.kept, list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
    for name, param in live.named_parameters():
        if name in others:
            kind = others[name]
        elif described["usual"] != (name in unusual):
            kind = ["dense", dtype_name(param.dtype)]
        else:
            kind = None
        gradient = live.left.take_restored(name, param) if name in kept and kind is not None else _zeros(param, kind)
        if name in described["sparse"] and gradient is not None and gradient.is_sparse:
            gradient = _sparse_like(param, *described["sparse"][name])
        if name in carried and gradient is not None:
            values, at = carried[name]
            gradient.copy_(values[at : at + param.numel()].view(param.shape))
        elif name not in kept and type(gradient) is torch.Tensor and not gradient.is_sparse and gradient.numel():
            dropped.append(param)
        there = param.grad
        if there is not None and gradient is not None and _is_alike(there, gradient):
            there.copy_(gradient)  # which may be a view of a buffer that training zeroes
        else:
            give_gradient(param, gradient)  # type: ignore[arg-type]  # a parameter
        if param.grad is not None and param.grad.numel() and not param.grad.is_sparse and not is_dtensor(param.grad):
            dense.append((param, param.grad))
    large = sum(one.nbytes for _, one in dense) > FEW_BYTES
    versions = {id(param): version(one) for param, one in dense} if large else {}
    zero: set[int] = set()
    for *which, norms in described.get("norms", ()):
        keys = live.left.described(*which)
        if len(keys) == len(norms):  # else the model is another one: nothing is taken for zero
            zero.update(key for key, norm in zip(keys, norms.tolist(), strict=True) if not norm)
    live.left.resume(described["known"], zero, versions)
    dropped = [param for param in dropped if id(param) not in zero]
    return dropped if not fsdp1_wrappers(live.model) else []  # those replace gradients by themselves


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not type(one) is type(other) is torch.Tensor or one.is_sparse or other.is_sparse:
        return False
    return (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())


def _places(live: LiveState, names: Sequence[str]) -> Iterable[tuple[str, int]]:
    sizes = {name: param.numel() for name, param in live.named_parameters()}
    at = 0
    for name in names:
        yield name, at
        at += sizes[name]


def _zeros(param: torch.Tensor, kind: Kind) -> torch.Tensor | None:
    if kind is None:
        return None
    dtype = dtype_of(kind[1])
    if kind[0] == "dense" or is_dtensor(param):
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    dims = kind[2]
    return _sparse_like(
        param, torch.empty((dims, 0), dtype=torch.int64), torch.empty((0, *param.shape[dims:]), dtype=dtype), True
    )


def _sparse_like(param: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, is_coalesced: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices.to(param.device),
        values.to(param.device),
        param.shape,
        is_coalesced=is_coalesced,
        check_invariants=False,
    )
