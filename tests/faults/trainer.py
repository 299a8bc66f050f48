"""One rank of the training under faults: it trains one step for each permit, and notes every step with its digest."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import marshal
import mmap
import os
import select
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import memckpt
from memckpt.config import MemckptConfig
from memckpt.errors import AgentGoneError, PeerError
from memckpt.processes import launch
from memckpt.processes.address import NODE_VARIABLE
from tests.support.cluster.netns import Network
from tests.support.cluster.sharded_cases import Distributed, Setup
from tests.support.trainings.killed_ranks import join

#: Seconds without a step after which a rank hangs: it dumps its stack, and ends.
HANG_SECONDS = 120
_GROUP_SECONDS = 60
#: Port of replicators that have a network to themselves.
_PORT = 4077


class Finish:
    """The step at which a training ends, in memory that all ranks share; -1 while it is not known."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, 8)
        self.step = -1

    @property
    def step(self) -> int:
        return int(struct.unpack("q", self._page)[0])

    @step.setter
    def step(self, step: int) -> None:
        self._page[:] = struct.pack("q", step)


@dataclass(frozen=True)
class Attempt:
    """What the ranks of one attempt are given."""

    setup: Setup
    number: int  # number of the attempt, which launchers count
    #: Of its weights and generators; those of the undisturbed training have 0. If a state is owed, it is another one:
    #: what is not restored shows.
    seed: int
    store: Path  # file by which the ranks find each other
    run_dir: Path
    config: MemckptConfig | None  # None trains without memckpt: the undisturbed training
    notes: tuple[int, ...]  # descriptors of pipes for notes, by rank
    permits: tuple[int, ...] | None  # semaphores (eventfd), by rank; None: a rank never waits
    finish: Finish
    network: Network | None = None  # where the nodes' agents are; ranks share the loopback

    def config_of(self, rank: int) -> MemckptConfig | None:
        """The settings of a rank's node: on a network its own address, at which others find it after a restart."""
        if self.config is None or self.network is None or self.config.peers is None:
            return self.config
        peers = replace(self.config.peers, host=self.network.addresses[rank], port=_PORT)
        return replace(self.config, peers=peers)


class Rank:
    """One rank of an attempt."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self.attempt, self.rank = attempt, rank
        self.session: memckpt.Session | None = None

    def train(self) -> NoReturn:
        attempt = self.attempt
        os.environ[NODE_VARIABLE] = f"node{self.rank}"
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt.number)
        self._watch()
        if attempt.setup.world_size > 1:
            join(self.rank, attempt.setup.world_size, attempt.store, _GROUP_SECONDS)
        _start_agents_on(attempt.network, self.rank)
        self.training = Distributed(attempt.setup, lambda place: None, seed=attempt.seed)
        step = self._begin()
        while step != attempt.finish.step:
            self._watch()
            self._await_permit()
            step += 1
            loss = self.training.step(step - 1)
            if self.session is not None:
                assert self.session.commit(step)
            facts = {} if self.session is None else self._protection()
            self._note("step", step=step, loss=loss, digest=digest(self.training.local_state()), **facts)
        if self.session is not None:
            self.session.close()
        self._note("finished", step=step, digest=digest(self.training.local_state()))
        sys.stdout.flush()
        os._exit(0)  # gloo's shutdown sometimes hangs, with and without memckpt

    def _watch(self) -> None:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.stderr)

    def _begin(self) -> int:
        attempt = self.attempt
        config = attempt.config_of(self.rank)
        if config is None:
            return 0
        try:  # the state is chosen when the session begins, and fetched when it is restored
            session = self.session = memckpt.attach(
                self.training.model, self.training.optimizers, run_dir=attempt.run_dir, config=config
            )
            for name, each in self.training.registered.items():
                session.register(name, each)
            report = session.restore()
        except PeerError as error:
            self._note("refused", number=attempt.number, reason=str(error))
            raise
        state = digest(self.training.local_state())
        step, tier, exact = (0, "nothing", True) if report is None else (report.step, report.tier, report.exact)
        self._note("began", step=step, tier=tier, exact=exact, digest=state, number=attempt.number)
        return step

    def _await_permit(self) -> None:
        """Wait for the next step's permit, and hear meanwhile what the agent says, as a step without pauses would."""
        if self.attempt.permits is None:
            return
        permit = self.attempt.permits[self.rank]
        while True:
            link = None if self.session is None else self.session._link
            channel = [link.connection.channel] if link is not None and link.up else []
            ready = select.select([permit, *channel], [], [])[0]
            if permit in ready:
                os.eventfd_read(permit)
                return
            try:
                self.session._protection.listen()
            except AgentGoneError:
                select.select([permit], [], [])  # the next commit finds out, as it always does
            self._note("heard", **self._protection())

    def _protection(self) -> dict[str, Any]:
        """What this rank has been told; records are counted as steps."""
        link, last = self.session._link, self.session._last
        ahead = last.record - last.step if last is not None else 0
        return {
            "acknowledged": max(0, link.connection.watermark - ahead) if link.up else 0,
            "connected": link.up,
            "waits": link.up and not link.connection.waits_suspended,
            "agent": link.agent_pid,
            "protected": self.session._protection.complete,
            "stored": self.session.stored_step or 0,
            "check": self.session.check.verdict,
        }

    def _note(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "rank": self.rank, **fields}) + "\n"
        os.write(self.attempt.notes[self.rank], line.encode())


def _start_agents_on(network: Network | None, rank: int) -> None:
    """Make agents that this process starts run on its node's network."""
    if network is None:
        return
    start: Callable[..., Any] = launch._start

    def on_network(*arguments: Any) -> Any:
        with network.inside(rank):
            return start(*arguments)

    launch._start = on_network


def digest(state: Any) -> str:
    """A digest of a frozen state: equal if and only if all bits, types, shapes and orders of keys are."""
    plain = marshal.dumps(state, 2)  # later versions name a value that occurs twice, depending on its references
    return hashlib.blake2b(plain, digest_size=16).hexdigest()
