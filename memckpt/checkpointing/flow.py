"""Flows: coroutines that the agent's event loop carries on, from one answer of another process to the next."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Answer(Generic[T]):
    """A value that one flow awaits. A flow whose answer is never given goes no further."""

    def __init__(self) -> None:
        self._given: tuple[T, ...] = ()
        self.go_on: Callable[[], None] = lambda: None

    def give(self, value: T) -> None:
        """Carry on the flow that awaits this."""
        self._given = (value,)
        self.go_on()

    def __await__(self) -> Generator[Answer[T], None, T]:
        if not self._given:
            yield self
        return self._given[0]


def carry_on(flow: Coroutine[Answer[Any], None, None]) -> None:
    """Run a flow until it awaits an answer that is not there yet; that answer carries it on."""
    try:
        awaited = flow.send(None)
    except StopIteration:
        return
    awaited.go_on = partial(carry_on, flow)
