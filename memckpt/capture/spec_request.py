"""Inputs of a layout beside the live tensors: settings, and the room that earlier records have shown to be needed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from memckpt.config import RedoMode
from memckpt.state.spec import StateSpec, TensorSpec

#: By-value tensors above this size are held once for all ranks that share slots, as long as the ranks agree.
SHARED_ABOVE_BYTES = 64 << 10
#: Slots with an accelerator if some ranks share tensors while others have slots of their own: the number of records
#: by which other units may be ahead of the newest record on which all ranks agree (`capture/by_value.py`).
_SLOTS_BETWEEN_UNITS = 5

#: Bytes of by-value tensors per record, over all local ranks, up to which they stay as long as the record's gradients:
#: storage may choose to log small records, and that log may lag by a whole batch.
SMALL_BY_VALUE_BYTES = 4 << 20


@dataclass(frozen=True)
class SpecRequest:
    """Settings that a layout depends on, beside the live tensors.

    `reads_late`: peers or the log in storage read records as long as they lie in their slots, not only restores.
    `shares`: some ranks of the job share slots. `asynchronous`: commits are sent later than they are made.
    `slice_number`, `slice_count`: the slice of the state that this node holds.
    """

    mode: RedoMode
    period: int
    slots: int
    local_ranks: tuple[int, ...]
    world_size: int
    replicas: tuple[int, ...] = ()
    every: int = 1
    trails: bool = False
    reads_late: bool = False
    shares: bool = False
    asynchronous: bool = False
    slice_number: int = 0
    slice_count: int = 1

    def held_once(self, by_value: Sequence[TensorSpec], apart: Collection[str]) -> tuple[str, ...]:
        """Names of by-value tensors that the ranks sharing slots hold once; the same on all ranks.

        Empty if somebody reads records late: a record's bytes must be the same whenever they are read.

        Args:
            by_value: the by-value tensors.
            apart: names of those that have differed between ranks.
        """
        if not self.shares or self.mode != "lazy" or self.reads_late:
            return ()
        return tuple(one.name for one in by_value if one.nbytes > SHARED_ABOVE_BYTES and one.name not in apart)

    def slots_with(self, once: Collection[str]) -> int:
        """Number of slots where the tensors named `once` are held once."""
        if once and self.asynchronous and len(self.local_ranks) < self.world_size:
            return max(self.slots, _SLOTS_BETWEEN_UNITS)
        return self.slots

    def lay_out(self, spec: StateSpec) -> StateSpec:
        """A spec of the same mode with this period and these slots, without a look at the tensors."""
        slots = self.slots_with(self.held_once(spec.by_value, spec.apart))
        by_value_slots = self.by_value_slots(spec.by_value, spec.shared, slots)
        return msgspec.structs.replace(spec, period=self.period, slots=slots, by_value_slots=by_value_slots)

    def by_value_slots(self, by_value: Sequence[TensorSpec], shared: Collection[str], slots: int) -> int:
        """Number of records whose by-value tensors are held; 0: as many as there are slots.

        With lazy redo, restorable records lie at most D behind the newest one: beginning the next record invalidates
        what older ones need. A record's own by-value tensors are written later, at its end.
        """
        nbytes = sum(one.nbytes * (1 if one.name in shared else len(self.local_ranks)) for one in by_value)
        if self.mode != "lazy" or self.reads_late or nbytes <= SMALL_BY_VALUE_BYTES:
            return 0
        return slots + 1


@dataclass
class Growth:
    """Room that earlier records have shown to be needed, which never shrinks; and the latest dtypes of gradients.

    Room: sub-steps by optimizer, bytes of sparse gradients, tensors that change, tensors that differ between ranks,
    whether gradients were not the compressed averages, so that all are recorded uncompressed, and tensors that a new
    process does not have, or has in another shape or dtype.
    """

    sub_steps: dict[int, int] = field(default_factory=dict)
    sparse_bytes: dict[str, int] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    grad_dtypes: dict[str, str] = field(default_factory=dict)
    uncompressed: bool = False
    late: set[str] = field(default_factory=set)
    #: Parameters in which a write was seen that torch has not counted; the rank state carries them.
    written: set[str] = field(default_factory=set)

    def take_over(self, spec: StateSpec) -> None:
        """Adopt the room of the run that is being resumed."""
        self.sub_steps = {index: optimizer.sub_steps for index, optimizer in enumerate(spec.optimizers)}
        self.sparse_bytes = {param.tensor.name: param.sparse_bytes for param in spec.params if param.sparse_bytes}
        self.changing = {tensor.name for tensor in spec.by_value}
        self.apart |= {*spec.apart}
        self.late |= {*spec.late}
        self.grad_dtypes = {param.tensor.name: param.grad_dtype for param in spec.params}
