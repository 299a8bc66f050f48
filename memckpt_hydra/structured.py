"""Structured configs made from the dataclasses of `memckpt.config`, so that there is one definition.

OmegaConf does not support `Literal`; an Enum with the same names replaces it, and its error lists them. Nor does it
support a field with one of several dataclasses. A part that is off by default becomes another group with an option
for each of its dataclasses (``memckpt/peers=erasure``), and the node names its class under ``kind``.
"""

from __future__ import annotations

import dataclasses
import typing
from enum import Enum
from functools import cache
from typing import Any, Literal

from hydra.core.config_store import ConfigStore

from memckpt import config
from memckpt.config.checks import alternatives
from memckpt.config.settings import KIND, variants_of

GROUP = "memckpt"
SCHEMA = "schema"


@cache
def node(kind: type, variant: str | None = None) -> type:
    """The structured config of one dataclass of the tree, cached. `variant`: its name if it is one of several."""
    hints = typing.get_type_hints(kind)
    fields: list[Any] = [] if variant is None else [(KIND, str, dataclasses.field(default=variant))]
    for each in dataclasses.fields(kind):
        fields.append((each.name, *_field(each, hints[each.name])))
    made = dataclasses.make_dataclass(kind.__name__, fields, namespace={"__module__": __name__})
    # OmegaConf's error about an unknown key shows the class's name, so that lists the valid keys.
    made.__name__ = f"{kind.__name__}: one of {', '.join(each.name for each in dataclasses.fields(kind))}"
    # In this module, where pickle looks for it, by either name: launchers send configurations to other processes.
    globals()[kind.__name__] = globals()[made.__name__] = made
    return made


def _field(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, Any]:
    (inner, *_), optional = alternatives(hint)
    name, default, factory = field.name, field.default, field.default_factory
    if variants := variants_of(field, hint):
        for variant, kind in variants.items():  # pickle needs them, too
            node(kind, variant)
        return Any, dataclasses.field(default=default)
    if dataclasses.is_dataclass(inner):
        inner = node(typing.cast(type, inner))
        value = dataclasses.field(default_factory=inner)
    elif typing.get_origin(inner) is Literal:
        inner = _choices(f"{name.capitalize()}Choice", typing.get_args(inner))
        value = dataclasses.field(default=inner(default))
    else:
        value = dataclasses.field(default=default)
    assert factory is dataclasses.MISSING or dataclasses.is_dataclass(inner), f"a default for {name}, found a factory"
    return (typing.Optional[inner] if optional else inner), value  # noqa: UP045 - a type that is known at run time


@cache
def _choices(name: str, values: tuple[str, ...]) -> Any:
    """One Enum for all dataclasses that share a field: pickle looks it up by name."""
    make_enum: Any = Enum  # type checkers require literal members in the call
    assert name not in globals(), f"two settings named {name} with different values"
    choices = make_enum(name, {each: each for each in values}, module=__name__)
    globals()[name] = choices
    return choices


def __getattr__(name: str) -> Any:
    """For pickle, in a process that has not composed a configuration: make the class now."""
    if not name.startswith("__"):
        node(config.MemckptConfig)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Store the schemas in Hydra's ConfigStore; the search-path plugin does so for every application."""
    store = ConfigStore.instance()
    store.store(group=GROUP, name=SCHEMA, node=node(config.MemckptConfig), provider="memckpt")
    hints = typing.get_type_hints(config.MemckptConfig)
    for each in dataclasses.fields(config.MemckptConfig):
        variants, group = variants_of(each, hints[each.name]), f"{GROUP}/{each.name}"
        for variant, kind in variants.items():
            store.store(group=group, name=variant, node=node(kind, variant), provider="memckpt")
        if variants:
            store.store(group=group, name="none", node={each.name: None}, package=GROUP, provider="memckpt")
