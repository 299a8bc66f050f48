"""A session: one training process's protection, from attach to close."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.agent.address import AgentAddress
from memckpt.agent.client import AgentClient, PreparedRegions
from memckpt.agent.messages import (
    PROTOCOL_VERSION,
    Alarm,
    Begin,
    Commit,
    Drift,
    Gap,
    GenerationCommit,
    Hello,
    Prepare,
    Protected,
    Resume,
    Void,
)
from memckpt.capture import gradient_ops
from memckpt.capture.copier import copier_for
from memckpt.capture.live_state import LiveState, SpecRequest
from memckpt.capture.recorder import Recorder, StallClock
from memckpt.capture.slot_writer import LayoutChangedError, SlotWriter
from memckpt.capture.taps import CommHookTap, ParameterTap, PendingTap, StepHooks, Tap
from memckpt.capture.watch import ParameterWatch, StaticWatch
from memckpt.config import MemckptConfig, ResumeChoice, check_resume
from memckpt.errors import AgentGoneError, ForeignStateError, MemckptError, UnsupportedError, UsageError
from memckpt.recovery.plan import Plan, RestoreRecord, StartOver, make_plan
from memckpt.recovery.restore import Restorer, replica_digest
from memckpt.session.choice import choose_redo
from memckpt.session.ranks import Ranks, find_launcher
from memckpt.state import codec, rng
from memckpt.state.layout import StateSpec
from memckpt.state.records import RecordMeta, encode_meta

_log = logging.getLogger("memckpt")
#: After an agent could not be started, try again this many records later.
_RETRY_RECORDS = 50
#: So often a change of parameters outside the optimizer is told.
_TELL_CHANGES = 3


class Stateful(Protocol):
    """An object whose state belongs to the rank state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class HeldState:
    """What the plan decided to restore, before it is restored.

    Attributes:
        step: the framework's step number at that record.
        record: the record's number.
        tier: where it comes from, in words.
        rank_state: what this rank's captures returned then, by the names given to ``provide``.
    """

    step: int
    record: int
    tier: str
    rank_state: Mapping[str, Any]


@dataclass(frozen=True)
class RestoreReport:
    """A restore that has happened: every field is known only once the state is back in the live tensors."""

    step: int
    record: int
    tier: str
    seconds: float
    steps_lost: int


@dataclass(frozen=True)
class _RestorePoint:
    """What a commit is made of beside the staged tensors."""

    record: int
    step: int
    rank_state: bytes


