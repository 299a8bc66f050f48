"""The agent's side of the audit: which pieces are redone, and when; :mod:`memckpt.recovery.auditor` redoes them."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from memckpt.agent.unit import Unit
from memckpt.errors import AgentError
from memckpt.memory.generation import Generation
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.helper_process import AuditorProcess
from memckpt.protocol.audit import Audit, Audited, AuditedGeneration, AuditorToAgent, ForgetAudits
from memckpt.protocol.status import AuditStatus
from memckpt.protocol.trainer import Cleared, Configure, Drift
from memckpt.state.layout import Layout, Piece
from memckpt.state.records import RankGroup
from memckpt.state.spec import ITEM_BYTES, ParamSpec, StateSpec

_log = logging.getLogger("memckpt.agent")
#: Seconds of training for each unit of pause, before the process is started: its start is not free either.
_START_SECONDS = 0.1
#: Bytes of pieces, about, that are on their way at once.
_MOST_BYTES = 256 << 20
#: Elements of an audit behind the first round, and bytes of a tensor that is never audited, as it takes too long.
_ELEMENTS, _TOO_LARGE = 1 << 20, 2 << 30
#: Bytes of an element of half precision, whose rounding explains much.
_HALF_BYTES = 2
#: Periods in which the first round has to end.
_ROUND_PERIODS = 4
#: Deaths of the process after which there is none any more.
_MOST_DEATHS = 3


def _not_importable(spec: StateSpec) -> dict[int, str]:
    """Optimizers whose class only its script has, by index."""
    named = ((index, f"{one.module}.{one.qualname}") for index, one in enumerate(spec.optimizers))
    return {index: name for index, name in named if name.startswith("__main__.") or "<locals>" in name}


def _all_pieces(spec: StateSpec, layout: Layout, accelerated: bool) -> frozenset[tuple[int, int]]:
    """What can be audited: not what takes too long, nor what rounding on another device may change by any distance."""
    left_out = _not_importable(spec).keys()

    def is_left_out(param: ParamSpec) -> bool:
        wild = accelerated and param.whole and ITEM_BYTES[param.tensor.dtype] > _HALF_BYTES
        return wild or any(owner.optimizer in left_out for owner in param.owners)

    params = {index for index, param in enumerate(spec.params) if not is_left_out(param)}
    pieces = (one for group in layout.anchor_groups for one in group)
    return frozenset((one.param, one.start) for one in pieces if one.nbytes <= _TOO_LARGE and one.param in params)


@dataclass
class _Watched:
    """A generation that is audited."""

    key: int  #: that the auditor knows it by
    generation: Generation
    accelerated: bool
    pieces: frozenset[tuple[int, int]]  #: that can be audited, each by parameter and first element
    hurried: bool  #: whether the first round is on, in which audits follow each other without a pause
    left: set[tuple[int, int]]  #: pieces that can be audited, and were not yet
    whole: bool  #: whether all pieces can be audited
    began: int | None = None  #: newest record when that began
    due: set[tuple[int, int]] = field(default_factory=set)  #: pieces that this round has still to audit
    running: dict[int, list[Piece]] = field(default_factory=dict)  #: by the record whose anchors they begin with
    sent: int = 0  #: newest record whose scalars the auditor has
    seen: int = 0
    known: bool = False

    @property
    def backlog(self) -> int:
        """Pieces on their way that wait for no further record."""
        period = self.generation.spec.period
        return sum(len(pieces) for first, pieces in self.running.items() if first + period <= self.sent)


class Auditing:
    """Belongs to the agent's event loop, and owns the auditor's process. `found` gets news of a generation."""

    def __init__(self, loop: EventLoop, found: Callable[[RankGroup, Drift | Cleared], None]) -> None:
        self._loop, self._found = loop, found
        self._process: AuditorProcess | None = None
        self._ready = False
        self._share = 0.0
        self._settings = Configure(linger_seconds=0.0)
        self._start_at: float | None = None
        #: When the next audit may begin behind the first round, by the loop's clock.
        self._next_at = -math.inf
        self._watched: dict[RankGroup, _Watched] = {}
        self._keys = itertools.count(1)
        self._deaths = 0
        self._pieces = self._findings = self._late = 0
        self._record: int | None = None
        self._cpu_seconds = 0.0
        self._problem = ""

    @property
    def status(self) -> AuditStatus | None:
        """Figures; None before anything can be audited."""
        if not self._ready and not self._problem:
            return None
        backlog = sum(one.backlog for one in self._watched.values())
        return AuditStatus(
            self._pieces, self._record, self._findings, self._cpu_seconds, self._late, backlog, self._problem
        )

    def configure(self, message: Configure) -> None:
        self._share, self._settings = message.audit, message
        if not self._share:
            self.close()

    def drop_unit(self, ranks: RankGroup) -> None:
        """Audit the slots of these ranks no more: they are about to be dropped, or written by another attempt."""
        watched = self._watched.pop(ranks, None)
        if watched is not None and watched.known:
            self._send(ForgetAudits(watched.key))

    def committed(self, unit: Unit, accelerated: bool) -> None:
        """Begin or continue audits of a unit that has committed something."""
        generation = unit.held
        watched = self._watched.get(unit.ranks)
        if watched is not None and watched.generation is not generation:
            self.drop_unit(unit.ranks)
            watched = None
        if generation is None or not self._is_audited(generation):
            return
        if watched is None:
            watched = self._watched[unit.ranks] = self._watch(generation, accelerated)
            if not watched.pieces:
                self._found(unit.ranks, Cleared(generation.number, whole=False))
        newest = generation.common
        if watched.pieces and self._is_there() and newest > watched.seen:
            watched.seen = newest
            self._go_on(watched, newest)

    def _watch(self, generation: Generation, accelerated: bool) -> _Watched:
        if names := _not_importable(generation.spec):
            self._complain(f"no other process can import {', '.join(names.values())}")
        pieces = _all_pieces(generation.spec, generation.layout, accelerated)
        whole = len(pieces) == sum(map(len, generation.layout.anchor_groups))
        # What follows a finding counts as exact only once it is audited.
        hurried = self._findings > 0 or self._loop.clock() >= self._next_at
        return _Watched(next(self._keys), generation, accelerated, pieces, hurried, set(pieces), whole)

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.warning("not all steps are audited while training runs: %s", problem)

    def _is_audited(self, generation: Generation) -> bool:
        spec, whole = generation.spec, generation.regions.whole
        return bool(self._share) and spec.mode == "lazy" and spec.full and whole and not generation.drift

    def _is_there(self) -> bool:
        """Whether the process can take audits; it is started if it is time."""
        if self._process is None and self._deaths < _MOST_DEATHS:
            now = self._loop.clock()
            if self._start_at is None:
                self._start_at = now + _START_SECONDS * self._pause
            if now >= self._start_at:
                try:
                    module = "memckpt.recovery.auditor"
                    self._process = AuditorProcess(module, self._loop, self._received, self._ended)
                except AgentError as error:
                    self._ended(str(error))
        return self._ready

    def _go_on(self, watched: _Watched, newest: int) -> None:
        """Begin an audit of what is anchored half a period ahead, and send the scalars that running ones need."""
        generation, period = watched.generation, watched.generation.spec.period
        ahead = _MOST_BYTES * period // max(generation.layout.state_bytes, 1)
        first = newest - period + max(min(period // 2, ahead), min(period - 1, 1))
        # What begins anew at each step, as a script that changes weights has it, is not worth an audit.
        old = newest - (generation.base or 0) > first + period - newest
        pieces = self._chosen(watched, first, newest) if old else []
        if not pieces and (newest == watched.sent or not any(one + period <= newest for one in watched.running)):
            return
        known = watched.sent if watched.running else first - 1
        metas = {record: generation.ledger.metas.get(record, b"") for record in range(known + 1, newest + 1)}
        if not all(metas.values()):
            self._give_up(watched, pieces, newest)
            return
        watched.running |= {first: pieces} if pieces else {}
        watched.sent = newest
        told, fds = None, []
        if not watched.known:
            watched.known, fds = True, [generation.regions.slots.fd]
            ours, number, spec = self._settings, generation.number, generation.spec
            told = AuditedGeneration(
                number, spec, watched.accelerated, ours.arithmetic, ours.compute_threads, ours.search_path
            )
        names = tuple((piece.param, piece.start) for piece in pieces)
        self._send(Audit(watched.key, metas, first if pieces else None, names, told), fds)

    def _give_up(self, watched: _Watched, pieces: list[Piece], newest: int) -> None:
        """End the audits on their way, whose scalars are gone. The new key tells late answers from later ones."""
        pieces = [*pieces, *itertools.chain.from_iterable(watched.running.values())]
        self._late += len(pieces)
        watched.due |= {(one.param, one.start) for one in pieces}
        watched.running.clear()
        if watched.known:
            self._send(ForgetAudits(watched.key))
        watched.key, watched.known, watched.sent = next(self._keys), False, newest

    def _chosen(self, watched: _Watched, first: int, newest: int) -> list[Piece]:
        """The pieces to be redone from their anchors at record `first`; none: it is not time, or not their turn."""
        generation = watched.generation
        if watched.began is None:
            watched.began, watched.due = newest, set(watched.pieces)
        if not watched.due or newest > watched.began + _ROUND_PERIODS * generation.spec.period:
            watched.due, watched.hurried = watched.due or set(watched.pieces), False
        if not watched.hurried and (self._loop.clock() < self._next_at or self._busy):
            return []
        pieces = [one for one in generation.layout.due(first) if (one.param, one.start) in watched.due]
        if not watched.hurried:
            sizes = itertools.accumulate(one.stop - one.start for one in pieces)
            pieces = [one for one, size in zip(pieces, sizes, strict=True) if size <= _ELEMENTS] or pieces[:1]
        watched.due -= {(one.param, one.start) for one in pieces}
        return pieces

    @property
    def _pause(self) -> float:
        """Seconds of pause for each second of a core."""
        return 1 / self._share - 1

    @property
    def _busy(self) -> bool:
        return any(one.running for one in self._watched.values())

    # The process

    def _send(self, message: Audit | ForgetAudits, fds: list[int] | None = None) -> None:
        if self._process is not None:
            try:
                self._process.send(message, fds or [])
            except AgentError as error:
                self._ended(str(error))

    def _received(self, message: AuditorToAgent) -> None:
        self._cpu_seconds += message.cpu_seconds
        if not isinstance(message, Audited):
            self._ready = True
            _log.info("steps are redone and compared while training runs")
            return
        self._next_at = self._loop.clock() + message.cpu_seconds * self._pause
        for ranks, watched in self._watched.items():
            if watched.key == message.key:
                self._handle_result(ranks, watched, message)
                return

    def _handle_result(self, ranks: RankGroup, watched: _Watched, message: Audited) -> None:
        pieces = watched.running.pop(message.first)
        if message.late:
            self._late += len(pieces)
            watched.due |= {(one.param, one.start) for one in pieces}
            return
        if message.problem and not message.tensor:
            self._complain(message.problem)
            watched.due, watched.hurried = set(), False  # until the next round
            self._found(ranks, Cleared(watched.generation.number, whole=False))
            return
        self._pieces += len(pieces)
        last = message.first + watched.generation.spec.period
        self._record = last - 1
        number, left = watched.generation.number, watched.left
        if message.tensor:
            self._findings += 1
            drift = Drift(last, message.ulp, message.tensor, number, message.first, sure=True, problem=message.problem)
            self._found(ranks, drift)
        elif left:
            left -= {(one.param, one.start) for one in pieces}
            if not left:
                self._found(ranks, Cleared(number, watched.whole))

    def _ended(self, reason: str) -> None:
        self._deaths += 1
        _log.warning("the auditor has ended (%d of %d times): %s", self._deaths, _MOST_DEATHS, reason)
        if self._deaths == _MOST_DEATHS:
            self._problem = f"the auditor has ended {self._deaths} times: {reason}"
        self.close()

    def close(self) -> None:
        """End the process; another one may be started, as late behind a record as the first one."""
        process, self._process, self._ready = self._process, None, False
        self._start_at = None
        self._watched.clear()
        if process is not None:
            process.close()
