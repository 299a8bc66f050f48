"""Schedule of reconnections: at once to an agent that died, rarely to one that stands still.

An agent that stands still (stopped, or its node's memory is being reclaimed) cannot be replaced: it holds the state,
and answers once it runs again. Training waits for it once. After that each commit polls for the answer to a question.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from memckpt.errors import AgentError, AgentGoneError
from memckpt.processes.address import AgentAddress, peer
from memckpt.processes.backoff import Backoff
from memckpt.protocol.channel import TrainerChannel
from memckpt.protocol.status import StatusRequest

_log = logging.getLogger("memckpt")
#: Time that training waits for the answer of a lost agent; later commits poll without waiting.
PROBE_SECONDS = 1.0
#: Pause after a failed attempt, as a multiple of the attempt's duration.
_PAUSE_PER_COST = 10.0
#: Pauses before an agent is used that has stood still repeatedly: the first, the longest; and the time without a stop
#: after which the next one counts as a first.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _STEADY_SECONDS = 60.0, 3600.0, 1800.0


class Reconnection:
    """Decides, at each commit without an agent, whether to try again. Owns a connection, which :meth:`forget` closes.

    Args:
        address: address of the agent.
        patience: time that the first question waits for an answer, in seconds.
        pauses: False for no pauses, where other nodes wait for this one until it is overdue.
        clock: returns the current time, in seconds.
    """

    def __init__(
        self,
        address: AgentAddress,
        patience: float = PROBE_SECONDS,
        pauses: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._patience = patience
        self._pauses = pauses
        self._clock = clock
        self._question: TrainerChannel | None = None
        self._not_before = self._began = clock()
        self._failures = Backoff(clock, at_once=0, steady=math.inf)
        self._stumbles = Backoff(clock, steady=math.inf)
        self._stops = Backoff(
            clock, at_once=1, first=_FIRST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS, steady=_STEADY_SECONDS
        )

    def due(self) -> bool:
        """Whether to try now: no agent answers the address, so that one can be started, or one answers the question."""
        self._began = self._clock()
        if self._began < self._not_before:
            return False
        try:
            return self._ask() if self._question is None else self._answered_late(self._question)
        except AgentGoneError as error:
            # It has died since; or it accepts nothing, and the next commit must not wait for that, either.
            died = self._question is not None
            self.forget()
            if not died:
                self._pause(error)
            return died
        except AgentError as error:
            self.forget()
            self._pause(error)
            return False

    def _ask(self) -> bool:
        sock = self._address.connect()
        if sock is None:
            return True
        self._question = TrainerChannel(sock)
        self._question.send(StatusRequest(), timeout=self._patience)
        if self._question.poll(self._patience) is not None:
            self.forget()
            return True
        _log.warning(
            "memckpt: the agent (pid %d) stands still: it has not answered for %g s; training goes on without "
            "protection, and uses it again when it answers",
            peer(sock)[0],
            self._patience,
        )
        return False

    def _answered_late(self, question: TrainerChannel) -> bool:
        if question.poll() is None:
            return False
        self.forget()
        pause = self._stops.died() if self._pauses else 0.0
        self._not_before = self._clock() + pause
        if pause:
            _log.warning(
                "memckpt: the agent answers again; it has stood still several times, and is used again in %.0f s", pause
            )
        return pause == 0.0

    def succeeded(self) -> None:
        """The session has an agent again."""
        self._failures.reset()
        self._stops.started()

    def failed(self, error: Exception) -> None:
        """An attempt has failed: pause."""
        self._pause(error)

    def stumbled(self) -> None:
        """Protecting a step has failed for another reason: try again at once, then after growing pauses."""
        self._stumbles.started()
        pause = self._stumbles.died()
        self._not_before = self._clock() + pause
        if pause:
            _log.warning("memckpt: that happens again and again; trying again in %.0f s", pause)

    def _pause(self, error: Exception) -> None:
        now = self._clock()
        pause = max(self._failures.died(), _PAUSE_PER_COST * (now - self._began)) if self._pauses else 0.0
        self._not_before = now + pause
        _log.warning("memckpt: no agent (%s); trying again in %.0f s", error, pause)

    def forget(self) -> None:
        """Close the connection, if there is one."""
        question, self._question = self._question, None
        if question is not None:
            question.close()