class Session:
    """Protects one model and its optimizers. Made by :func:`memckpt.attach`; not thread-safe.

    Order of calls: attach, ``provide``/``register``, ``restore``, then ``commit`` at each restore point, ``close``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        run_dir: Path,
        resume: ResumeChoice | int,
        config: MemckptConfig,
        data_parallel: DistributedDataParallel | None,
        extra_modules: Mapping[str, nn.Module],
    ) -> None:
        self._config = config
        self._live = LiveState(model, optimizers, extra_modules)
        self._ranks = Ranks()
        if self._ranks.world_size > 1 and data_parallel is None:
            raise UnsupportedError(
                f"{self._ranks.world_size} ranks without DistributedDataParallel: expected the DDP wrapper as "
                "data_parallel (or as the model itself), so that records hold synchronized gradients"
            )
        if self._ranks.world_size > 1 and config.slots < 3:
            raise UnsupportedError(
                f"slots: expected 3 or more with several ranks (their commits differ by one), found {config.slots}"
            )
        self._device = next(p.device for o in optimizers for g in o.param_groups for p in g["params"])
        self._clock = StallClock()
        self._copier = copier_for(self._device)
        self._recorder = Recorder(self._live, self._copier, self._clock)
        self._recorder.on_backward = self._watch_changes
        self._data_parallel = data_parallel
        self._address = AgentAddress.of(run_dir)
        self._captures: dict[str, Callable[[], Any]] = {}
        self._loaders: dict[str, Callable[[Any], Any]] = {}
        self._client: AgentClient | None = None
        self._writer: SlotWriter | None = None
        self._fresh: PreparedRegions | None = None
        self._resumable: PreparedRegions | None = None
        self._watch: ParameterWatch | None = None
        self._static_watch: StaticWatch | None = None
        self._generation_after: int | None = None
        self._unprotected_since: int | None = None
        self._retry_at = 0
        self._closed = False
        self._resume_from: RestoreRecord | None = None
        self._anchored: tuple[tuple[tuple[int, int, str], ...], bytes] = ((), b"")
        self._sender: threading.Thread | None = None
        self._send_problem: AgentGoneError | None = None
        self._reductions_at_commit = 0
        self._watch_problem: str | None = None
        self._hidden_changes = False
        self._changes_told = 0
        self.drift_ulp = 0.0
        #: What cannot be made exact or be checked, in words, one line each.
        self.caveats: list[str] = []
        self._stalled_before = 0.0
        self.held: HeldState | None = None

        mode, self.mode_reason = choose_redo(config, self._live, self._device, len(self._ranks.local_ranks))
        modes = self._ranks.gather((mode, self.mode_reason))
        for other, reason in modes:
            if other == "lazy" and mode != "lazy":
                mode, self.mode_reason = other, reason
        self.mode = mode
        if mode == "eager" and self._device.type != "cpu":
            self.caveats.append(
                "the replica is redone on the CPU and may be off by units in the last place; redo='lazy' is exact"
            )
        self._request = SpecRequest(
            mode=mode,
            period=config.anchor_period(mode),
            slots=config.slots,
            local_ranks=self._ranks.local_ranks,
            world_size=self._ranks.world_size,
        )
        self._step_hooks = StepHooks(optimizers, self._recorder)
        self._tap, self.tap_reason = self._choose_tap()
        try:
            self._start(resume)
        except BaseException:
            self._abandon()
            raise
        self._step_hooks.install()
        self._tap.install()
        gradient_ops.listen(self)
        _raise_oom_score()

    # Start

    def _choose_tap(self) -> tuple[Tap, str]:
        params = [p for o in self._live.optimizers for g in o.param_groups for p in g["params"]]
        for index in self._live.changing_optimizers:
            name = type(self._live.optimizers[index]).__qualname__
            self.caveats.append(
                f"{name} as configured changes gradients within its step; where it is called with a closure, changes "
                "to gradients that torch's own functions did not make go unnoticed (foreach=False avoids that)"
            )
        if self._config.tap == "step":
            self._recorder.streams = False
            return PendingTap(params, self._recorder), "as configured"
        if self._data_parallel is not None:
            if CommHookTap.available(self._data_parallel):
                tap = CommHookTap(self._data_parallel, self._recorder, self._copier, self._before_backward)
                return tap, "gradients are taken from DDP's buckets once they are reduced"
            self._recorder.streams = False
            reason = "a communication hook was registered before memckpt; attach first, then register it"
            return PendingTap(params, self._recorder), reason
        return ParameterTap(params, self._recorder, self._copier), "gradients are taken as backward produces them"

    def _start(self, resume: ResumeChoice | int) -> None:
        ranks = self._ranks
        spec = self._live.spec(self._request)
        held = ranks.together(lambda: self._say_hello(spec, rejoining=False))
        plan: Plan = make_plan(held, resume, ranks.world_size, ranks.nonce)
        self._timeline = plan.timeline
        if isinstance(plan, RestoreRecord):
            own = held[ranks.rank]
            ranks.together(lambda: self._open_held(plan, own.ranks))
        else:
            ranks.together(lambda: self._prepare_fresh(spec, plan))

    def _say_hello(self, spec: StateSpec, rejoining: bool) -> Any:
        self._client = AgentClient.connect(self._address, self._config.agent)
        hello = Hello(
            version=PROTOCOL_VERSION,
            nonce=self._ranks.nonce,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            local_ranks=self._ranks.local_ranks,
            launcher=find_launcher(self._ranks.world_size),
            fingerprint=tuple(spec.fingerprint()),
            rejoining=rejoining,
            next_record=self._recorder.record,
        )
        held = self._client.hello(hello)
        self._client.configure(self._config.agent.linger_seconds)
        return held

    def _prepare_fresh(self, spec: StateSpec, plan: StartOver) -> None:
        if plan.reason != "resume='never'":
            level = logging.WARNING if plan.discard else logging.INFO
            _log.log(level, "memckpt: starting over: %s", plan.reason)
        self._fresh = self._prepare(spec, discard=plan.discard)
        self._recorder.begin(None, 1)
        self._generation_after = 1

    def _prepare(self, spec: StateSpec, discard: bool = False) -> PreparedRegions:
        assert self._client is not None
        agent = self._config.agent
        return self._client.prepare(Prepare(spec, self._timeline, agent.threads, agent.memory_budget_bytes, discard))

    def _open_held(self, plan: RestoreRecord, held_ranks: tuple[int, ...]) -> None:
        assert self._client is not None
        if held_ranks != self._ranks.local_ranks:
            # Rank states cannot travel between nodes yet.
            raise ForeignStateError(
                f"node {self._ranks.node} holds the states of ranks {list(held_ranks)}, but in this attempt ranks "
                f"{list(self._ranks.local_ranks)} run there; expected every rank on the node where it was. "
                "Restart with the same placement of ranks, or use resume='never' to drop what is held"
            )
        resume = Resume(plan.record, plan.timeline, self._config.agent.linger_seconds)
        self._resumable = self._client.resume(resume)
        state = codec.decode(self._resumable.message.rank_states[self._ranks.rank])
        self._resume_from = plan
        self._resume_state = state
        self.held = HeldState(plan.step, plan.record, plan.tier, state["provided"])
        spec = self._resumable.message.spec
        growth = self._live.growth
        growth.sub_steps = {i: optimizer.sub_steps for i, optimizer in enumerate(spec.optimizers)}
        growth.sparse_bytes = {p.tensor.name: p.sparse_bytes for p in spec.params if p.sparse_bytes}
        growth.changing = {tensor.name for tensor in spec.by_value}
        self._recorder.begin(None, plan.record + 1)

    # What belongs to the rank state

    def provide(self, name: str, capture: Callable[[], Any]) -> None:
        """Have `capture()` called at each commit; what it returns is in ``held.rank_state[name]`` after a resume."""
        if name in self._captures:
            raise UsageError(f"rank state {name!r}: expected a new name, found one that is provided already")
        self._captures[name] = capture

    def register(self, name: str, obj: Stateful) -> None:
        """Make an object with ``state_dict`` and ``load_state_dict`` part of what is committed and restored."""
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise UsageError(
                f"register({name!r}): expected an object with state_dict() and load_state_dict(), found "
                f"{type(obj).__qualname__}"
            )
        self.provide(name, obj.state_dict)
        self._loaders[name] = obj.load_state_dict

    def _rank_state(self) -> bytes:
        return codec.encode(
            {
                "rng": rng.capture(),
                "groups": self._live.describe_groups(),
                "trainable": self._live.trainable(),
                "state_order": self._live.describe_state_order(),
                "reduction": self._tap.layout if isinstance(self._tap, CommHookTap) else None,
                "provided": {name: capture() for name, capture in self._captures.items()},
            }
        )

    # Restore

    def restore(self) -> RestoreReport | None:
        """Put everything back: tensors, optimizer state, registered objects, and as the last thing the RNG states.

        Call it once, right before the training loop. Returns None when there was nothing to restore.
        """
        report = self.restore_tensors()
        if report is not None and self.held is not None:
            for name, load in self._loaders.items():
                if name in self.held.rank_state:
                    load(self.held.rank_state[name])
            self.restore_rng()
        return report

    def restore_tensors(self) -> RestoreReport | None:
        """Put parameters, buffers, optimizer state and groups back, in place; the first half of :meth:`restore`."""
        plan, regions = self._resume_from, self._resumable
        if plan is None or regions is None:
            return None
        started = time.perf_counter()
        self._resumable = None
        message = regions.message
        self._live.restore_trainable(self._resume_state["trainable"])
        self._live.restore_groups(self._resume_state["groups"])
        writer = self._make_writer(regions)
        restorer = Restorer(
            writer.layout,
            regions.slots,
            regions.static,
            regions.replica,
            writer.ring,
            self._live.tensors(),
            self._live.optimizers,
        )
        with rng.preserved():
            restorer.restore(plan.record, self._ranks.rank, message.metas, message.missing, message.plain)
        self._live.restore_state_order(self._resume_state["state_order"])
        self._agree_on_replicas(writer)
        self._adopt_writer(writer)
        if isinstance(self._tap, CommHookTap):
            self._tap.resume_layout(self._resume_state["reduction"])
        if self._live.spec(self._request) == message.spec:
            self._begin_record(plan.record + 1)
        else:
            # Other settings than the last attempt's, or a state that has grown: start a new generation.
            self._recorder.begin(None, plan.record + 1)
            self._generation_after = plan.record + 1
        return RestoreReport(plan.step, plan.record, plan.tier, time.perf_counter() - started, plan.lost)

    def _agree_on_replicas(self, writer: SlotWriter) -> None:
        """Holders may differ (other kernels, other thread counts): then the first rank's replica is everybody's."""
        if self._ranks.world_size == 1:
            return
        digests = self._ranks.gather(replica_digest(writer.params, self._live.optimizers))
        if len(set(digests)) == 1:
            return
        _log.warning("memckpt: the nodes' replicas differ in bits; every rank takes that of rank 0")
        for param in writer.params:
            self._ranks.broadcast_tensor(param.data, 0)
            for optimizer in self._live.optimizers:
                state = optimizer.state.get(param, {})
                for key in sorted(state):
                    if isinstance(state[key], torch.Tensor):
                        self._ranks.broadcast_tensor(state[key], 0)

    def restore_rng(self) -> None:
        """Put the RNG states of torch, numpy and python back; the last thing before training goes on."""
        if self._resume_from is not None:
            rng.restore(self._resume_state["rng"])

    # Writers and records

    def _make_writer(self, regions: PreparedRegions) -> SlotWriter:
        message = regions.message
        return SlotWriter(
            message.spec,
            message.generation,
            regions.slots,
            regions.static,
            regions.replica,
            self._live,
            self._ranks.rank,
            self._copier,
        )

    def _adopt_writer(self, writer: SlotWriter) -> None:
        self._drop_writer()
        self._writer = writer
        self._watch = self._recorder.watch = ParameterWatch(writer)
        self._static_watch = StaticWatch(writer)

    def _drop_writer(self) -> None:
        writer, self._writer, self._watch, self._static_watch = self._writer, None, None, None
        self._recorder.writer = self._recorder.watch = None
        if writer is not None:
            writer.close()

    def _begin_record(self, record: int) -> None:
        """Open the next record's slot and stage the anchors due in it: the state is read-only until the next step."""
        writer, client = self._writer, self._client
        assert writer is not None
        assert client is not None
        if writer.spec.mode == "eager":
            started = time.perf_counter()
            client.wait_applied(record - writer.spec.slots)
            self._clock.slot_wait += time.perf_counter() - started
        started = time.perf_counter()
        self._recorder.begin(writer, record)
        writer.ring.open_for_writing(record, self._ranks.rank)
        try:
            with torch.no_grad():
                self._anchored = writer.stage_anchors(record)
        except LayoutChangedError as error:
            self._recorder.fail(str(error))
        self._clock.anchors += time.perf_counter() - started

    # During a step

    def gradients_change(self, kind: str, operand: Any, params: list[torch.Tensor]) -> None:
        """From :mod:`memckpt.capture.gradient_ops`: gradients are about to be changed in place."""
        self._recorder.gradients_change(kind, operand, params)

    def gradients_changed(self, params: list[torch.Tensor]) -> None:
        """From :mod:`memckpt.capture.gradient_ops`: the change is made."""
        self._recorder.note_versions(params)

    def _before_backward(self) -> None:
        """No rank enters the backward of a record before its commit of the one before has been sent."""
        self._join_sender()

    def _join_sender(self) -> None:
        if self._sender is not None:
            self._sender.join()
            self._sender = None

    # Commit

    def commit(self, step: int | None = None, gradients_pending: bool | None = None) -> bool:
        """End a record here, if this is a restore point: after the optimizer's step, with no gradient pending.

        Args:
            step: the framework's step number; None takes the record's number.
            gradients_pending: whether a backward has run whose gradients no step has used yet; None lets the taps
                decide. Where a scaler skipped the step, pass False.

        Returns:
            True if this was a restore point; False if the record goes on (gradients are being accumulated).
        """
        if self._closed:
            raise UsageError("commit() after close(): attach again to go on")
        if self._resumable is not None:
            raise UsageError("commit() before restore(): something is held; call session.restore() before training")
        started = time.perf_counter()
        inner = self._clock.total - self._clock.commit
        try:
            if not self._is_restore_point(gradients_pending):
                return False
            # First of all: user code runs in it, and what it raises leaves everything as it was.
            rank_state = self._rank_state()
            self._recorder.gradients_pending = False
            if isinstance(self._tap, CommHookTap):
                self._reductions_at_commit = self._tap.reductions
            record = self._recorder.record
            self._commit(_RestorePoint(record, record if step is None else step, rank_state))
            return True
        finally:
            inner = self._clock.total - self._clock.commit - inner
            self._clock.commit += time.perf_counter() - started - inner

    def _is_restore_point(self, gradients_pending: bool | None) -> bool:
        pending = self._recorder.gradients_pending if gradients_pending is None else gradients_pending
        # A batch without a reduction of all ranks belongs to the next record: nothing orders the ranks in it.
        unordered = isinstance(self._tap, CommHookTap) and self._tap.reductions == self._reductions_at_commit
        return not pending and not unordered

    def _commit(self, point: _RestorePoint) -> None:
        try:
            self._listen()
            if self._client is None:
                self._try_again(point)
            else:
                self._commit_or_begin(point)
        except AgentGoneError as error:
            self._lose_agent(point.record, str(error))
            self._try_again(point)
        except MemckptError as error:
            self._lose_agent(point.record, str(error))
        if self._recorder.record == point.record:
            self._recorder.begin(None, point.record + 1)

    def _commit_or_begin(self, point: _RestorePoint) -> None:
        record, client = point.record, self._client
        assert client is not None
        self._stage_by_value(record)
        problem = self._find_problem()
        due = self._generation_after
        if due is None and problem is not None:
            due = self._order_generation(record, problem)
        if due is not None and record >= due:
            self._begin_generation(point)
        elif self._writer is not None and self._recorder.writer is not None and self._recorder.problem is None:
            self._send_commit(self._writer, point)
            self._begin_record(record + 1)
        else:
            client.send(Void(record, problem or self._recorder.problem or "no generation to write to"))

    def _stage_by_value(self, record: int) -> None:
        if self._recorder.writer is None or self._recorder.problem is not None:
            return
        try:
            with torch.no_grad():
                self._recorder.writer.stage_by_value(record)
        except LayoutChangedError as error:
            self._recorder.fail(str(error))

    def _find_problem(self) -> str | None:
        """Why this record cannot be staged as it stands."""
        if self._recorder.tap_mismatch is not None:
            self._change_tap(self._recorder.tap_mismatch)
        if self._recorder.problem is not None:
            return self._recorder.problem
        if self._static_watch is not None:
            changed = self._static_watch.changed()
            if changed is not None:
                self._live.growth.changing.add(changed)
                return f"{changed} has changed and is staged with every record from now on"
        return self._watch_problem

    def _order_generation(self, record: int, reason: str) -> int:
        """When the new generation begins: now if this rank is alone, else after a record that all local ranks reach."""
        assert self._client is not None
        _log.info("memckpt: a new generation begins: %s", reason)
        if self._ranks.world_size == 1:
            return record
        self._generation_after = self._client.ask_for_generation(record + 1, reason)
        return self._generation_after

    def _change_tap(self, reason: str) -> None:
        self._recorder.tap_mismatch = None
        self._recorder.streams = False
        self.tap_reason = reason
        _log.warning("memckpt: gradients are now taken after the optimizer's step: %s", reason)
        if isinstance(self._tap, ParameterTap):
            self._tap.remove()
            params = [p for o in self._live.optimizers for g in o.param_groups for p in g["params"]]
            self._tap = PendingTap(params, self._recorder)
            self._tap.install()

    def _send_commit(self, writer: SlotWriter, point: _RestorePoint) -> None:
        record = point.record
        missing, plain = self._anchored
        copied = self._copier.token()
        sub_steps = self._recorder.take_sub_steps()
        client = self._client
        assert client is not None

        def send() -> None:
            copied()
            meta = b""
            if writer.leads:
                steps = sub_steps()
                meta = encode_meta(RecordMeta(record, record - 1, False, steps, missing, plain))
            writer.ring.seal(record, self._ranks.rank)
            client.send(Commit(writer.generation, record, point.step, point.rank_state, meta))

        if self._copier.asynchronous:
            self._send_from_thread(send)
        else:
            send()

    def _send_from_thread(self, send: Callable[[], None]) -> None:
        """Copies from an accelerator end later: a small thread waits for them and sends the commit."""

        def run() -> None:
            try:
                send()
            except AgentGoneError as error:
                self._send_problem = error

        self._join_sender()
        self._sender = threading.Thread(target=run, name="memckpt-commit", daemon=True)
        self._sender.start()

    # Generations

    def _begin_generation(self, point: _RestorePoint) -> None:
        """Write the whole state by value; the log goes on from here."""
        record, client = point.record, self._client
        assert client is not None
        self._join_sender()
        started = time.perf_counter()
        spec = self._live.spec(self._request)
        regions = self._fresh
        self._fresh = None
        if regions is None or regions.message.spec != spec:
            if regions is not None:
                regions.close()
            regions = self._prepare(spec)
        writer = self._make_writer(regions)
        try:
            with torch.no_grad():
                metas, missing, plain = writer.start_generation(record)
            self._copier.token()()
            writer.seal_generation(record)
            if not writer.leads:
                metas, missing, plain = (), (), b""
            client.applied = record
            client.send(
                GenerationCommit(writer.generation, record, point.step, point.rank_state, metas, missing, plain)
            )
        except BaseException:
            writer.close()
            raise
        self._adopt_writer(writer)
        self._generation_after = None
        self._watch_problem = None
        self._recorder.check.restart()
        if isinstance(self._tap, (ParameterTap, PendingTap)):
            self._tap.remove()  # parameters may have been unfrozen since
            self._tap.install()
        if self._unprotected_since is not None:
            gap = record - self._unprotected_since
            _log.warning("memckpt: protected again from step %d on; %d steps were not", point.step, gap)
            self._unprotected_since = None
        _log.debug("memckpt: generation %d began in %.3f s", writer.generation, time.perf_counter() - started)
        self._begin_record(record + 1)

    # The agent's news, and its loss

    def _listen(self) -> None:
        if self._watch is not None:
            # Whoever has once changed values behind the counters' back may do it after every step.
            self._note_change(self._watch.changed() if self._hidden_changes else self._watch.counted_change())
        if self._send_problem is not None:
            problem, self._send_problem = self._send_problem, None
            raise problem
        if self._client is None:
            return
        for notice in self._client.notices():
            if isinstance(notice, Begin):
                self._generation_after = notice.record
            elif isinstance(notice, Alarm):
                _log.error("memckpt: %s", notice.reason)
                self._recorder.fail(notice.reason)
                if self._request.mode == "eager":
                    self._fall_back_to_lazy(notice.reason)
            elif isinstance(notice, Drift):
                self._note_drift(notice)
            elif isinstance(notice, Gap):
                _log.warning("memckpt: not protected until the state is written anew: %s", notice.reason)
            elif isinstance(notice, Protected):
                _log.debug("memckpt: generation %d is complete", notice.generation)

    def _fall_back_to_lazy(self, reason: str) -> None:
        self.mode, self.mode_reason = "lazy", f"the agent's redo failed: {reason}"
        self._request = SpecRequest(
            mode="lazy",
            period=self._config.anchor_period("lazy"),
            slots=self._config.slots,
            local_ranks=self._request.local_ranks,
            world_size=self._request.world_size,
        )

    def _note_drift(self, drift: Drift) -> None:
        before, self.drift_ulp = self.drift_ulp, max(self.drift_ulp, drift.max_ulp)
        exact = self._device.type == "cpu"
        jump = not exact and before > 0 and drift.max_ulp > 1024 * before
        if exact or jump:
            _log.warning(
                "memckpt: the audit found %s off by %g ulp at record %d: it was changed outside the optimizer, or the "
                "optimizer cannot be redone exactly; the replica is written anew",
                drift.tensor,
                drift.max_ulp,
                drift.record,
            )
            self._recorder.fail(f"drift in {drift.tensor}")

    def _watch_changes(self) -> None:
        """As a backward begins: were parameters changed since their optimizer's step?"""
        if self._watch is not None and self._watch_problem is None:
            counted = self._watch.counted_change()
            changed = counted or self._watch.changed()
            self._hidden_changes = self._hidden_changes or (changed is not None and counted is None)
            self._note_change(changed)

    def _note_change(self, changed: str | None) -> None:
        if changed is not None and self._watch_problem is None:
            self._changes_told += 1
            if self._changes_told <= _TELL_CHANGES:
                _log.warning(
                    "memckpt: %s was changed outside the optimizer; redo cannot know of that, so the state is written "
                    "anew%s",
                    changed,
                    "; this happens again and again and costs a copy of the whole state each time"
                    if self._changes_told == _TELL_CHANGES
                    else "",
                )
            self._watch_problem = f"{changed} was changed outside the optimizer"

    def _lose_agent(self, record: int, reason: str) -> None:
        if self._unprotected_since is None:
            self._unprotected_since = record
            _log.warning("memckpt: training goes on without protection since step %d: %s", record, reason)
        self._drop_writer()
        for regions in (self._fresh, self._resumable):
            if regions is not None:
                regions.close()
        self._fresh = self._resumable = None
        if self._client is not None:
            self._client.abandon()
            self._client = None
        self._retry_at = record

    def _try_again(self, point: _RestorePoint) -> None:
        """Start a new agent and, when this rank is alone, a new generation at once."""
        if point.record < self._retry_at:
            return
        try:
            self._say_hello(self._live.spec(self._request), rejoining=True)
            self._generation_after = point.record if self._ranks.world_size == 1 else None
            self._listen()
            self._commit_or_begin(point)
        except MemckptError as error:
            self._lose_agent(point.record, str(error))
            self._retry_at = point.record + _RETRY_RECORDS
            _log.warning("memckpt: no agent (%s); trying again in %d steps", error, _RETRY_RECORDS)

    # What is shown

    def metrics(self) -> dict[str, float]:
        """Milliseconds stalled since the last call, records not yet applied, drift in ulps, the newest record."""
        stalled, self._stalled_before = self._clock.total - self._stalled_before, self._clock.total
        lag = 0.0
        if self._client is not None and self._request.mode == "eager":
            lag = float(max(0, self._recorder.record - 1 - self._client.applied))
        return {
            "stall_ms": stalled * 1e3,
            "lag_steps": lag,
            "drift_ulp": self.drift_ulp,
            "step": float(self._recorder.record - 1),
        }

    @property
    def stall(self) -> StallClock:
        """Seconds spent in the training thread since the session began, by cause."""
        return self._clock

    @property
    def agent_pid(self) -> int | None:
        """Process id of this node's agent, None while there is none."""
        return self._client.agent_pid if self._client is not None else None

    def describe(self) -> str:
        """One line: what protects this run, how, and at what price in memory."""
        from memckpt.state.layout import Layout

        layout = Layout(self._live.spec(self._request))
        return (
            f"memckpt: protecting every step of {layout.numel / 1e6:.1f}M parameters: {self.mode} redo "
            f"({self.mode_reason}), tap: {self._tap.name}, T={self._request.period}, D={self._request.slots}, "
            f"{layout.total_bytes / 2**20:.0f} MiB on node {self._ranks.node}, agent pid {self.agent_pid}"
            + "".join(f"; note: {caveat}" for caveat in self.caveats)
        )

    # End

    def close(self, finished: bool = True) -> None:
        """Leave. With `finished` nothing needs to be held any more and the agent goes, too; without it holds on."""
        if self._closed:
            return
        self._closed = True
        self._join_sender()
        self._tap.remove()
        self._step_hooks.remove()
        gradient_ops.unlisten(self)
        client, self._client = self._client, None
        self._abandon()
        if client is not None:
            client.close(finished)

    def _abandon(self) -> None:
        self._drop_writer()
        for regions in (self._fresh, self._resumable):
            if regions is not None:
                regions.close()
        self._fresh = self._resumable = None
        if self._client is not None:
            self._client.abandon()
            self._client = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)


