"""FullyShardedDataParallel (FSDP1): the internals that we rely upon, and its tap.

FSDP1 flattens the parameters of each wrapped module into one, cuts it evenly, and gives each rank a shard that
corresponds to no slice of any user tensor. The optimizer steps these shards or views of them: plain tensors, private to
each rank. During forward and backward the unsharded parameters may replace them in the modules; between an optimizer's
step and the next forward the shards are in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from memckpt.capture.recorder import Recorder
from memckpt.capture.shards import fsdp1_wrappers
from memckpt.capture.taps.tap import StepTap
from memckpt.errors import UnsupportedError

#: FSDP1's mark on parameters that are views of a flat parameter.
_MARK = "_fsdp_flattened"

REMEDY = (
    "FullyShardedDataParallel (FSDP1) shards flattened parameters, which only as many ranks with the same wrapping can "
    "restore; fully_shard (FSDP2; fsdp_version: 2 in Accelerate) can be resumed by any number of ranks"
)


def is_flattened(model: nn.Module) -> bool:
    """Whether some parameters belong to FSDP1, even if its wrapper is not part of `model`."""
    return bool(fsdp1_wrappers(model)) or any(getattr(param, _MARK, False) for param in model.parameters())


def check(model: nn.Module, world_size: int) -> None:
    """Refuse models that this tap does not support.

    Raises:
        UnsupportedError: the wrapper is not part of the model, does not span the job, or lacks attributes we rely upon.
    """
    covered = {id(param) for one in fsdp1_wrappers(model) for param in one.parameters()}
    outside = [name for name, param in model.named_parameters() if getattr(param, _MARK, False)]
    if any(id(param) not in covered for param in model.parameters() if getattr(param, _MARK, False)):
        raise UnsupportedError(
            f"{outside[0]} belongs to a FullyShardedDataParallel that is not part of the model: expected the outermost "
            "wrapper as the model"
        )
    for one in fsdp1_wrappers(model):
        for name in ("_handle", "process_group"):
            if not hasattr(one, name):
                raise UnsupportedError(
                    f"memckpt relies on FullyShardedDataParallel.{name}, which torch {torch.__version__} lacks; "
                    "use fully_shard (FSDP2)"
                )
        ranks = dist.get_world_size(one.process_group)
        between = getattr(one, "_inter_node_pg", None)  # set by the hybrid strategies
        ranks *= dist.get_world_size(between) if between is not None else 1
        if ranks != world_size:
            raise UnsupportedError(
                f"FullyShardedDataParallel over {ranks} of {world_size} ranks: ranks of different groups may be steps "
                "apart; expected all ranks of the job to reduce gradients together"
            )


def _flat_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for one in fsdp1_wrappers(model):
        if one._handle is not None:  # None if the wrapper manages no parameters itself
            yield one._handle.flat_param


class FlatParameterTap(StepTap):
    """Stages gradients at the optimizer's step, from the reduced flat gradients; stages nothing during backward.

    Flat parameters signal a backward right before their gradients are reduced.

    Args:
        model: the model, with the wrappers in it.
        recorder: the session's recorder.
        before_reduction: as for :class:`memckpt.capture.taps.shards.ShardTap`.
    """

    name = "step (flat parameters)"

    def __init__(self, model: nn.Module, recorder: Recorder, before_reduction: Callable[[], None]) -> None:
        super().__init__(list(_flat_parameters(model)), recorder)
        self._before_reduction = before_reduction

    def _fired(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        self._before_reduction()
        self._recorder.gradient_seen(None)
