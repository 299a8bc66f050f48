"""Files of settings that a person writes, in JSON or YAML."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from memckpt.errors import ConfigurationError

_EXPONENT = re.compile(r"[-+]?(?:[0-9]+[.]?[0-9]*|[.][0-9]+)[eE][-+]?[0-9]+$")


def _number(text: str) -> int | float:
    """A number with an exponent: whole where it is, as counts have to be."""
    value = float(text)
    return int(value) if value.is_integer() else value


def read_tree(path: Path, text: str, what: str) -> Any:
    """Plain values from a file's text: JSON where its name ends in .json, else YAML.

    Args:
        path: the file, for its suffix and for errors.
        text: its text.
        what: the option that named it and its value, for errors.

    Raises:
        ConfigurationError: it is neither, or PyYAML is not installed.
    """
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{what}: expected JSON, found {error}") from error
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            f"{what}: expected PyYAML, which reads this file, found none: pip install pyyaml, or write JSON in a file "
            "whose name ends in .json"
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """YAML 1.2's numbers: 1.1 takes 1e9 for a text."""

    Loader.add_implicit_resolver("!exponent", _EXPONENT, list("-+.0123456789"))
    Loader.add_constructor("!exponent", lambda loader, node: _number(loader.construct_scalar(node)))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{what}: expected YAML, found {error}") from error
