"""What is private to a rank and small: captured and encoded at each commit, put back at a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from memckpt.capture.live_state import LiveState
from memckpt.errors import UsageError
from memckpt.state import codec, rng


class Stateful(Protocol):
    """An object whose state belongs to the rank state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class RankState:
    """Names what users and adapters add to the rank state, and encodes the whole of it."""

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self._captures: dict[str, Callable[[], Any]] = {}
        self._loaders: dict[str, Callable[[Any], Any]] = {}

    def provide(self, name: str, capture: Callable[[], Any]) -> None:
        """Have `capture()` called at each commit."""
        if name in self._captures:
            raise UsageError(f"rank state {name!r}: expected a new name, found one that is provided already")
        self._captures[name] = capture

    def register(self, name: str, obj: Stateful) -> None:
        """Have an object's ``state_dict()`` called at each commit and ``load_state_dict()`` at a resume."""
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise UsageError(
                f"register({name!r}): expected an object with state_dict() and load_state_dict(), found "
                f"{type(obj).__qualname__}"
            )
        self.provide(name, obj.state_dict)
        self._loaders[name] = obj.load_state_dict

    def encode(self, reduction: Any) -> bytes:
        """The rank state as it is now. User code runs in it, and what that raises leaves everything as it was.

        Args:
            reduction: the bucket layout of DDP, None without one.
        """
        return codec.encode(
            {
                "rng": rng.capture(),
                "groups": self._live.describe_groups(),
                "trainable": self._live.trainable(),
                "state_order": self._live.describe_state_order(),
                "reduction": reduction,
                "provided": {name: capture() for name, capture in self._captures.items()},
            }
        )

    def load_registered(self, provided: Mapping[str, Any]) -> None:
        """Give registered objects their state back."""
        for name, load in self._loaders.items():
            if name in provided:
                load(provided[name])
