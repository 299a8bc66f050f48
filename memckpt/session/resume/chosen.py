"""A state that is held, in this node's memory or in storage, as a resume has chosen it.

At the end: the exchange of slices at its restore, each tensor broadcast from a rank whose node has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.optim import Optimizer

from memckpt.capture.beside.param_groups import order_state
from memckpt.capture.live_state import LiveState, state_of
from memckpt.capture.slot_writer import SlotWriter
from memckpt.protocol.trainer import Before
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.plan import RestoreRecord
from memckpt.recovery.restore import Restorer
from memckpt.session.connection import PreparedRegions
from memckpt.session.ranks import Ranks
from memckpt.session.resume.report import HeldState
from memckpt.session.staging import Staging
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, decode_meta
from memckpt.state.redo import GradientSource, StagedGradients
from memckpt.state.spec import StateSpec

#: The live parameters in the order of a layout, that layout, and a record's optimizer steps and gradients.
RecordedSteps = tuple[list[torch.Tensor], Layout, RecordMeta, GradientSource]


class HeldGeneration:
    """A generation in this node's memory, as its agent has produced a state of it. Owned until its writer is taken.

    `writer` owns the regions; it is None before the first restore, and once it is taken. `message` is the agent's
    answer: how the state is produced.
    """

    def __init__(self, regions: PreparedRegions) -> None:
        self.regions = regions
        self.message = regions.message
        self.writer: SlotWriter | None = None
        self._taken = False

    def open_writer(self, staging: Staging) -> SlotWriter:
        """The writer, opened once."""
        if self.writer is None:
            self.writer = staging.open(self.regions)
            # On an H100 a restore of 1.5B parameters took 9 s behind the locks, and 14 s beside them.
            self.writer.wait_for_page_locks()
        return self.writer

    def take_writer(self) -> SlotWriter:
        """The writer, once; the caller closes it."""
        writer, self.writer = self.writer, None
        assert writer is not None
        self._taken = True
        return writer

    def close(self) -> None:
        """Close the regions, unless the writer was taken."""
        if self.writer is not None:
            self.take_writer().close()
        elif not self._taken:
            self._taken = True
            self.regions.close()


@dataclass
class ChosenInMemory:
    """A record in this node's memory. Each rank gets its own state back.

    Attributes:
        state: decoded rank state.
        metas: encoded records. Lazy: the T records to redo. Eager: those after the record at which the replica stands.
        newest_known: the newest record that was committed.
        following: encoded rank states of the records behind it that are still to be compared, by record.
    """

    plan: RestoreRecord
    held: HeldState
    state: dict[str, Any]
    metas: tuple[bytes, ...]
    generation: HeldGeneration
    newest_known: int
    following: dict[int, bytes] = field(default_factory=dict)
    diverges: ClassVar[int | None] = None
    resharded: ClassVar[bool] = False
    #: Whether the live tensors are cut into other shards: a node's memory has this rank's own.
    recut: ClassVar[bool] = False

    @classmethod
    def of(cls, plan: RestoreRecord, regions: PreparedRegions, rank: int, world_size: int) -> ChosenInMemory:
        """The state that the agent has produced, which owns the regions from now on."""
        state = codec.decode(regions.message.rank_states[rank])
        held = HeldState(plan.step, plan.record, plan.tier, state["provided"], world_size, plan.step)
        return cls(plan, held, state, regions.message.metas, HeldGeneration(regions), plan.record + plan.lost)

    @property
    def not_exact(self) -> str:
        """What the audit had found in what is restored, in words; empty if nothing."""
        drift = self.generation.message.drift
        return "" if drift is None else str(drift)

    @property
    def spec(self) -> StateSpec:
        """Layout of the state."""
        return self.generation.message.spec

    tensors_spec = spec

    def restore(self, live: LiveState, rank: int, staging: Staging) -> float | None:
        """Write the state to the live tensors. Returns the seconds that redo of a record took, None without redo."""
        writer, message = self.generation.open_writer(staging), self.generation.message
        restorer = Restorer(writer.layout, self.generation.regions, writer.ring, live.tensors(), live.optimizers)
        restorer.restore(self.plan.record, rank, self.metas, message.missing, message.plain)
        return restorer.record_redo_seconds

    def earlier(self, rank: int) -> list[ChosenInMemory]:
        """The records before it, newest first, in the same generation."""
        message = self.generation.message
        earlier = message.earlier or filter(None, [message.before])
        return [self.at(before, rank, back) for back, before in enumerate(earlier, 1)]

    def at(self, before: Before, rank: int, back: int = 1) -> ChosenInMemory:
        """The state so many records before it."""
        record, state = self.plan.record - back, codec.decode(before.rank_states[rank])
        plan = replace(self.plan, record=record, step=before.step, lost=self.newest_known - record)
        held = replace(
            self.held, step=before.step, record=record, rank_state=state["provided"], newest_step=before.step
        )
        return replace(self, plan=plan, held=held, state=state, metas=before.metas, following={})

    def recorded_steps(self, live: LiveState) -> RecordedSteps | None:
        """The optimizer steps of the record, which is repeated; None where it has none."""
        writer, before = self.generation.writer, self.generation.message.before
        assert writer is not None
        if before is None or not before.meta or writer.snapshots:
            return None
        gradients = StagedGradients(self.generation.regions.slots.map, writer.layout)
        return writer.params, writer.layout, decode_meta(before.meta), gradients


@dataclass
class ChosenInStorage:
    """A state in a store. Owns nothing.

    Attributes:
        newest_known: newest record that some memory knows of; None if none does.
        diverges: first rank that was seeded as this one, if generators have to differ again from those of other ranks.
    """

    held: HeldState
    state: dict[str, Any]
    stored: StoredState
    newest_known: int | None
    diverges: int | None = None
    generation: ClassVar[None] = None

    @classmethod
    def of(cls, stored: StoredState, tier: str, newest_known: int | None) -> ChosenInStorage:
        """The state that a reader reads."""
        point, state = stored.point, codec.decode(stored.rank_state)
        held = HeldState(point.step, point.record, tier, state["provided"], point.world_size, point.step)
        return cls(held, state, stored, newest_known)

    @property
    def not_exact(self) -> str:
        """What the audit had found in what is restored when it was written, in words; empty if nothing."""
        return self.stored.point.inexact

    @property
    def spec(self) -> StateSpec:
        """Layout of this rank's own state."""
        return self.stored.own.spec

    @property
    def tensors_spec(self) -> StateSpec:
        """Layout of parameters, static tensors and optimizer state."""
        return self.stored.state.spec

    @property
    def resharded(self) -> bool:
        """Whether the ranks, or their shards, are not those of the run that wrote it."""
        return not self.stored.exact

    @property
    def recut(self) -> bool:
        """Whether the live tensors are cut into other shards than the state was."""
        return self.stored.resharded

    def restore(self, live: LiveState, rank: int, staging: Staging) -> None:
        """Write the state to the live tensors, as :meth:`ChosenInMemory.restore` does."""
        self.stored.restore(live.tensors(), live.optimizers)

    def recorded_steps(self, live: LiveState) -> RecordedSteps | None:
        """The optimizer steps of the state's last record; None where it has none."""
        last, tensors, spec = self.stored.last_record(), live.tensors(), self.tensors_spec
        return None if last is None else ([tensors[one.tensor.name] for one in spec.params], Layout(spec), *last)


