"""The mode in which steps are protected, agreed on by all ranks, and the self-test that may change it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from memckpt.capture.live_state import LiveState
from memckpt.capture.self_test import STEPS, SelfTest
from memckpt.capture.spec_request import SpecRequest
from memckpt.config import MemckptConfig, RedoMode
from memckpt.memory.budget import available_bytes, usable_cores
from memckpt.session.ranks import Ranks
from memckpt.state.layout import Layout
from memckpt.state.optimizers import attributes, is_elementwise, is_importable, why_not_on_host
from memckpt.state.spec import StateSpec
from memckpt.state.tensors import is_dense, local
from memckpt.user_messages import nbytes_text

_log = logging.getLogger("memckpt")
#: Size of T + D records, in bytes, up to which lazy redo is always chosen.
_SMALL_WINDOW_BYTES = 64 << 20
#: Records after which ranks ask each other whether redo is still to be trusted.
_LOOK_RECORDS = 128
#: Share of the available memory that protection may take by itself: loader workers and their batches need the rest.
SHARE = 0.75


@dataclass(frozen=True)
class LayoutSettings:
    """Settings that a generation is laid out by: mode, T in steps, and D, records in flight."""

    mode: RedoMode
    period: int
    slots: int


class ModeChoice:
    """Choice of the mode, collective over all ranks: captured records must be common, so one rank's need decides.

    An unknown optimizer is tested in its first steps. Until the test is over every record is captured, so that nothing
    depends on redo.

    Attributes:
        every: number of steps between two captures; 1 in other modes.
        not_redoable: why the self-test has failed, in words; empty if it has not.
    """

    def __init__(self, config: MemckptConfig, live: LiveState, ranks: Ranks, device: torch.device) -> None:
        self._config = config
        self._live = live
        self._ranks = ranks
        self._device = device
        self._test: SelfTest | None = None
        self._asked = False
        #: What this rank's agent has found that gradients do not explain, in words; empty if nothing.
        self._distrusted = ""
        self.not_redoable = ""
        self.every = 1
        #: Why some node has no memory for lazy redo, the same on all ranks.
        self._shortage = ranks.first_reason(self._find_shortage())
        own = choose_redo(config, live, device, len(ranks.local_ranks), self._shortage)
        untested = [
            index
            for index, optimizer in enumerate(live.optimizers)
            if index not in live.not_redoable and not is_elementwise(optimizer)
        ]
        everybody = ranks.gather((own, bool(untested)))
        chosen = next(
            (each for wanted in ("snapshot", "lazy") for each, _ in everybody if each[0] == wanted),
            own,
        )
        #: Mode and reason that apply where redo is possible.
        self._redone = chosen
        self.mode: RedoMode = chosen[0]
        self.reason = chosen[1]
        if self.mode == "snapshot":
            self.every = config.snapshot_every_steps
        elif any(each for _, each in everybody):
            names = ", ".join(sorted({type(live.optimizers[index]).__qualname__ for index in untested})) or "optimizers"
            self.mode, self.reason = "snapshot", f"the redo of {names} is tested in the first {STEPS} steps"
            self._test = SelfTest(live, untested)

    @property
    def redoes(self) -> bool:
        """Whether steps are redone from gradients, now or after the self-test."""
        return self._redone[0] != "snapshot"

    @property
    def settings(self) -> LayoutSettings:
        """Mode, T and D of the next generation."""
        return LayoutSettings(self.mode, self._config.anchor_period(self.mode), self._config.records_in_flight)

    @property
    def lazy_settings(self) -> LayoutSettings:
        """Settings of a generation with lazy redo."""
        return LayoutSettings("lazy", self._config.anchor_period("lazy"), self._config.records_in_flight)

    def _find_shortage(self) -> str:
        """Reason why ``redo="auto"`` avoids lazy redo on an accelerator, with figures; empty if there is memory."""
        config = self._config
        if config.redo != "auto" or self._device.type == "cpu" or self._live.not_redoable:
            return ""
        needed = node_bytes(self._live.spec(self.request(False, self.lazy_settings)), self._ranks)
        what, budget = "lazy redo, which is exact on an accelerator,", config.agent.memory_budget_bytes
        return _shortage(what, needed, SHARE * available_bytes(), budget)

    def request(self, asynchronous: bool, settings: LayoutSettings | None = None) -> SpecRequest:
        """Settings of a generation. `asynchronous`: commits are sent later than they are made, as on an accelerator."""
        config, ranks = self._config, self._ranks
        chosen = self.settings if settings is None else settings
        trails = config.replays and chosen.mode == "eager"
        # The replica is one record further behind, and with several ranks one of them may be filling the next slot.
        # Ranks may differ by one commit, and a commit from an accelerator is sent one record later.
        more = (ranks.world_size > 1 or chosen.slots < 3) + asynchronous if trails else 0
        return SpecRequest(
            mode=chosen.mode,
            period=chosen.period,
            every=self.every,
            slots=chosen.slots + more,
            trails=trails,
            local_ranks=ranks.unit,
            world_size=ranks.world_size,
            replicas=ranks.replicas if len(ranks.groups) > 1 else (),
            reads_late=config.reads_late,
            shares=ranks.shares,
            asynchronous=asynchronous,
            slice_number=ranks.slice_number,
            slice_count=ranks.slice_count,
        )

    def caveats(self) -> list[str]:
        """Limits of this mode, one line each. Rank 0 logs a warning about those that lose protection."""
        found = []
        if self.mode == "snapshot" and self._test is None and self._config.redo != "snapshot":
            found.append(self._loss())
            if self._ranks.rank == 0:
                _log.warning("memckpt: %s", found[-1])
        if self.mode == "eager" and self._device.type != "cpu":
            found.append(
                "the replica is redone on the CPU and may be off by units in the last place; redo='lazy' is exact"
            )
        if self._live.redone_only_here and self.redoes:
            names = ", ".join(self._live.redone_only_here)
            if self._config.audit_budget:
                found.append(f"{names}: no other process can make this optimizer, so the audit leaves its steps out")
            if self._config.storage is not None:
                found.append(
                    f"{names}: no other process can import this optimizer class, be given all of its attributes, or "
                    "step it without a device, so what an attempt that was killed leaves in memory gets to storage "
                    "only once the run is started again; checkpoints while training runs, and at its end, are made as "
                    "ever. A class in a module of its own, without functions in attributes, whose kernels run on a "
                    "CPU, too, has no such limit"
                )
                if self._ranks.rank == 0:
                    _log.warning("memckpt: %s", found[-1])
        return found

    def resume(self, held: RedoMode | None, not_redoable: str) -> None:
        """Take over the result of an earlier attempt's self-test from the held state."""
        if self._shortage and all(mode == "lazy" for mode in self._ranks.gather(held)):
            # The memory is short because the agent holds the lazy window already.
            self._redone = "lazy", "as before: what it takes is held already"
            if self.mode == "eager":
                self.mode, self.reason = self._redone
        for mode, reason in self._ranks.gather((held, not_redoable)):
            if reason:
                self.cannot_redo(reason)
                return
            if self._test is not None and mode is not None and mode != "snapshot":
                self._redo()
                return

    def install_test(self) -> None:
        """Start the self-test, if there is one, as training begins."""
        if self._test is not None:
            self._test.install()

    def distrust(self, reason: str, because: str) -> None:
        """Have all ranks capture state from the next look on; `because` says why gradients would not do."""
        if self.mode != "snapshot" and not self._distrusted:
            self._distrusted = reason
            when = "" if self._ranks.world_size == 1 else f", within {_LOOK_RECORDS} steps"
            _log.warning(
                "memckpt: %s. Resumes are not exact until the whole state is copied in place of redo%s. %s",
                reason,
                when,
                because,
            )

    def after_record(self, compiled: str | None, changing: str, record: int) -> bool:
        """Evaluate self-test and audit at the end of a record, the same one on all ranks; True if the mode has changed.

        Args:
            compiled: class name of an optimizer whose step is compiled; empty if there is none, None before any step.
            changing: what something else than its optimizer changes at every step, in words. A single rank's state is
                captured then: as exact, and less dear.
        """
        if self._find_compiled(compiled) or self._find_distrusted(record):
            return True
        if changing and self.mode != "snapshot" and self._ranks.world_size == 1:
            self.cannot_redo(changing)
            return True
        if self._test is None:
            return False
        verdicts = self._ranks.gather(self._test.after_record())
        failure = next((verdict for verdict in verdicts if verdict), None)
        if failure is not None:
            self.cannot_redo(failure)
            return True
        if all(verdict == "" for verdict in verdicts):
            self._redo()
            return True
        return False

    def _find_compiled(self, compiled: str | None) -> bool:
        """Switch to capture if an optimizer's step is compiled: its kernels round differently from those of redo.

        Ranks agree on it after the first record with a step. A rank that compiles later cannot make the others capture,
        and writes a generation after each of its steps.
        """
        if self.mode == "snapshot" and self._test is None:
            return False
        if self._live.not_redoable and not self._live.sharded:  # found while training runs, on all replicas alike
            self.cannot_redo(next(iter(self._live.not_redoable.values())))
            return True
        if not self._asked:
            everybody = self._ranks.gather(compiled)
            self._asked = any(each is not None for each in everybody)
            compiled = next((each for each in everybody if each), "")
        elif self._ranks.world_size > 1:
            return False
        if compiled:
            self.cannot_redo(f"the step of {compiled} is compiled (torch.compile)")
        return bool(compiled)

    def _find_distrusted(self, record: int) -> bool:
        """Switch to capture if the audit of some rank's node has found that redo is wrong. Returns True if it has."""
        if self.mode == "snapshot" or (self._ranks.world_size > 1 and record % _LOOK_RECORDS):
            return False
        reason = self._ranks.first_reason(self._distrusted)
        if reason:
            self.cannot_redo(reason)
        return bool(reason)

    def cannot_redo(self, reason: str) -> None:
        """Capture state in place of redo from now on, on all ranks; `reason` is told to the user."""
        said = self.mode == "snapshot" and self._test is None  # by caveats()
        self.remove_test()
        self.mode, self.reason, self.every = "snapshot", reason, self._config.snapshot_every_steps
        self.not_redoable = reason
        if not said:
            _log.warning("memckpt: %s", self._loss())

    def _loss(self) -> str:
        """What snapshots in place of redo lose, in words."""
        copied, lost = "after every step", "none"
        if self.every > 1:
            copied = f"after one step of {self.every}"
            lost = f"up to {self.every - 1} steps (MemckptConfig(snapshot_every_steps=1) loses none)"
        return (
            f"steps cannot be redone here: {self.reason}; the whole state is copied {copied} instead: "
            f"a crash loses {lost}"
        )

    def _redo(self) -> None:
        self.remove_test()
        self.mode, self.reason = self._redone
        self.every = 1

    def fall_back(self, reason: str) -> None:
        """Use lazy redo from now on: the agent's redo has failed."""
        self.mode, self.reason = "lazy", reason

    def remove_test(self) -> None:
        """Remove the self-test's hooks from the user's optimizers."""
        test, self._test = self._test, None
        if test is not None:
            test.remove()


