"""A training with one protection: ``python -m benchmarks.field.train --program NAME --gate SOCKET --directory DIR``."""

from __future__ import annotations

import argparse
import logging
import traceback
from pathlib import Path

from benchmarks.field.arms import PROGRAMS, Run
from benchmarks.field.gate import Gate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, required=True)
    parser.add_argument("--gate", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True, help="in an epoch")
    parser.add_argument("--every", type=int, default=1, help="steps between two saves")
    parser.add_argument("--disk-every", type=int, default=1, help="steps between two saves to a disk, if it has both")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    gate = Gate(args.gate)
    run = Run(gate, args.directory, args.size, args.epochs, args.batches, args.every, args.disk_every)
    try:
        PROGRAMS[args.program](run)
    except Exception as error:
        gate.failed(_in_few_words(error))
        raise


def _in_few_words(error: Exception) -> str:
    """An error's kind and message, or the line that raised it."""
    message = " ".join(str(error).split())
    if not message:
        message = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{type(error).__name__}: {message}"


if __name__ == "__main__":
    main()