Chosen = ChosenInMemory | ChosenInStorage


class _Room(NamedTuple):
    """A tensor of optimizer state that another rank makes, too."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


@torch.no_grad()
def exchange_slices(chosen: Chosen, live: LiveState, ranks: Ranks) -> str:
    """Take what is elsewhere from the first rank that has restored it; collective.

    Returns what is in no node's slice, in words, the same on all ranks; empty if there is nothing.
    """
    spec, tensors, optimizers = chosen.tensors_spec, live.tensors(), live.optimizers
    if spec.slice_count == 1:  # on all ranks: those that have read all slices from a store have the joined spec
        return ""
    parts = *(one.tensor for one in spec.params), *spec.static
    here = [one.name for one in (*parts, *chosen.spec.by_value) if not one.elsewhere]
    everybody = ranks.gather((here, [one.name for one in parts if one.elsewhere]))
    having = [set(names) for names, _ in everybody]
    wanted = sorted({name for _, lacking in everybody for name in lacking})
    source = {name: next((rank for rank, names in enumerate(having) if name in names), -1) for name in wanted}
    if nobody := [name for name in wanted if source[name] < 0]:
        return f"{nobody[0]} is in no node's slice"
    if not wanted:
        return ""
    mine = [name for name in wanted if source[name] == ranks.rank]
    described = ranks.gather({name: _describe_state(tensors[name], optimizers) for name in mine})
    states = {name: state for each in described for name, state in each.items()}
    group = ranks.open_groups([range(ranks.world_size)])
    for name in wanted:
        if source[name] != ranks.rank:
            _make_state(tensors[name], optimizers, states[name])
        kept = [value for each in optimizers for value in state_of(each, tensors[name]).values()]
        for tensor in (tensors[name], *(one for one in kept if isinstance(one, torch.Tensor))):
            ranks.broadcast_tensor(tensor, source[name], group)
    for optimizer in optimizers:
        for param in [one for params in optimizer.param_groups for one in params["params"]]:
            if param in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(param)
    order_state(live, chosen.state)
    return ""


def _describe_state(param: torch.Tensor, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """By optimizer, the state that it keeps for a parameter: numbers and the like, and what tensors take."""
    return [
        {
            key: _Room(tuple(one.shape), one.dtype, one.device.type == "cpu") if isinstance(one, torch.Tensor) else one
            for key, one in state_of(optimizer, param).items()
        }
        for optimizer in optimizers
    ]


def _make_state(param: torch.Tensor, optimizers: Sequence[Optimizer], described: Sequence[Mapping[str, Any]]) -> None:
    """Make optimizers keep such state for a parameter; the values of tensors come later."""

    def made(value: Any) -> Any:
        if not isinstance(value, _Room):
            return value
        device = "cpu" if value.on_host else param.device
        if value.shape == param.shape:
            return torch.empty_like(param, dtype=value.dtype, device=device, requires_grad=False)
        return torch.empty(value.shape, dtype=value.dtype, device=device)

    for optimizer, state in zip(optimizers, described, strict=True):
        if state:
            optimizer.state[param] = {key: made(value) for key, value in state.items()}
