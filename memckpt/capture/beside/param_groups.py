"""Parameter groups, flags, what modules hold beside tensors, and the order of optimizer state, by name.

Frameworks change these by themselves, and a resume has to restore them.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from memckpt.capture.beside.attributes import same
from memckpt.capture.live_state import LiveState
from memckpt.errors import ConfigurationError, ForeignStateError
from memckpt.state import codec
from memckpt.state.captured import filled
from memckpt.state.optimizers import hyperparameters, odd_hyperparameters

_log = logging.getLogger("memckpt")
#: Part of the rank state: which tensors of groups are those that the script made. It depends on when it made them.
LINKS = "links"


def scaler_state(scaler: Any) -> Any:
    """The scaler's ``state_dict()``; values on a device are read when they are encoded.

    Scale and growth count live on the device, and ``state_dict()`` would drain its queue at each commit.

    A scaler whose class overrides ``state_dict()`` is asked for it directly.
    """
    scale, count = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    plain = getattr(type(scaler), "state_dict", None) is not torch.amp.GradScaler.state_dict
    if plain or not (isinstance(scale, torch.Tensor) and isinstance(count, torch.Tensor)) or codec.on_host(scale):
        return scaler.state_dict()
    return {
        "scale": codec.OnDevice(scale, float),
        "growth_factor": scaler._growth_factor,
        "backoff_factor": scaler._backoff_factor,
        "growth_interval": scaler._growth_interval,
        "_growth_tracker": codec.OnDevice(count, int),
    }


def describe_groups(live: LiveState) -> dict[str, Any]:
    """Part of the rank state that :func:`restore_groups` and :func:`restore_state_order` read."""
    live.follow()
    live.look_at_optimizers()
    return {
        "strangers": live.strangers.describe(),
        "late": live.describe_late(),
        "modules": live.tree.describe(lambda what: live.not_carried.setdefault(what)),
        "groups": describe_settings(live),
        LINKS: _links(live),
        "defaults": _changed_defaults(live),
        "trainable": describe_trainable(live),
        "state_order": _state_order(live),
    }


def describe_settings(live: LiveState) -> list[list[dict[str, Any]]]:
    """Groups of all optimizers, with parameters by name."""
    described = []
    for optimizer, names in zip(live.optimizers, live.names_of_groups(), strict=True):
        settings = hyperparameters(optimizer)
        for key in odd_hyperparameters(optimizer):
            for values in settings:
                if values.pop(key, None) is not None or key not in live.group_keys:
                    live.not_carried.setdefault(
                        f"the value of {key!r} in a group of {type(optimizer).__qualname__} cannot be carried; use "
                        "numbers, strings, tensors, and lists and dicts of them, or set it before attach()"
                    )
        for values, in_group in zip(settings, names, strict=True):
            values["params"] = in_group
        described.append(settings)
    return described


def describe_trainable(live: LiveState) -> dict[str, bool]:
    """Flags of all parameters."""
    params = sorted([*live.named_parameters(), *live.unheld_parameters()], key=itemgetter(0))
    return {name: param.requires_grad for name, param in params}


_PLAIN = (int, float, bool, str)
#: OneCycleLR computes the first from the others.
_RATES = ("lr", "max_lr", "min_lr")


def _plain_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words among values, and tuples of them."""
    return {
        key: value
        for key, value in values.items()
        if all(type(each) in _PLAIN for each in (value if type(value) is tuple else (value,)))
    }