def _raise_oom_score() -> None:
    """Of trainer and agent, let the kernel shoot the trainer first: the state outlives it."""
    path = Path("/proc/self/oom_score_adj")
    try:
        score = int(path.read_text())
        path.write_text(str(min(1000, max(score, 0) + 50)))
    except OSError as error:
        _log.debug("memckpt: oom_score_adj stays as it is: %s", error)


def attach(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    run_dir: str | os.PathLike[str],
    resume: ResumeChoice | int = "auto",
    config: MemckptConfig | None = None,
    data_parallel: DistributedDataParallel | None = None,
    extra_modules: Mapping[str, nn.Module] | None = None,
) -> Session:
    """Protect a training from here on.

    Connects to this node's agent (starts it if there is none), agrees with the other ranks on what to resume, and
    installs the taps. Call it when model and optimizers exist and, with several ranks, after the process group does.

    Args:
        model: the model; a DistributedDataParallel wrapper is taken apart.
        optimizers: one, or several.
        run_dir: names the run; attempts with the same directory continue each other.
        resume: ``"auto"`` resumes if something is held, ``"require"`` raises if nothing is, ``"never"`` drops what is
            held, a number resumes exactly that step.
        config: settings; None takes the defaults.
        data_parallel: the DDP wrapper, where `model` is not it.
        extra_modules: modules outside the model whose tensors belong to the state (averaged models).

    Raises:
        NothingHeldError, ForeignStateError, RunBusyError, MemoryBudgetError, UnsupportedError, AgentError
    """
    if isinstance(model, DistributedDataParallel):
        data_parallel = model
        model = model.module
    return Session(
        model,
        [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers),
        run_dir=Path(run_dir),
        resume=check_resume(resume),
        config=config or MemckptConfig(),
        data_parallel=data_parallel,
        extra_modules=extra_modules or {},
    )
