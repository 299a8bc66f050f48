"""Settings from a command line."""

from __future__ import annotations

import argparse
from typing import Any

import memckpt


def parse(*arguments: str, **defaults: Any) -> memckpt.ProtectionArguments:
    parser = argparse.ArgumentParser(exit_on_error=False)
    memckpt.add_arguments(parser, **defaults)
    return memckpt.from_args(parser.parse_args(arguments))
