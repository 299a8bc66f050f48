"""LightningCLI with ``--run_dir``, ``--resume`` and ``--memckpt``, which make the MemCheckpoint callback."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
from jsonargparse.typing import NonNegativeInt
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_memckpt.callback import MemCheckpoint
from memckpt.arguments import RUN_DIR, config_from_environment, run_dir_from_environment
from memckpt.config import MemckptConfig
from memckpt.errors import ConfigurationError

_FLAGS = ("run_dir", "resume", "memckpt")
# Any: jsonargparse takes type hints, and says that it takes classes.
_RESUME: Any = Literal["auto", "require", "never"] | NonNegativeInt | None


class MemCheckpointCLI(LightningCLI):
    """A LightningCLI whose trainings are protected; use it in place of LightningCLI.

        python train.py fit --run_dir runs/my-run                    # again: continues
        python train.py fit --run_dir runs/my-run --resume never     # starts over
        python train.py fit --run_dir runs/my-run --memckpt.redo lazy --memckpt.storage.every_steps 500

    ``--memckpt`` is a MemckptConfig: the flags below it are its fields. Without ``--run_dir`` and MEMCKPT_RUN_DIR
    nothing is protected, unless a MemCheckpoint stands in ``trainer.callbacks``: then ``--resume`` goes to that one.

    A file that the CLI has written for an earlier attempt (``config.yaml``) is overwritten, or the second start of the
    same command would fail; ``save_config_kwargs`` decides otherwise.
    """

    def __init__(self, *args: Any, save_config_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        kwargs["save_config_kwargs"] = {"overwrite": True, **(save_config_kwargs or {})}
        super().__init__(*args, **kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add our flags to those that every sub-command has."""
        super().add_default_arguments_to_parser(parser)
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Names the run; the same directory continues it."
        )
        parser.add_argument(
            "--resume",
            type=_RESUME,
            default=None,
            help="auto (default): continue if anything is held; require: continue or fail; never: start over; a step.",
        )
        parser.add_argument(
            "--memckpt", type=MemckptConfig, default=config_from_environment(), help="How the run is protected."
        )

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make the trainer, with the callback.

        Raises:
            ConfigurationError: the flags name a run, and there is a MemCheckpoint already; or they say how to resume,
                and there is neither.
        """
        run_dir, resume, config = (self._get(self.config_init, name) for name in _FLAGS)
        configured = self._get(self.config_init, "trainer").get("callbacks") or []
        listed = configured if isinstance(configured, list) else [configured]
        ours = [each for each in [*listed, *self._callbacks_of_the_program()] if isinstance(each, MemCheckpoint)]
        if ours and run_dir is not None:
            raise ConfigurationError(
                f"--run_dir: expected none beside a MemCheckpoint in trainer.callbacks (of {ours[0].run_dir}), found "
                f"{run_dir!r}; remove one of them"
            )
        if not ours and run_dir is None:
            run_dir = run_dir_from_environment()
        if resume is not None and not ours and run_dir is None:
            raise ConfigurationError(
                f"--resume {resume}: expected --run_dir, {RUN_DIR} or a MemCheckpoint in trainer.callbacks, found none"
            )
        if ours and resume is not None:
            ours[0].resume = resume
        if run_dir is not None:
            callback = MemCheckpoint(run_dir, resume=resume, config=config)
            kwargs = {"callbacks": [*listed, callback], **kwargs}
        return super().instantiate_trainer(**kwargs)

    def _callbacks_of_the_program(self) -> list[Any]:
        """Those of ``trainer_defaults`` and ``add_lightning_class_args``, which no file names."""
        defaults = self.trainer_defaults.get("callbacks") or []
        keys = self._parser(self.subcommand).callback_keys
        return [
            *(defaults if isinstance(defaults, list) else [defaults]),
            *(self._get(self.config_init, key) for key in keys),
        ]
