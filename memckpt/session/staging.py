"""Staging of records in the slots of the current generation, and a look for changes that no optimizer has made."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memckpt.capture.beside.watch import ParameterWatch, StaticWatch
from memckpt.capture.by_value import LayoutChangedError
from memckpt.capture.live_state import LiveState
from memckpt.capture.recorder import Recorder
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.spec_request import SpecRequest
from memckpt.memory.slots import AGREEMENT_RECORDS
from memckpt.protocol.storing import RankPartCopied
from memckpt.protocol.trainer import Commit, GenerationCommit
from memckpt.session.connection import CopyOrder, PreparedRegions
from memckpt.session.ranks import LocalTraining
from memckpt.state import codec
from memckpt.state.records import RecordMeta, encode_meta
from memckpt.state.spec import StateSpec
from memckpt.state.tensors import version

_log = logging.getLogger("memckpt")
#: Number of changes that are logged; later ones are not.
_TELL = 3
#: Number of records in a row with a change after which state is captured.
_MANY = 5


@dataclass(frozen=True)
class RestorePoint:
    """A record and its rank state, of which copies may still be in flight; without the staged tensors."""

    record: int
    step: int
    packed: codec.Packed

    @classmethod
    def known(cls, record: int, step: int, state: Mapping[str, Any]) -> RestorePoint:
        """A point with a decoded rank state."""
        return cls(record, step, codec.Packed(state, fetch=lambda tensor: tensor, token=lambda: lambda: None))

    @property
    def rank_state(self) -> bytes:
        """The rank state, encoded; waits for copies from a device."""
        return self.packed.encode()


class Staging:
    """Owns the writer of the current generation, and the prepared regions of the next one.

    `not_redoable` says why a self-test has failed, so that a resume need not repeat it; empty if it has not.
    """

    def __init__(self, training: LocalTraining, changes: Changes) -> None:
        self._live = training.live
        self._recorder = training.recorder
        self._copier = training.copier
        self._clock = training.recorder.clock
        self._changes = changes
        self._rank = training.ranks.rank
        self._anchored: tuple[tuple[tuple[int, int, str], ...], bytes] = ((), b"")
        self._captured: bytes | None = None
        self._versions: list[int] = []
        self.not_redoable = ""
        self._stalled_before = self._clock.total
        self.writer: SlotWriter | None = None
        self.prepared: PreparedRegions | None = None
        #: Closes the region of the last copy for a checkpoint: an accelerator unlocks its pages, which takes a while.
        self._unlocking: threading.Thread | None = None

    def open(self, regions: PreparedRegions) -> SlotWriter:
        """Make a writer, which owns the regions from now on."""
        message = regions.message
        return SlotWriter(regions, message.generation, self._live, self._rank, self._copier, message.whole)

    def adopt_writer(self, writer: SlotWriter) -> None:
        """Make this the writer of the current generation, and close the former one."""
        self.drop()
        self.writer = writer
        self._changes.watch(writer)

    def drop(self) -> None:
        """Close the writer of the current generation."""
        writer, self.writer = self.writer, None
        self._recorder.drop_writer()
        self._changes.unwatch()
        if writer is not None:
            writer.close()

    def take_prepared(self, spec: StateSpec) -> PreparedRegions | None:
        """The prepared regions, once, if they have this layout; the caller closes them."""
        regions, self.prepared = self.prepared, None
        if regions is not None and regions.message.spec != spec:
            regions.close()
            return None
        return regions

    def close(self) -> None:
        """Close the writer, and the prepared regions."""
        self.drop()
        regions, self.prepared = self.prepared, None
        if regions is not None:
            regions.close()
        self._finish_unlocking()

    def _finish_unlocking(self) -> None:
        if self._unlocking is not None:
            self._unlocking.join()
            self._unlocking = None

    @property
    def ready(self) -> bool:
        """Whether the current record can be committed as it is."""
        if self.writer is None or self._recorder.problem is not None:
            return False
        return self.writer.snapshots or self._recorder.writer is not None

    def open_slot(self, record: int) -> None:
        """Open a record's slot and stage its anchors, before the next step changes the state."""
        writer = self.writer
        assert writer is not None
        if writer.snapshots:
            # Gradients and steps are not recorded: the state is copied at the end of the record.
            self._recorder.begin_record(None, record)
            return
        started = time.perf_counter()
        writer.ring.open_for_writing(record, self._rank)
        assert writer.landings is not None
        writer.landings.open(record, self._recorder.tap)
        self._recorder.begin_record(writer, record)
        try:
            with torch.no_grad():
                self._anchored = writer.stage_anchors(record)
        except LayoutChangedError as error:
            self._recorder.fail(str(error))
        self._clock.anchors += time.perf_counter() - started

    def stage_by_value(self, record: int) -> None:
        """Copy by-value tensors at the end of the record, or the whole state where it is to be captured."""
        if self.writer is not None and self.writer.snapshots:
            self._capture(self.writer, record)
            return
        writer = self._recorder.writer
        if writer is None or self._recorder.problem is not None:
            return
        try:
            with torch.no_grad():
                writer.stage_by_value(record)
        except LayoutChangedError as error:
            self._recorder.fail(str(error))

    def ranks_disagree(self, record: int) -> bool:
        """Whether the ranks that share slots had different values of a tensor that is held once for them.

        Called at the end of `record`. It looks at an earlier one that all of them have committed, so all find the same.
        """
        writer = self.writer
        if writer is None:
            return False
        earlier = record - (AGREEMENT_RECORDS if self._copier.asynchronous else 1)
        names = writer.ring.disagreed(earlier)
        self._live.growth.apart.update(names)
        if names and writer.leads:
            _log.warning(
                "memckpt: the ranks %s of this node have had different values of %s since record %d, which cannot be "
                "resumed; from now on each of them keeps its own",
                list(writer.spec.local_ranks),
                ", ".join(names),
                earlier,
            )
        return bool(names)

    def outgrown(self, record: int, request: SpecRequest) -> bool:
        """Whether a record that is to be captured no longer fits the layout. With redo, recorded steps show that."""
        writer = self.writer
        if writer is None or not writer.is_snapshot(record):
            return False
        return self._live.spec(request).structure() != writer.spec.structure()

    def _capture(self, writer: SlotWriter, record: int) -> None:
        self._captured = None
        if not writer.is_snapshot(record) or self._recorder.problem is not None:
            return
        try:
            with torch.no_grad():
                self._captured = writer.capture(record)
        except LayoutChangedError as error:
            self._recorder.fail(str(error))
        self._copier.wait_before_changes()

    def commits_uncaptured(self, record: int) -> bool:
        """Whether a record is committed without a capture, since only every N-th one is captured."""
        return self.writer is not None and self.writer.snapshots and not self.writer.is_snapshot(record)

    @property
    def moved(self) -> bool:
        """Whether version counters show a change of parameters since the last record."""
        return self._versions != self._versions_now()

    def stands_at(self, record: int) -> bool:
        """Whether the live state is that after `record`, according to version counters and staged copies."""
        writer = self.writer
        if writer is None or self._recorder.stepped or self._recorder.problem is not None:
            return False
        self._changes.look_at_commit()
        return self._changes.problem is None and not writer.by_value_differs(record)

    def _versions_now(self) -> list[int]:
        return [version(param) for param in self.writer.params] if self.writer is not None else []

    def _completed(self, point: RestorePoint, writer: SlotWriter, captured: bool) -> codec.Packed:
        """The rank state, with what is known only at the end: evidence, tensors that were written to.

        Where state is captured with this record, also its parts that are in no slot.
        """
        added: dict[str, Any] = {"written": sorted(self._live.growth.written)}
        with torch.no_grad():
            added["evidence"] = writer.evidence.sample_state(point.record)
        added |= {"memory": self._live.memory, "strides": self._live.strides}  # as the sample has found them
        if captured:
            added |= {"optimizers": self._live.capture_optimizers(writer.spec), "not_redoable": self.not_redoable}
            added["left_out"] = list(self._live.left_out)
        return point.packed.joined(codec.Packed(added, self._copier.fetch, self._copier.token))

    def _seal_captured(self, writer: SlotWriter, point: RestorePoint, stall_ms: float) -> Callable[[], Commit]:
        copied, meta = self._copier.token(), self._captured
        self._versions = self._versions_now()
        rank_state = self._completed(point, writer, meta is not None)

        def finish() -> Commit:
            copied()
            if meta is not None:
                writer.ring.seal(point.record, self._rank)
            leads = meta if meta is not None and writer.leads else b""
            return Commit(writer.generation, point.record, point.step, rank_state.encode(), leads, stall_ms)

        return finish

    def seal(self, point: RestorePoint) -> Callable[[], Commit]:
        """Close the record. Returns a function that waits for its copies, sets the stamp and makes the commit."""
        writer = self.writer
        assert writer is not None
        self._copier.wait_before_changes()  # the next forward may change by-value tensors
        stalled, self._stalled_before = self._clock.total - self._stalled_before, self._clock.total
        if writer.snapshots:
            return self._seal_captured(writer, point, stalled * 1e3)
        missing, plain = self._anchored
        rank_state = self._completed(point, writer, False)
        copied = self._copier.token()
        sub_steps, digests = self._recorder.take_sub_steps(), writer.take_digests()

        def finish() -> Commit:
            copied()
            meta = b""
            if writer.leads:
                meta = encode_meta(RecordMeta(point.record, point.record - 1, False, sub_steps(), missing, plain))
            writer.seal(point.record, digests)
            return Commit(writer.generation, point.record, point.step, rank_state.encode(), meta, stalled * 1e3)

        return finish

    def write_generation(self, regions: PreparedRegions, point: RestorePoint) -> tuple[SlotWriter, GenerationCommit]:
        """Write this rank's part of the state into a new generation; the caller closes the writer, sends the commit."""
        writer = self.open(regions)
        try:
            with torch.no_grad():
                metas, missing, plain = writer.start_generation(point.record)
            self._copier.token()()
            writer.seal_generation(point.record)
        except BaseException:  # raised again: the caller never gets the writer
            writer.close()
            raise
        if not writer.leads:
            metas, missing, plain = (), (), b""
        rank_state = self._completed(point, writer, writer.snapshots).encode()
        commit = GenerationCommit(writer.generation, point.record, point.step, rank_state, metas, missing, plain)
        return writer, commit

    def expect_copy(self, order: CopyOrder) -> None:
        """Prepare the memory of a copy that is due at a later record."""
        self._copier.adopt(order.region, at_once=0)

    def copy_rank_part(self, order: CopyOrder, point: RestorePoint) -> Callable[[], RankPartCopied]:
        """Copy this rank's part of the state for a checkpoint.

        Returns a function that waits for the copies, lets go of the region and makes the reply; `missed` in it: the
        record was another one. Later work of the device waits for the copies, and this thread does not.
        """
        started = time.perf_counter()
        missed = RankPartCopied(order.record, order.number, 0.0, missed=True)
        parts = self._copy_rank_part(order, point)
        copied = self._copier.token()
        self._clock.state_copy += time.perf_counter() - started

        def finish() -> RankPartCopied:
            copied()
            seconds = time.perf_counter() - started
            if self._copier.asynchronous:
                self._unlocking = threading.Thread(target=order.region.close, name="memckpt-close", daemon=True)
                self._unlocking.start()
            else:
                order.region.close()
            if parts is None:
                return missed
            missing, plain, beside = parts
            rank_state = beside.encode() if beside is not None else b""
            return RankPartCopied(point.record, order.number, seconds, False, missing, plain, rank_state)

        return finish

    def _copy_rank_part(
        self, order: CopyOrder, point: RestorePoint
    ) -> tuple[tuple[tuple[int, int, str], ...], bytes, codec.Packed | None] | None:
        """Begin to copy. None where that cannot be: the agent asks again, and the next record shows a change."""
        self._finish_unlocking()
        writer = self.writer
        if writer is None or order.record != point.record or order.region.nbytes != writer.layout.copy_bytes:
            return None
        self._copier.adopt(order.region)
        try:
            with torch.no_grad():
                missing, plain = writer.copy_rank_part(order.region)
        except LayoutChangedError:
            return None
        beside = self._completed(point, writer, True) if writer.snapshots else None
        return (missing, plain, beside) if writer.leads else ((), b"", beside)


