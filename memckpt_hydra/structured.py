"""Structured configs made from the dataclasses of `memckpt.config`, so that there is one definition.

OmegaConf knows no `Literal`; an Enum with the same names stands for it. It then refuses another value by naming those
that there are.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from functools import cache
from typing import Any, Literal

from hydra.core.config_store import ConfigStore

from memckpt.config import MemckptConfig

GROUP = "memckpt"
SCHEMA = "schema"


@cache
def node(kind: type) -> type:
    """The structured config of one dataclass of the tree; always the same one."""
    hints = typing.get_type_hints(kind)
    fields: list[Any] = []
    for each in dataclasses.fields(kind):
        factory = each.default_factory
        fields.append((each.name, *_field(each.name, hints[each.name], each.default, factory)))
    made = dataclasses.make_dataclass(kind.__name__, fields, namespace={"__module__": __name__})
    # OmegaConf's message about an unknown key shows the class's name, and so the keys that there are.
    made.__name__ = f"{kind.__name__}: one of {', '.join(hints)}"
    # Where pickle looks for it, by either name: launchers send configurations to other processes.
    globals()[kind.__name__] = globals()[made.__name__] = made
    return made


def _field(name: str, hint: Any, default: Any, factory: Any) -> tuple[Any, Any]:
    inner, optional = hint, False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = next(each for each in typing.get_args(hint) if each is not types.NoneType)
        optional = True
    if dataclasses.is_dataclass(inner):
        inner = node(typing.cast(type, inner))
        value = dataclasses.field(default_factory=inner)
    elif typing.get_origin(inner) is Literal:
        make_enum: Any = Enum  # type checkers want the names of the members where it is called
        choices = make_enum(
            f"{name.capitalize()}Choice", {each: each for each in typing.get_args(inner)}, module=__name__
        )
        globals()[choices.__name__] = choices
        inner, value = choices, dataclasses.field(default=choices(default))
    else:
        value = dataclasses.field(default=default)
    assert factory is dataclasses.MISSING or dataclasses.is_dataclass(inner), f"a default for {name}, found a factory"
    return (typing.Optional[inner] if optional else inner), value  # noqa: UP045 - a type that is known at run time


def __getattr__(name: str) -> Any:
    """For pickle, in a process that has composed nothing: what it asks for is made by `node`."""
    if not name.startswith("__"):
        node(MemckptConfig)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Put the schema into Hydra's ConfigStore; the search-path plugin does so for every application."""
    ConfigStore.instance().store(group=GROUP, name=SCHEMA, node=node(MemckptConfig), provider="memckpt")
