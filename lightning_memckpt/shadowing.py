"""Replacement of a method on one instance, and its removal without a trace.

Lightning has no hook after the module's own `on_train_batch_end`, after every other start hook or around a data
loader. A shadow of a public method on the instance reaches these places; class and other instances stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class _Shadow:
    """The entry in the instance's ``__dict__`` while a method is shadowed.

    Copies and pickles of the instance get their class's method back. A user's deep copy or file of the whole module
    must not contain our hook, and through it the trainer.
    """

    def __init__(self, instance: Any, name: str, function: Callable[..., Any]) -> None:
        self._instance = instance
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[Any, str], Any], tuple[Any, str]]:
        # By now the copy has its own instance, without this shadow: the lookup finds the class's method.
        return getattr, (self._instance, self._name)


class Shadows:
    """The current shadows, each with its undo function."""

    def __init__(self) -> None:
        self._undo: dict[tuple[int, str], Callable[[], None]] = {}

    def put(self, instance: Any, name: str, function: Callable[..., Any]) -> None:
        """Call `function(original, ...)` in place of `instance.name` until `remove` or `remove_all`.

        Raises:
            AttributeError: the instance has no such method.
        """
        original = getattr(instance, name)
        own = vars(instance)
        had_own, previous = name in own, own.get(name)
        shadow = _Shadow(instance, name, partial(function, original))
        own[name] = shadow

        def undo() -> None:
            # Other code may have shadowed the method again; its shadow calls ours and has to stay.
            if own.get(name) is not shadow:
                shadow._function = original
            elif had_own:
                own[name] = previous
            else:
                del own[name]

        self._undo[id(instance), name] = undo

    def follow(self, instance: Any, name: str, then: Callable[[], None]) -> None:
        """Call `then()` after each call of `instance.name`. Raises as :meth:`put`."""

        def followed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then()
            return result

        self.put(instance, name, followed)

    def remove(self, instance: Any, name: str) -> None:
        """Remove one shadow; does nothing if there is none."""
        undo = self._undo.pop((id(instance), name), None)
        if undo is not None:
            undo()

    def remove_all(self) -> None:
        """Remove every shadow, newest first."""
        while self._undo:
            self._undo.popitem()[1]()