def _in_words(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


class MadeSettings:
    """Settings of optimizers and registered schedules as the script made them when the run began.

    A start of the script with others goes on with the run's own, as its groups and states are restored. That is said.
    Of hyperparameters that are named in `override` :meth:`override` takes the script's, once for each change there.
    """

    def __init__(self, live: LiveState, override: Sequence[str] = ()) -> None:
        self._live = live
        self._named = {*override, *(_RATES if "lr" in override else ())}
        #: By owner, in words. Empty for what has trained before: its settings are no longer those that it began with.
        self._made: dict[str, dict[str, Any]] = {}
        #: Optimizer and group, by owner.
        self._groups: dict[str, tuple[Optimizer, int]] = {}
        #: Owner and name of what is to be taken, the script's value and the run's, and all that in words.
        self._taken: list[tuple[str, str, Any, Any, str]] = []
        #: What is taken, in words; empty if nothing is.
        self.overridden: tuple[str, ...] = ()
        self._loaded = False
        if not any(optimizer.state for optimizer in live.optimizers):
            self._note_groups()
        known = sorted({key for made in self._made.values() for key in made})
        if unknown := sorted({*override}.difference(known)):
            names = ", ".join(known) or "none, as the optimizers have trained before attach()"
            raise ConfigurationError(f"override: expected names of hyperparameters ({names}), found {unknown[0]!r}")

    def _note_groups(self) -> None:
        for number, optimizer in enumerate(self._live.optimizers):
            name = type(optimizer).__qualname__ + (f" {number}" if len(self._live.optimizers) > 1 else "")
            for index, group in enumerate(optimizer.param_groups):
                owner = f"{name}, group {index}" if len(optimizer.param_groups) > 1 else name
                # A schedule begins from that, and may have changed `lr`.
                base = {"lr": group["initial_lr"]} if "initial_lr" in group else {}
                self._made[owner] = _plain_of({key: (group | base)[key] for key in group if key != "initial_lr"})
                self._groups[owner] = optimizer, index

    def note_schedule(self, name: str, schedule: LRScheduler) -> None:
        """Note a schedule that is registered by this name, unless it has been stepped."""
        if schedule.last_epoch == 0:
            if self._groups and not self._loaded:
                self._note_groups()
            self._made[f"the {type(schedule).__qualname__} {name!r}"] = _plain_of(vars(schedule))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return self._made

    def load_state_dict(self, began: dict[str, dict[str, Any]]) -> None:
        """Keep those of the beginning, and warn of others."""
        other = [
            (owner, key, one, two, f"{key}={_in_words(one)} of {owner} (the run: {_in_words(two)})")
            for owner, theirs in began.items()
            if (ours := self._made.get(owner)) is not None
            for key in sorted(theirs.keys() & ours.keys())
            if not same(one := ours[key], two := theirs[key])
        ]
        self._made, self._loaded = began, True
        if taken := [each for each in other if each[0] in self._groups and each[1] in self._named]:
            self._taken = taken
            self.overridden = (f"override takes the script's {', '.join(each[-1] for each in taken)}",)
        if left := [each[-1] for each in other if each not in taken]:
            _log.warning(
                "memckpt: the script makes other settings than this run began with, and the run's own go on: %s. To "
                "train on with the script's name hyperparameters in override, as in MEMCKPT_OVERRIDE=lr; "
                "resume='never' starts over",
                ", ".join(left),
            )

    def override(self) -> None:
        """Take the script's hyperparameters; behind the restore and the repeated step, which have the run's."""
        taken, self._taken = self._taken, []
        schedules = [one for one in gc.get_objects() if taken and issubclass(type(one), LRScheduler)]
        self._made = copy.deepcopy(self._made)
        for owner, key, ours, _, _ in sorted(taken, key=lambda one: one[1] == "lr"):  # which depends on others
            (optimizer, index), made = self._groups[owner], self._made[owner]
            group, base, made[key] = optimizer.param_groups[index], made.get("lr"), ours
            group.update({} if key == "lr" else {key: ours})
            if base is not None and key in _RATES:
                group["lr"] = _move_schedules(schedules, optimizer, index, made["lr"], base)


def _move_schedules(schedules: Sequence[Any], optimizer: Optimizer, index: int, new: float, old: float) -> float:
    """Have schedules of a group go on as if they had begun from `new` in place of `old`; returns the rate now."""
    groups = optimizer.param_groups
    own = [each for each in schedules if getattr(each.__dict__.get("optimizer"), "param_groups", None) is groups]
    own = [each for each in own if hasattr(each, "base_lrs")]  # ReduceLROnPlateau and ChainedScheduler have none
    if not own:
        return new
    groups[index]["initial_lr"] = new
    for each in own:
        each.base_lrs = [new if number == index else base for number, base in enumerate(each.base_lrs)]
    for each in own:
        if isinstance(each, OneCycleLR):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it expects to be asked in its step only
                return float(each.get_lr()[index])
    floor = sum(getattr(each, "eta_min", 0.0) for each in own if each.last_epoch > 0)  # to which annealing adds
    return new if old == floor else floor + (groups[index]["lr"] - floor) * (new - floor) / (old - floor)


#: Place of a tensor in the groups: optimizer, group, key.
_At = tuple[int, int, str]


def _group_tensors(live: LiveState) -> dict[_At, torch.Tensor]:
    return {
        (index, number, key): value
        for index, optimizer in enumerate(live.optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, torch.Tensor)
    }


def _links(live: LiveState) -> list[tuple[_At, bool, _At]]:
    """Tensors in groups that are not those which a new process makes there: whether it makes them, and first where.

    The script may hold those, and `rate.mul_(0.9)` changes them wherever they stand. `load_state_dict()` puts others in
    their place, and `add_param_group()` puts one of `defaults` into another group.
    """
    now = _group_tensors(live)
    if live.born_group_tensors is None:
        live.born_group_tensors = now
    born = live.born_group_tensors
    moved = {at: one for at, one in now.items() if one is not born.get(at)}
    if not moved:
        return []
    made = {id(value): at for at, value in reversed(born.items())}
    others = {id(value): at for at, value in reversed(now.items())}
    return [(at, id(one) in made, made.get(id(one), others[id(one)])) for at, one in moved.items()]


def _link(live: LiveState, groups: Sequence[Sequence[Any]], links: Sequence[Sequence[Any]]) -> None:
    """Put the tensors that this process has made where the continued run had them, and others where it had others."""
    if live.born_group_tensors is None:
        live.born_group_tensors = _group_tensors(live)
    born = live.born_group_tensors
    for optimizer, described in zip(live.optimizers, groups, strict=True):
        optimizer.param_groups += [{"params": []} for _ in described[len(optimizer.param_groups) :]]
    others: dict[Any, torch.Tensor] = {}
    for (index, number, key), was_made, where in links:
        group = live.optimizers[index].param_groups[number]
        there = born.get((index, number, key))
        if was_made and tuple(where) in born:
            group[key] = born[tuple(where)]
        # A tensor that the script has put there since then stays: a repeated step is restored once more.
        elif not was_made and there is not None and group.get(key) is there:
            group[key] = others.setdefault(tuple(where), there.detach().clone())


def _changed_defaults(live: LiveState) -> list[dict[str, Any]]:
    """What was set in the optimizers' `defaults` since: groups that are added take from these what they lack."""
    changed = []
    for optimizer, born in zip(live.optimizers, live.born_defaults, strict=True):
        now = getattr(optimizer, "defaults", {})
        others = [key for key, one in now.items() if one is not born.get(key, live)]
        new = {key: now[key] for key in others if not same(now[key], born.get(key, live))}
        for key in [key for key, one in new.items() if codec.unencodable_paths(one)]:
            live.not_carried.setdefault(f"{key!r} in {type(optimizer).__qualname__}.defaults cannot be carried")
            del new[key]
        changed.append(new)
    return changed


def _state_order(live: LiveState) -> list[list[str] | None]:
    """Names of parameters in the order in which they got state, by optimizer; None if that is the groups' order."""
    orders: list[list[str] | None] = []
    names: dict[int, str] = {}
    for optimizer in live.optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if len(optimizer.state) <= len(params) and all(map(is_, optimizer.state, params)):
            orders.append(None)
            continue
        # Empty state, as `self.state[param]` makes it for a look, is not restored, and has no place in the order.
        state = {id(param) for param, its in optimizer.state.items() if not isinstance(its, dict) or its}
        usual = [id(param) for param in params if id(param) in state]
        found = [id(param) for param in optimizer.state if id(param) in state]
        if left := {id(one) for one in optimizer.state if isinstance(one, torch.Tensor)} & state - set(usual):
            # Had they come back into a group, their old state would count.
            name = live.names().get(next(iter(left)), "a parameter")
            live.not_carried.setdefault(
                f"{type(optimizer).__qualname__} keeps state of {name}, which is in none of its groups any more, and "
                "that state is not carried; delete it with optimizer.state.pop(param)"
            )
            found = [one for one in found if one not in left]
        if found == usual:
            orders.append(None)
            continue
        names = names or live.names()
        orders.append([names[one] for one in found if one in names])
    return orders


def restore_groups(live: LiveState, described: Mapping[str, Any]) -> None:
    """Make the tensors that a new process lacks; restore flags, and the groups' structure and hyperparameters."""
    live.place_late(described.get("late", ()))
    restore_modes(live, described)
    for optimizer, names in zip(live.optimizers, described["hooked"], strict=True):
        for kind in type(optimizer).__mro__:
            if _full_name(kind) in names and not _is_hooked(kind):
                step: Any = Optimizer.profile_hook_step(vars(kind)["step"])
                step.hooked = True  # as in Optimizer._patch_step_function
                kind.step = step  # type: ignore[attr-defined]  # a class of optimizers
    live.strangers.keep_described(described.get("strangers", ()))
    restore_trainable(live, described["trainable"])
    _link(live, described["groups"], described[LINKS])
    restore_settings(live, described["groups"])
    for optimizer, born, changed in zip(live.optimizers, live.born_defaults, described["defaults"], strict=True):
        # A state that is written behind a later one, to repeat its step, has not what came in that step.
        now = getattr(optimizer, "defaults", {})
        for key in now.keys() - born.keys() - changed.keys():
            del now[key]
        now.update(born | changed)


def take_over_defaults(live: LiveState, described: Mapping[str, Any]) -> None:
    """Take what a snapshot has restored of `defaults` for what the run's script had made, but for what has changed."""
    for optimizer, born, changed in zip(live.optimizers, live.born_defaults, described["defaults"], strict=True):
        born.update((key, one) for key, one in optimizer.defaults.items() if key not in changed)


def say_groups_that_are_back(live: LiveState, made: Sequence[int]) -> None:
    """Name optimizers with more groups than the script has `made`: torch refuses a group that is added once more."""
    for optimizer, number in zip(live.optimizers, made, strict=True):
        if (now := len(optimizer.param_groups)) > number:
            _log.warning(
                "memckpt: %s has the %d groups of the run again, of which the script has made %d. Where it adds the "
                "others in training, write: if len(optimizer.param_groups) == %d",
                *(type(optimizer).__qualname__, now, number, number),
            )


def restore_trainable(live: LiveState, described: Mapping[str, bool]) -> None:
    """Restore flags, as :func:`describe_trainable` found them."""
    tensors = live.tensors()
    for name, flag in described.items():
        if name in tensors and tensors[name].requires_grad != flag:
            tensors[name].requires_grad_(flag)


def restore_settings(live: LiveState, described: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Restore the groups of all optimizers, as :func:`describe_settings` found them."""
    tensors = live.tensors()
    for optimizer, groups in zip(live.optimizers, described, strict=True):
        groups_now = optimizer.param_groups
        for index, saved in enumerate(groups):
            if index == len(groups_now):
                groups_now.append({})
            group = groups_now[index]
            values = {key: _in_place(value, group.get(key)) for key, value in saved.items()}
            odd = {key: group[key] for key in group if key != "params" and key not in values and _is_odd(group[key])}
            group.clear()
            lacking = next((name for name in saved["params"] if name not in tensors), None)
            if lacking is not None:
                raise ForeignStateError(
                    f"expected {lacking}, which the optimizer steps and no module holds any more, found nothing like "
                    "it; replace the layer before restore(), as the run that is continued did, or use resume='never'"
                )
            group.update({**odd, **values, "params": [tensors[name] for name in saved["params"]]})
        del groups_now[len(groups) :]


def _in_place(value: Any, live: Any) -> Any:
    """`live` where a value fits into it, and an equal tuple: groups share one, which pickle shows. Else the value."""
    plain = type(value) is type(live) is tuple and {*map(type, value)} <= {bool, int, float, str}
    if plain and repr(value) == repr(live):
        return live
    return filled(value, live)


def describe_hooked(live: LiveState) -> list[list[str]]:
    """Name the classes of each optimizer whose steps call hooks: torch changes each of which an optimizer is made.

    A step that calls the step of its base calls hooks twice from then on.
    """
    return [[_full_name(kind) for kind in type(one).__mro__ if _is_hooked(kind)] for one in live.optimizers]


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"  # a user's class often has the name of its base


def _is_hooked(kind: type) -> bool:
    return getattr(vars(kind).get("step"), "hooked", False)


def _is_odd(value: Any) -> bool:
    return callable(value) or bool(codec.unencodable_paths(value))


def restore_modes(live: LiveState, described: Mapping[str, Any]) -> None:
    """Put back the modules' flags, numbers and generators."""
    if "modules" in described:
        live.tree.restore_modes(described["modules"])


def restore_state_order(live: LiveState, described: Mapping[str, Any]) -> None:
    """Restore modules' extra state, and the order of state, which state_dict() shows; call after all other state."""
    if "modules" in described:
        live.tree.restore_extra_state(described["modules"])
    order_state(live, described)


def order_state(live: LiveState, described: Mapping[str, Any]) -> None:
    """Order the optimizers' state as it was."""
    tensors = live.tensors()
    for optimizer, order in zip(live.optimizers, described["state_order"], strict=True):
        for name in order or ():
            state = optimizer.state.pop(tensors[name], None)
            if state is not None:
                optimizer.state[tensors[name]] = state
