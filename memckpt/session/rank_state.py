"""What is private to a rank and small: captured and encoded at each commit, put back at a resume."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from memckpt.capture.copier import Copier
from memckpt.capture.live_state import LiveState
from memckpt.capture.presence import describe_gradients
from memckpt.capture.scaler import scaler_state
from memckpt.errors import UsageError
from memckpt.recovery.comparison import Comparison, Kind
from memckpt.state import codec, rng

#: Splits what a capture returned into what is compared by name; leaves out what depends on the clock.
Parts = Callable[[Any], Mapping[tuple[Kind, str], Any]]


class Stateful(Protocol):
    """An object whose state belongs to the rank state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class RankState:
    """Names what users and adapters add to the rank state, and encodes the whole of it."""

    def __init__(self, live: LiveState, copier: Copier, device: torch.device) -> None:
        self._live = live
        self._copier = copier
        self._device = device
        self._captures: dict[str, Callable[[], Any]] = {}
        self._loaders: dict[str, Callable[[Any], Any]] = {}
        self._put_back: dict[str, Callable[[Any], Any]] = {}
        self._parts: dict[str, Parts] = {}
        #: Why repeating the record that is being collected would repeat more than a step; empty if it would not.
        self.unrepeatable = ""

    def provide(
        self,
        name: str,
        capture: Callable[[], Any],
        parts: Parts | None = None,
        put_back: Callable[[Any], Any] | None = None,
    ) -> None:
        """Have `capture()` called at each commit.

        Args:
            parts: names the parts of what it returns for the resume check, and leaves out what depends on the clock;
                None: it is compared as one thing.
            put_back: called behind a repeated step that differs, with what was captured when it was first taken.
        """
        if name in self._captures:
            raise UsageError(f"rank state {name!r}: expected a new name, found one that is provided already")
        self._captures[name] = capture
        if parts is not None:
            self._parts[name] = parts
        if put_back is not None:
            self._put_back[name] = put_back

    def register(self, name: str, obj: Any, parts: Parts | None = None) -> None:
        """Have an object's ``state_dict()`` called at each commit and ``load_state_dict()`` at a resume."""
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise UsageError(
                f"register({name!r}): expected an object with state_dict() and load_state_dict(), found "
                f"{type(obj).__qualname__}"
            )
        scales = isinstance(obj, torch.amp.GradScaler)
        self.provide(name, functools.partial(scaler_state, obj) if scales else obj.state_dict, parts)
        self._loaders[name] = self._put_back[name] = obj.load_state_dict

    def capture(self, reduction: Any, pending: Any) -> codec.Packed:
        """The rank state as it is now; some of it may be on its way from a device.

        User code runs in it, and what that raises leaves everything as it was.

        Args:
            reduction: the bucket layout of DDP, None without one.
            pending: what is known of gradients that wait.
        """
        state = {
            "rng": rng.capture(self._device.index if self._device.type == "cuda" else None),
            "groups": self._live.describe_groups(),
            "trainable": self._live.trainable(),
            "state_order": self._live.describe_state_order(),
            "reduction": reduction,
            "gradients": describe_gradients(self._live),
            "pending": pending,
            "provided": {name: capture() for name, capture in self._captures.items()},
            "unrepeatable": self.unrepeatable,
        }
        return codec.Packed(state, self._copier.fetch, self._copier.token)

    def compare(self, found: Mapping[str, Any], held: Mapping[str, Any], comparison: Comparison) -> list[str]:
        """Compare a rank state with the held one, part by part.

        Returns:
            The names of what is provided and differs.
        """
        for name in held["rng"]:
            comparison.value("generators", name, found["rng"].get(name), held["rng"][name])
        for key in ("groups", "trainable", "state_order"):
            comparison.value("hyperparameters", key, found[key], held[key])
        for key in ("gradients", "pending"):
            comparison.value("absences", key, found.get(key), held.get(key))
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

    def _named(self, name: str, value: Any) -> Mapping[tuple[Kind, str], Any]:
        parts = self._parts.get(name)
        return {("registered", name): value} if parts is None else parts(value)

    def put_back(self, provided: Mapping[str, Any]) -> None:
        """Give what differs after a repeated step the state that it had when that was first taken."""
        for name, value in provided.items():
            if name in self._put_back:
                self._put_back[name](value)

    def load_registered(self, provided: Mapping[str, Any]) -> None:
        """Give registered objects their state back."""
        for name, load in self._loaders.items():
            if name in provided:
                load(provided[name])
