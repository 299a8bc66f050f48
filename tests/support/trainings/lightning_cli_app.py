"""An application with MemCheckpointCLI, as a user would write it."""

from __future__ import annotations

from examples.common import PrintSteps
from examples.digits_cnn import Digits, DigitsCNN
from lightning_memckpt.cli import MemCheckpointCLI

if __name__ == "__main__":
    MemCheckpointCLI(
        DigitsCNN,
        Digits,
        seed_everything_default=0,
        trainer_defaults={
            "callbacks": [PrintSteps()],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    )
