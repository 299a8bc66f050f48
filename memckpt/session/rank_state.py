"""Rank state: small state private to a rank, captured and encoded at each commit, put back at a resume."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from memckpt.capture.beside.attributes import FoundObjects
from memckpt.capture.beside.objects import AttributesOf, MetricStates, as_stateful
from memckpt.capture.beside.param_groups import (
    MadeSettings,
    describe_groups,
    describe_hooked,
    describe_settings,
    describe_trainable,
    restore_settings,
    restore_trainable,
    scaler_state,
)
from memckpt.capture.beside.presence import describe_gradients
from memckpt.capture.beside.strangers import Helpers
from memckpt.capture.beside.unfollowed import UnfollowedLoaders
from memckpt.capture.beside.variables import LoopVariables
from memckpt.capture.copier import Copier
from memckpt.capture.live_state import LiveState
from memckpt.errors import ConfigurationError, UsageError
from memckpt.recovery.comparison import ComparedKind, Comparison
from memckpt.state import ambient, codec, rng
from memckpt.state.tensors import version

#: Splits the value of a capture into parts that are compared by name; leaves out parts that depend on the clock.
Parts = Callable[[Any], Mapping[tuple[ComparedKind, str], Any]]


_log = logging.getLogger("memckpt")
_HYPERPARAMETERS = ("groups", "trainable", "state_order")
#: Names of what optimizers and parameters have set, as a line has them.
_GROUPS, _TRAINABLE = "groups", "requires_grad"
_ABSENCES = ("gradients", "pending")
#: Parts of what is described of gradients that are values, and what a process has learned of them.
_VALUES = ("values", "sparse")
_LEARNED = ("known", "norms")
#: First characters of the names of the session's own objects, whose owners say what is missing.
OWN = "memckpt_"
#: Beginnings of reasons that later resumes inherit: training goes on from a state that has this difference in it.
EARLIER = "an earlier resume was not exact: "
#: The same, of a reason that the user knew of: ``resume="exact"`` was not asked for.
ACCEPTED = "an earlier resume was not exact, and training went on from it: "
#: Objects with a state that hang on the model's modules.
OBJECTS = OWN + "objects"
#: What metrics of torchmetrics among the modules keep in attributes.
METRICS = OWN + "metrics"
#: Settings of optimizers and schedules that the run began with.
MADE = OWN + "made"


_TWICE = "what stands at the top of an epoch, and changes what is trained, has been done twice now"
_NOT_DRAWN = (
    "{} is not carried, and has not drawn what it had drawn by the step that is resumed; call "
    'register("NAME", GENERATOR) of the session, or of Accelerate\'s plugin, or give its loader to session.loader()'
)


class RankState:
    """Captures and encodes the rank state, with what users and adapters add to it.

    Attributes:
        unrepeatable: why repeating the current record would repeat more than a step, in words; empty if it would not.
        never_repeatable: the same of all steps of this attempt.
        made: settings of optimizers and schedules that the run began with.
    """

    def __init__(self, live: LiveState, copier: Copier, override: Sequence[str] = ()) -> None:
        self._live = live
        self._copier = copier
        self._captures: dict[str, Callable[[], Any]] = {}
        self._loaders: dict[str, Callable[[Any], Any]] = {}
        self._put_back: dict[str, Callable[[Any], Any]] = {}
        self._parts: dict[str, Parts] = {}
        self._helpers = Helpers(lambda: live.optimizers)
        self._unfollowed = UnfollowedLoaders()
        self.unrepeatable = ""
        self.never_repeatable = ""
        #: Adds a reason to this resume's report, until the first commit: what is found until then holds for it, too.
        self.add_to_report: Callable[[str], object] | None = None
        #: Encoded groups and states of registered objects, as a loop began that a resume goes on with.
        self._settings: dict[str, bytes] = {}
        self._written: dict[str, int] = {}
        #: What was held of the modules, until the first commit behind a resume.
        self._resumed_structure: Mapping[str, Any] | None = None
        self._resumed_ambient: bytes | None = None
        #: Why a resume from the next record is not exact, one reason each.
        self._inexact: dict[str, None] = {}
        #: Objects that their owners carry, of which each call of one of these returns some.
        self.elsewhere: list[Callable[[], Iterable[object]]] = [lambda: live.optimizers]
        self._found = FoundObjects(
            lambda: {"model": live.model, **live.extra_modules},
            lambda: (each for owner in self.elsewhere for each in owner()),
            self.inexact,
            "call register(name, OBJECT) of the session, or Accelerate's plugin, with {}, or name it in `attributes`,",
        )
        self._variables = LoopVariables(
            lambda: chain(self._carried(), (live.model, *live.extra_modules.values())),
            lambda: (live.model, *live.extra_modules.values()),
            self.inexact,
        )
        metrics = MetricStates(lambda: live.tree.metrics, lambda: live.tree.modules_now(), self.inexact)
        self.made = MadeSettings(live, override)
        for name, each in ((OBJECTS, self._found), (METRICS, metrics), (MADE, self.made)):
            self.register(name, each, parts=_by_name)

    def inexact(self, reason: str) -> None:
        """Declare that resumes from records of this run are not exact, from the next record on; logged once."""
        found = (known.removeprefix(EARLIER) for known in self._inexact if known.startswith(EARLIER))
        if reason in self._inexact or any(map(reason.endswith, found)):
            return  # a departure of this resume may be found again, under its loader's name
        self._inexact[reason] = None
        if self.add_to_report is not None:
            self.add_to_report(reason)
        else:
            _log.warning("memckpt: a resume of this run will not be exact: %s", reason)

    def retract(self, reason: str) -> None:
        """Declare that a reason was wrong: neither later records nor an earlier resume are inexact for it."""
        for known in {reason, EARLIER + reason, ACCEPTED + reason} & self._inexact.keys():
            del self._inexact[known]
            _log.info("memckpt: it has turned out otherwise, and is no reason any more: %s", known)

    def take_over(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Take over from a held rank state why the run is not exact; returns the reasons."""
        keys = ("inexact", "not_carried", "left_out")
        found = tuple(dict.fromkeys(chain.from_iterable(state.get(key, ()) for key in keys)))
        self.carry(found)
        self._resumed_structure = state.get("structure", self._resumed_structure)
        self._resumed_ambient = state.get("ambient", self._resumed_ambient)
        return found

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why later records are not exact."""
        return tuple(self._inexact)

    def accept(self, reasons: Iterable[str]) -> None:
        """Have later records carry that a resume was not exact for these reasons, and that the user has gone on."""
        for reason in reasons:
            if reason.startswith(EARLIER):
                self._inexact.pop(reason, None)
            if reason not in self._inexact:
                self._inexact[ACCEPTED + reason.removeprefix(EARLIER)] = None

    def carry(self, reasons: Iterable[str]) -> None:
        """Have later records carry why the run is not exact, which has been logged."""
        self._inexact.update(dict.fromkeys(reasons))

    def provide(
        self,
        name: str,
        capture: Callable[[], Any],
        parts: Parts | None = None,
        put_back: Callable[[Any], Any] | None = None,
    ) -> None:
        """Call `capture()` at each commit.

        Args:
            parts: splits the value into parts for the resume check, without those that depend on the clock; None: one.
            put_back: called after a repeated step that differs, with the value captured when it was first taken.
        """
        if name in self._captures:
            raise UsageError(f"rank state {name!r}: expected a new name, found one that is provided already")
        self._captures[name] = capture
        if parts is not None:
            self._parts[name] = parts
        if put_back is not None:
            self._put_back[name] = put_back

    def register(self, name: str, obj: Any, attributes: Sequence[str] = (), parts: Parts | None = None) -> None:
        """Call an object's ``state_dict()`` at each commit and its ``load_state_dict()`` at a resume.

        A generator of torch, numpy or random is carried by its state, or the `attributes` are in place of a state.
        """
        if attributes and any(obj is each for each in self._live.optimizers):
            kind = type(obj).__qualname__
            raise ConfigurationError(
                f"register({name!r}, attributes={list(attributes)}): expected another object than the optimizer "
                f"{kind}, as its steps may depend on its attributes: carried by themselves they do not reach a redo. "
                "Use redo='snapshot', which carries them"
            )
        carrier = as_stateful(name, obj, attributes)
        if isinstance(obj, LRScheduler) and not attributes:
            self.made.note_schedule(name, obj)
        self.elsewhere.append(carrier.objects if attributes else lambda: (obj,))
        scales = isinstance(obj, torch.amp.GradScaler)
        self.provide(name, functools.partial(scaler_state, obj) if scales else carrier.state_dict, parts)
        self._loaders[name] = self._put_back[name] = carrier.load_state_dict

    def capture(self, reduction: Any, pending: Any) -> codec.Packed:
        """The current rank state; copies may still be in flight. If user code raises here, nothing has changed."""
        groups = describe_groups(self._live)
        provided = {name: capture() for name, capture in self._captures.items()}
        self._variables.look(provided)
        settings = ambient.ambient_of(self._live.named_parameters()[0][1].device.type)
        held, self._resumed_ambient = self._resumed_ambient, None
        for changed in () if held is None else ambient.decode(held).changed_to(settings):
            self.inexact(f"torch's setting {changed}; make the change before restore()")
        structure, self._resumed_structure = self._resumed_structure, None
        self._settings, self._written = {}, {}  # the loop has gone on
        if structure is not None:
            for missing in self._live.tree.not_repeated(structure):
                self.inexact(f"{missing}; make the change before restore()")
        uncarried = self._helpers.find_uncarried(self._carried(), provided)
        for reason in chain(self._live.not_carried, uncarried, self._unfollowed.find()):
            self.inexact(reason)
        state = {
            "rng": rng.capture(),
            **groups,
            "reduction": reduction,
            "gradients": describe_gradients(self._live),
            "pending": pending,
            "provided": provided,
            "unrepeatable": self.unrepeatable or self.never_repeatable,
            "inexact": [*self._inexact],
            "written": sorted(self._live.growth.written),
            "hooked": describe_hooked(self._live),
            "variables": self._variables.samples,
            "drawn": self._variables.drawn,
            "structure": self._live.tree.describe_structure(),
            "ambient": settings.encode(),
        }
        return codec.Packed(state, self._copier.fetch, self._copier.token)

    def _carried(self) -> Iterator[object]:
        return (each for owner in (*self.elsewhere, self._found.objects) for each in owner())

    def compare(self, found: Mapping[str, Any], held: Mapping[str, Any], comparison: Comparison) -> list[str]:
        """Compare a rank state with the held one, part by part; returns the names of provided values that differ."""
        for name in held["rng"]:
            comparison.value("generators", name, found["rng"].get(name), held["rng"][name])
        for key in _HYPERPARAMETERS:
            comparison.value("hyperparameters", key, found[key], held[key])
        for key in _ABSENCES:
            comparison.value("absences", key, _without_values(found[key]), _without_values(held[key]))
        ours, theirs = (_values_of(each["gradients"]) for each in (found, held))
        for name in ours.keys() & theirs.keys():  # which of them are there depends on what a process has learned
            comparison.value("state", "gradients", ours[name], theirs[name])
        for name in self._variables.differing_draws(held.get("drawn", {})):
            if _NOT_DRAWN.format(name) not in self._inexact:  # else that is said
                comparison.value("generators", name, "another state", "that behind the step")
        differing = []
        for name, value in held["provided"].items():
            now = found["provided"].get(name)
            named, expected = self._named(name, now), self._named(name, value)
            for kind, label in dict.fromkeys([*expected, *named]):
                ours, theirs = (each.get((kind, label), "nothing") for each in (named, expected))
                comparison.value(kind, label, ours, theirs)
            if codec.encode(list(named.values())) != codec.encode(list(expected.values())):
                differing.append(name)
        return differing

    def parts(self, state: Mapping[str, Any]) -> Iterator[tuple[ComparedKind, str, Any]]:
        """ComparedKind, name and value of each part of a decoded rank state that :meth:`compare` compares."""
        for name, value in state["rng"].items():
            yield "generators", name, value
        for key in _HYPERPARAMETERS:
            yield "hyperparameters", key, state[key]
        for key in _ABSENCES:
            yield "absences", key, _without_values(state[key])
        for name, value in state["provided"].items():
            for (kind, label), part in self._named(name, value).items():
                yield kind, label, part

    def _named(self, name: str, value: Any) -> Mapping[tuple[ComparedKind, str], Any]:
        parts = self._parts.get(name)
        return {("registered", name): value} if parts is None else parts(value)

    def put_back(self, provided: Mapping[str, Any]) -> None:
        """Put back provided values that differ after a repeated step, as they were when the step was first taken."""
        for name, value in provided.items():
            if name in self._put_back:
                self._put_back[name](value)

    def load_registered(self, provided: Mapping[str, Any]) -> str:
        """Load the state of registered objects. Returns why other names are provided than held; empty if none are."""
        held, now = ({name for name in names if not name.startswith(OWN)} for names in (provided, self._captures))
        self.load(self._loaders, provided)
        if held == now:
            return ""
        parts = ((held - now, "is not restored"), (now - held, "starts as it is"))
        found = " and ".join(f"{', '.join(map(repr, sorted(names)))} {what}" for names, what in parts if names)
        return (
            f"expected the names that are held to be registered or provided again, {sorted(held)}, found "
            f"{sorted(now)}: {found}; register the same names, or start over with resume='never'"
        )

    # What a loop does above its batches, and did in the killed process

    def note_settings(self) -> None:
        """Note the optimizers' groups and the states of registered objects: a loop begins."""
        self._settings = {name: codec.encode(value) for name, value in self._settings_now()}
        self._written = self._versions()

    def _versions(self) -> dict[str, int]:
        return {name: version(tensor) for name, tensor in self._live.tensors().items()}

    def _settings_now(self) -> Iterator[tuple[str, Any]]:
        yield _GROUPS, describe_settings(self._live)
        yield _TRAINABLE, describe_trainable(self._live)
        for name in self._loaders:
            value = self._captures[name]()
            if not codec.unencodable_paths(value):
                yield name, value

    def _changed_settings(self) -> list[str]:
        now = {name: codec.encode(value) for name, value in self._settings_now()}
        return [name for name, before in self._settings.items() if now.get(name) != before]

    def _changes_of_groups(self) -> str:
        """What has changed in the optimizers' groups, and is to be put back."""
        pairs = zip(describe_settings(self._live), codec.decode(self._settings[_GROUPS]), strict=True)
        return ", ".join(
            f"{key} in group {number} of optimizer {at}, from {new.get(key)!r} to {old[key]!r}"
            for at, groups in enumerate(pairs)
            for number, (new, old) in enumerate(zip(*groups, strict=False))
            for key in old
            if key != "params" and codec.encode(new.get(key)) != codec.encode(old[key])
        )

    def keep_changed_settings(self) -> None:
        """Say what has changed since :meth:`note_settings`, and keep it: it may be meant, as it is behind a restore."""
        for name in self._changed_settings():
            self.inexact(f"{name} was changed between restore() and the first batch: {_TWICE}")
        self.note_settings()

    def put_settings_back(self, known: bool = True) -> None:
        """Put back what has changed since :meth:`note_settings`: the killed process had done so before its batches.

        Tensors that have changed are named only: their memory may be used already. So is all else if it is not `known`
        where the loop began: it may be meant.
        """
        if not known:
            self.keep_changed_settings()
        if changed := self._changed_settings():
            said = "; ".join(name if name != _GROUPS else self._changes_of_groups() or name for name in changed)
            _log.info("memckpt: the top of the epoch changed these once more, and they are put back: %s", said)
        for name in changed:
            value = codec.decode(self._settings[name])
            if name == _GROUPS:
                restore_settings(self._live, value)
            elif name == _TRAINABLE:
                restore_trainable(self._live, value)
            else:
                self._loaders[name](value)
        now = self._versions()
        if written := [name for name, before in self._written.items() if now.get(name, before) != before]:
            self.inexact(f"{written[0]} was written between restore() and the first batch: {_TWICE}")

    def carries(self, obj: object, attribute: str) -> bool:
        """Whether an attribute of an object is provided, by itself or with all of the object's state."""
        owners = [getattr(capture, "__self__", None) for capture in self._captures.values()]
        return any(owner is obj or (isinstance(owner, AttributesOf) and owner.has(obj, attribute)) for owner in owners)

    def has(self, name: str) -> bool:
        """Whether a name is provided."""
        return name in self._captures

    def variables_not_restored(self, state: Mapping[str, Any]) -> list[str]:
        """Why a resume is not exact: variables of the functions that lead here are not what they were."""
        provided = {name: capture() for name, capture in self._captures.items()} if state.get("variables") else {}
        return self._variables.not_restored(state.get("variables", {}), provided)

    def find_differing_draws(self, state: Mapping[str, Any]) -> None:
        """Say which generators in variables are not as a resumed state has them; called at the first batch.

        Before that the top of the epoch may yet seed them.
        """
        for name in self._variables.differing_draws(state.get("drawn", {})):
            self.inexact(_NOT_DRAWN.format(name))

    def load(self, names: Iterable[str], provided: Mapping[str, Any]) -> None:
        """Load the state of these registered objects, of those that are registered and held."""
        for name in names:
            if name in self._loaders and name in provided:
                self._loaders[name](provided[name])


def _by_name(state: Mapping[str, Any] | None) -> dict[tuple[ComparedKind, str], Any]:
    return {("registered", name): one for name, one in (state or {}).items()}


def _without_values(gradients: Any) -> Any:
    """What there is of gradients; their values follow from what was computed, and are no cause of a difference."""
    if not isinstance(gradients, dict):
        return gradients
    return {key: one for key, one in gradients.items() if key not in (*_VALUES, *_LEARNED)}


def _values_of(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Values of gradients by the names of parameters, or of groups of them."""
    return {**gradients["sparse"], **{", ".join(names): values for names, values in gradients.get("values", ())}}