def _window_bytes(config: MemckptConfig, live: LiveState) -> int:
    """Approximate size of T + D records, each with all gradients and a T-th of parameters and optimizer state."""
    period = config.anchor_period("lazy")
    params = {p for o in live.optimizers for group in o.param_groups for p in group["params"]}
    nbytes = sum(p.numel() * p.element_size() for p in params)
    return int(nbytes * (1 + 3 / period) * (period + config.records_in_flight))


def _lazy_instead(config: MemckptConfig, reason: str) -> tuple[RedoMode, str]:
    if config.redo == "eager":
        _log.warning("memckpt: redo='eager' is not possible here and 'lazy' is used: %s", reason)
    return "lazy", reason


def choose_redo(
    config: MemckptConfig, live: LiveState, device: torch.device, local_ranks: int, shortage: str = ""
) -> tuple[RedoMode, str]:
    """Choose the redo mode of this rank: the mode, and the reason in words.

    Eager where a core is free for it. Lazy where training needs all cores, where the agent could not redo exactly, and
    on an accelerator, whose own kernels redo exactly. Capture where it is configured, or where steps cannot be redone.
    """
    if config.redo == "snapshot":
        return "snapshot", "as configured"
    if live.not_redoable:
        return "snapshot", next(iter(live.not_redoable.values()))
    if not any(p.requires_grad for optimizer in live.optimizers for g in optimizer.param_groups for p in g["params"]):
        return _lazy_instead(config, "no parameter requires a gradient, so that a replica would be empty")
    for optimizer in live.optimizers:
        name = type(optimizer).__qualname__
        if not is_importable(type(optimizer)):
            return _lazy_instead(config, f"{name} cannot be imported by name in another process")
        _, dropped = attributes(optimizer)
        if dropped:
            return _lazy_instead(config, f"attribute {dropped[0]!r} of {name} cannot be given to the agent")
        if reason := why_not_on_host(optimizer):
            return _lazy_instead(config, reason)
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        if not all(local(param).is_contiguous() or is_dense(local(param)) for param in stepped):
            return _lazy_instead(config, f"{name} steps a tensor with gaps in its memory, and a replica has none")
    if config.redo != "auto":
        return config.redo, "as configured"
    if device.type != "cpu":
        return ("eager", shortage) if shortage else ("lazy", "exact on an accelerator, and takes no core")
    low = next((name for name, t in live.tensors().items() if t.dtype in (torch.bfloat16, torch.float16)), None)
    if low is not None:
        return "lazy", f"{low} is in half precision, where thread counts change the bits"
    window = _window_bytes(config, live)
    if window <= _SMALL_WINDOW_BYTES:
        # With eager redo, steps of a few milliseconds would wait for the replica, and the start for an import of torch.
        return "lazy", f"the model is small: the records that lazy redo holds take {nbytes_text(window)}"
    busy = torch.get_num_threads() * local_ranks
    cores = usable_cores()
    if cores - busy >= config.agent.threads:
        return "eager", f"training uses {busy} of {cores:g} cores"
    return "lazy", f"training uses all of the {cores:g} cores"


def node_bytes(spec: StateSpec, ranks: Ranks) -> int:
    """Shared memory of a generation on this node, in bytes: all units hold shards of about the same size."""
    return Layout(spec).total_bytes * len(ranks.local_ranks) // len(ranks.unit)


def find_shortage(config: MemckptConfig, ranks: Ranks, spec: StateSpec, held: StateSpec | None) -> str:
    """Reason why a layout is not advised in place of the held one, with figures; empty if there is memory for it.

    A budget is not advised to the full: generations to come need some of it.
    """
    given_back = node_bytes(held, ranks) if held is not None else 0
    budget = config.agent.memory_budget_bytes
    room = SHARE * (available_bytes() + given_back)
    return _shortage("it", node_bytes(spec, ranks), room, None if budget is None else SHARE * budget)


def _shortage(what: str, needed: int, room: float, budget: float | None) -> str:
    source = f"{SHARE:.0%} of the available memory"
    if budget is not None and budget < room:
        room, source = budget, "of agent.memory_budget_bytes"
    if needed <= room:
        return ""
    return (
        f"{what} would take {nbytes_text(needed)} of this node's memory, and {nbytes_text(room)} are there for it "
        f"({source})"
    )
