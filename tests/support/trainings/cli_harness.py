"""Calls of the command line in this process."""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from memckpt.cli.main import app, main


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit status and output; an error of ours is raised as `main` gets it."""
    with mock.patch.dict(os.environ):  # commands may change that of their process
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def invoke_json(*arguments: object) -> tuple[int, Any]:
    code, text = invoke(*arguments, "--json")
    return code, json.loads(text)


def exit_status(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of the whole command."""
    monkeypatch.setattr(sys, "argv", ["memckpt", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code
