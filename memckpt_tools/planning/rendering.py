"""A configuration as text: the settings that differ from their defaults, as YAML for Hydra and as Python."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from memckpt.config import CompressionConfig, MemckptConfig
from memckpt.config.settings import KIND, to_mapping, variant_name


def settings_that_differ(config: Any, default: Any = None) -> dict[str, Any]:
    """The nested mapping of the fields that differ from a default configuration; of a variant also its ``kind``.

    :func:`memckpt.config.settings.from_mapping` makes an equal configuration from it.
    """
    default = MemckptConfig() if default is None else default
    found: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value, usual = getattr(config, each.name), getattr(default, each.name)
        if value == usual:
            continue
        if not dataclasses.is_dataclass(value):
            found[each.name] = value
        elif type(value) is type(usual):
            found[each.name] = settings_that_differ(value, usual)
        else:
            kind: Any = type(value)
            name = variant_name(kind)
            tagged = to_mapping(config)[each.name].get(KIND) == name
            found[each.name] = {**({KIND: name} if tagged else {}), **settings_that_differ(value, kind())}
    return found


def as_yaml(config: MemckptConfig) -> str:
    """The configuration for a Hydra application: its defaults list, and the group ``memckpt``."""
    settings = settings_that_differ(config)
    lines = ["defaults:", "  - memckpt: default", "  - _self_"]
    if settings:
        lines += ["memckpt:", *_yaml_lines(settings, "  ")]
    return "\n".join(lines) + "\n"


def _yaml_lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, float):
        digits, power, exponent = repr(value).partition("e")
        return f"{digits}{'' if '.' in digits else '.0'}{power}{exponent}"  # YAML 1.1 reads 1e9 as a text
    return str(value)


def as_python(config: MemckptConfig) -> str:
    """The configuration as Python: imports, and one assignment."""
    found: set[type] = set()
    call = _call(config, MemckptConfig(), found, "")
    own = sorted(kind.__name__ for kind in found if not issubclass(kind, CompressionConfig))
    compressors = sorted(kind.__name__ for kind in found if issubclass(kind, CompressionConfig))
    lines = [f"from memckpt import {', '.join(own)}"]
    if compressors:
        lines.append(f"from memckpt.compression import {', '.join(compressors)}")
    return "\n".join(lines) + f"\n\nconfig = {call}\n"


def _call(value: Any, default: Any, found: set[type], indent: str) -> str:
    """A call of a dataclass with the arguments that differ from the default's; notes the classes that it needs."""
    if not dataclasses.is_dataclass(value):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    kind: Any = type(value)
    found.add(kind)
    usual = default if type(default) is kind else kind()
    inner = indent + "    "
    arguments = [
        f"{inner}{each.name}={_call(getattr(value, each.name), getattr(usual, each.name), found, inner)},\n"
        for each in dataclasses.fields(kind)
        if getattr(value, each.name) != getattr(usual, each.name)
    ]
    return f"{kind.__name__}(" + ("\n" + "".join(arguments) + indent if arguments else "") + ")"
