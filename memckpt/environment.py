"""Settings from environment variables, for launchers that start a script they do not write.

    MEMCKPT_RUN_DIR                the run directory
    MEMCKPT_RESUME                 auto, require, never, or a step number
    MEMCKPT_REDO=lazy              a field of MemckptConfig
    MEMCKPT_AGENT_THREADS=2        a field of its AgentConfig
    MEMCKPT_STORAGE_URL=...        a field of its StorageConfig
    MEMCKPT_STORAGE=none           no storage tier

What is passed in Python wins. ``none`` stands for None where a field allows it. MEMCKPT_NODE and MEMCKPT_RUNTIME_DIR
belong to the agent's address and are read there.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from memckpt.config import AgentConfig, MemckptConfig, ResumeChoice, StorageConfig, parse_resume
from memckpt.errors import ConfigurationError

PREFIX = "MEMCKPT_"
RUN_DIR = "MEMCKPT_RUN_DIR"
RESUME = "MEMCKPT_RESUME"
STORAGE = "MEMCKPT_STORAGE"
#: Read elsewhere: they say where a node's agent is found.
_ADDRESS = frozenset({"MEMCKPT_NODE", "MEMCKPT_RUNTIME_DIR"})
#: Parts of the configuration, and the prefix of their fields' variables.
_PARTS = {"agent": AgentConfig, "storage": StorageConfig}

_log = logging.getLogger("memckpt")
Config = TypeVar("Config", MemckptConfig, AgentConfig, StorageConfig)


def run_dir_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """MEMCKPT_RUN_DIR; None where it is not set.

    Raises:
        ConfigurationError: it is empty.
    """
    found = environment.get(RUN_DIR)
    if found == "":
        raise ConfigurationError(f"{RUN_DIR}: expected a directory, found ''")
    return found


def resume_from_environment(environment: Mapping[str, str] = os.environ) -> ResumeChoice | int | None:
    """MEMCKPT_RESUME; None where it is not set.

    Raises:
        ConfigurationError: it is neither ``auto``, ``require``, ``never`` nor a step number.
    """
    found = environment.get(RESUME)
    return None if found is None else parse_resume(found, name=RESUME)


def config_from_environment(environment: Mapping[str, str] = os.environ) -> MemckptConfig:
    """The configuration that the variables describe; fields without one keep their defaults.

    A variable of our prefix that names no field is warned about.

    Raises:
        ConfigurationError: a value that its field does not take; the variable, what was expected and what was found.
    """
    for name in sorted(set(environment) - variables().keys() - _ADDRESS - {RUN_DIR, RESUME}):
        if name.startswith(PREFIX):
            _log.warning("memckpt: the environment variable %s names no setting and is ignored", name)
    config = _read(MemckptConfig(), PREFIX, environment)
    config = dataclasses.replace(config, agent=_read(config.agent, f"{PREFIX}AGENT_", environment))
    if STORAGE in environment:
        if environment[STORAGE].lower() != "none":
            raise ConfigurationError(
                f"{STORAGE}: expected 'none', found {environment[STORAGE]!r}; a place is given by {STORAGE}_URL"
            )
        return dataclasses.replace(config, storage=None)
    assert config.storage is not None, "the default has a storage tier"
    return dataclasses.replace(config, storage=_read(config.storage, f"{STORAGE}_", environment))


def variables() -> dict[str, str]:
    """Every variable that sets a field of the configuration, and what it takes."""
    found = {STORAGE: "'none'"}
    for prefix, kind in ((PREFIX, MemckptConfig), *((f"{PREFIX}{p.upper()}_", k) for p, k in _PARTS.items())):
        hints = get_type_hints(kind)
        found |= {prefix + name.upper(): _expected(hints[name]) for name in _plain_fields(kind)}
    return found


def _plain_fields(kind: type[Any]) -> list[str]:
    return [each.name for each in dataclasses.fields(kind) if not (kind is MemckptConfig and each.name in _PARTS)]


def _read(config: Config, prefix: str, environment: Mapping[str, str]) -> Config:
    hints = get_type_hints(type(config))
    values: dict[str, Any] = {}
    for field in _plain_fields(type(config)):
        variable = prefix + field.upper()
        if variable not in environment:
            continue
        values[field] = _parse(variable, environment[variable], hints[field])
        try:
            dataclasses.replace(config, **{field: values[field]})
        except ConfigurationError as error:
            # Its message begins with the field's name; whoever set a variable looks for that.
            raise ConfigurationError(f"{variable}: {str(error).partition(': ')[2]}") from error
    return dataclasses.replace(config, **values)


def _parse(variable: str, text: str, kind: Any) -> Any:
    choices = _members(kind)
    if type(None) in choices and text.lower() == "none":
        return None
    for choice in choices:
        if get_origin(choice) is Literal and text in get_args(choice):
            return text
        if choice is str and text:
            return text
        if choice in (int, float):
            try:
                return choice(text)
            except ValueError:
                continue
    raise ConfigurationError(f"{variable}: expected {_expected(kind)}, found {text!r}")


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _expected(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "a text", type(None): "'none'"}
    parts = []
    for choice in _members(kind):
        parts += [repr(each) for each in get_args(choice)] if get_origin(choice) is Literal else [words[choice]]
    return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