class Changes:
    """Watches a generation's tensors. `problem`: why the whole state has to be written again; None: it has not."""

    def __init__(self, recorder: Recorder, live: LiveState) -> None:
        self._recorder = recorder
        self._live = live
        self._watch: ParameterWatch | None = None
        self._static: StaticWatch | None = None
        self._told = 0
        self._in_a_row = 0
        self._found = ""
        self.problem: str | None = None

    @property
    def persistent(self) -> str:
        """What changes at every step, in words; empty if nothing does."""
        return f"{self._found} in {self._in_a_row} steps in a row" if self._in_a_row >= _MANY else ""

    def watch(self, writer: SlotWriter) -> None:
        """Take the current values of a generation's tensors as unchanged."""
        # State that is captured need not be watched: it is copied whatever has changed it.
        written = self._live.growth.written
        self._watch = None if writer.snapshots else ParameterWatch(writer, self._live.optimizers, written)
        self._recorder.watch_parameters(self._watch, self.look_before_step)
        self._static = StaticWatch(writer)

    def unwatch(self) -> None:
        self._watch = self._static = None
        self._recorder.watch_parameters(None)

    def look_before_step(self, number: int) -> None:
        """Look for changes, which no optimizer has made, of what this one is about to step."""
        self._find_changes(number)

    def _find_changes(self, number: int | None) -> None:
        if self._watch is not None and self.problem is None:
            self._note_change(self._watch.changed(number))

    def look_at_commit(self) -> None:
        """Look at everything at the end of a record, behind which all of it has to be as redo makes it."""
        self._recorder.end_steps()
        self._find_changes(None)
        self._in_a_row = self._in_a_row + 1 if self.problem is not None else 0

    def static_changes(self) -> list[str]:
        """Names of static tensors that have changed."""
        return self._static.changed() if self._static is not None else []

    def _note_change(self, changed: str | None) -> None:
        if changed is None:
            return
        self._told += 1
        if self._told <= _TELL:
            again = (
                "; this happens again and again and costs a copy of the whole state each time: redo='snapshot' copies "
                "it every snapshot_every_steps steps only. An optimizer that memckpt was not given does this, too, and "
                "its state is not restored"
            )
            _log.warning(
                "memckpt: %s was changed outside the optimizer; redo cannot know of that, so the state is written "
                "anew%s",
                changed,
                again if self._told == _TELL else "",
            )
        self.problem = self._found = f"{changed} was changed outside the optimizer"
