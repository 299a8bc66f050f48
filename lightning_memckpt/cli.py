"""LightningCLI with ``--run_dir``, ``--resume`` and ``--memckpt``, which configure the MemCheckpoint callback."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal

import lightning.pytorch as pl
from jsonargparse.typing import NonNegativeInt
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_memckpt.callback import MemCheckpoint
from memckpt.config import MemckptConfig
from memckpt.config.arguments import RUN_DIR, config_from_environment, run_dir_from_environment
from memckpt.config.settings import KIND, from_mapping, to_mapping, variants_of
from memckpt.errors import ConfigurationError

_FLAGS = ("run_dir", "resume", "memckpt")
# Any: jsonargparse accepts type hints, but its annotation says classes.
_RESUME: Any = Literal["auto", "require", "exact", "never"] | NonNegativeInt | None


_HINTS = typing.get_type_hints(MemckptConfig)
#: The dataclasses of parts that are off by default (peers, compression), by the names that switch them on.
_VARIED = {
    each.name: variants
    for each in dataclasses.fields(MemckptConfig)
    if (variants := variants_of(each, _HINTS[each.name]))
}


def _flags() -> Any:
    """MemckptConfig for jsonargparse, with a mapping for each part that is off by default.

    Among several dataclasses jsonargparse picks the first that has the given fields. In a mapping ``kind`` selects it.
    """
    fields: list[tuple[str, Any, Any]] = []
    for each in dataclasses.fields(MemckptConfig):
        default: Any = dataclasses.field(default=each.default)
        if each.default_factory is not dataclasses.MISSING:
            default = dataclasses.field(default_factory=each.default_factory)
        fields.append((each.name, dict[str, Any] | None if each.name in _VARIED else _HINTS[each.name], default))
    made = dataclasses.make_dataclass("MemckptFlags", fields, frozen=True, kw_only=True)
    made.__doc__ = MemckptConfig.__doc__
    return made


_Flags = _flags()


def _flags_of(config: MemckptConfig) -> Any:
    mapping = to_mapping(config)
    return _Flags(**{name: mapping[name] if name in _VARIED else getattr(config, name) for name in mapping})


def _without_others(given: dict[str, Any]) -> dict[str, Any]:
    """Leave out fields of the environment's variant that the flags' variant lacks: jsonargparse has merged both."""
    below = to_mapping(config_from_environment())
    for name, known in _VARIED.items():
        chosen = given[name]
        if isinstance(chosen, dict) and below[name] is not None and chosen.get(KIND) in known:
            having = {KIND, *(each.name for each in dataclasses.fields(known[chosen[KIND]]))}
            absent = object()
            given[name] = {
                key: value for key, value in chosen.items() if key in having or value != below[name].get(key, absent)
            }
    return given


class MemCheckpointCLI(LightningCLI):
    """A LightningCLI whose trainings are protected; a drop-in replacement.

        python train.py fit --run_dir runs/my-run                    # again: continues
        python train.py fit --run_dir runs/my-run --resume never     # starts over
        python train.py fit --run_dir runs/my-run --memckpt.redo lazy --memckpt.storage.every_steps 500

    ``--memckpt`` is a MemckptConfig: the flags below it are its fields, and ``--memckpt.peers`` and
    ``--memckpt.compression`` mappings (``--memckpt.peers.kind erasure --memckpt.peers.data 4``). Without ``--run_dir``
    and MEMCKPT_RUN_DIR nothing is protected, unless ``trainer.callbacks`` contains a MemCheckpoint: then ``--resume``
    applies to that one.

    The CLI's file of an earlier attempt (``config.yaml``) is overwritten, since the second start of the same command
    would fail otherwise; ``save_config_kwargs`` can change that.
    """

    def __init__(self, *args: Any, save_config_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        kwargs["save_config_kwargs"] = {"overwrite": True, **(save_config_kwargs or {})}
        super().__init__(*args, **kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add our flags to those of every sub-command."""
        super().add_default_arguments_to_parser(parser)
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Names the run; the same directory continues it."
        )
        parser.add_argument(
            "--resume",
            type=_RESUME,
            default=None,
            help="auto (default): continue if anything is held; require: continue or fail; exact: fail unless it is "
            "exact; never: start over; a step.",
        )
        parser.add_argument(
            "--memckpt", type=_Flags, default=_flags_of(config_from_environment()), help="How the run is protected."
        )

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make the trainer, with the callback.

        Raises:
            ConfigurationError: --run_dir beside a MemCheckpoint in the configuration; --resume without either; or an
                invalid setting.
        """
        run_dir, resume, flags = (self._get(self.config_init, name) for name in _FLAGS)
        config: MemckptConfig = from_mapping(_without_others(to_mapping(flags)))
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
        """Callbacks from ``trainer_defaults`` and ``add_lightning_class_args``, which no file names."""
        defaults = self.trainer_defaults.get("callbacks") or []
        keys = self._parser(self.subcommand).callback_keys
        return [
            *(defaults if isinstance(defaults, list) else [defaults]),
            *(self._get(self.config_init, key) for key in keys),
        ]
