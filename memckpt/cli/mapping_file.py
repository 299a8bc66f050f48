"""Files of settings that a person writes, in JSON or YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memckpt.errors import ConfigurationError


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
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{what}: expected YAML, found {error}") from error
