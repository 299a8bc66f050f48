"""An agent that stands still stops training once, for a bounded time; then it is only looked at, ever more seldom."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from memckpt.agent.server import Agent
from memckpt.config import AgentConfig
from memckpt.errors import AgentError, AgentGoneError
from memckpt.processes.address import AgentAddress, Listener
from memckpt.processes.control import ask_status
from memckpt.protocol.channel import Channel
from memckpt.protocol.status import StatusRequest
from memckpt.protocol.trainer import PROTOCOL_VERSION, Credit, Hello, Launcher, Leaving
from memckpt.session.connection import Reconnection
from memckpt.session.link import AgentLink
from tests.support.cluster.made_up_time import MadeUp
from tests.support.cluster.waiting import until
from tests.support.linked import link_over
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab


class StandingAgent:
    """Listens, and says nothing unless it is told to."""

    def __init__(self, address: AgentAddress) -> None:
        self.listener: Listener = address.listen()
        self.asked: list[Channel] = []

    def answer(self) -> None:
        """Accept a connection, and answer its question."""
        sock, _ = self.listener.sockets[0].accept()
        channel = Channel(sock)
        self.asked.append(channel)
        assert isinstance(channel.receive(5)[0], StatusRequest)
        channel.send(Leaving())  # any message is a sign of life

    def close(self) -> None:
        self.listener.close()
        for channel in self.asked:
            channel.close()


@pytest.mark.promise("a hung agent delays training only once")
def test_an_agent_that_leaves_is_gone_also_for_whoever_was_not_told_at_once() -> None:
    """It answers until what it holds is in storage. Training that went on with it had no agent in the end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client, agent = link_over(Channel(ours)), Channel(theirs)
    try:
        agent.send(Leaving())
        for _ in range(3):
            with pytest.raises(AgentGoneError, match="it leaves"):
                client.notices()
    finally:
        client.abandon()
        agent.close()


@pytest.fixture
def address(tmp_path: Path) -> AgentAddress:
    return AgentAddress.of(tmp_path, "node")


def test_whoever_comes_to_an_agent_that_ends_is_sent_to_another_one(address: AgentAddress) -> None:
    agent = Agent(address, linger_seconds=60.0)
    agent.listen()
    sock = address.connect()
    assert sock is not None
    client = link_over(Channel(sock))
    try:
        agent._loop.turn()  # it accepts
        agent.leave_run("a test")
        agent._loop.turn()
        assert address.connect() is None
        client.send(Hello(PROTOCOL_VERSION, "new", 0, 1, (0,), (0,), Launcher(0, 0, 0), ()))
        agent._loop.turn()
        with pytest.raises(AgentGoneError, match="it leaves"):
            client.notices()
    finally:
        client.abandon()
        agent._close()


@pytest.fixture
def agent(address: AgentAddress) -> Iterator[StandingAgent]:
    agent = StandingAgent(address)
    yield agent
    agent.close()


@pytest.fixture
def clock() -> MadeUp:
    return MadeUp()


@pytest.fixture
def again(address: AgentAddress, clock: MadeUp) -> Iterator[Reconnection]:
    again = Reconnection(address, patience=0.0, clock=clock)
    yield again
    again.close()


def test_without_an_agent_one_is_started_at_once(again: Reconnection) -> None:
    assert again.due()
    assert again.due()


@pytest.mark.promise("an agent without a sign of life: a slot, an answer, room in its socket")
def test_an_agent_that_stands_still_is_asked_once(again: Reconnection, agent: StandingAgent) -> None:
    assert not again.due()
    assert not again.due()
    agent.answer()
    assert again.due(), "it answers: it is used at once"
    with pytest.raises(BlockingIOError):
        agent.listener.sockets[0].accept()  # no other connection lies in its queue


@pytest.mark.promise("agent that is stopped, not dead")
def test_an_agent_that_dies_meanwhile_is_replaced_at_once(again: Reconnection, agent: StandingAgent) -> None:
    assert not again.due()
    agent.close()
    assert again.due()


def test_an_agent_that_stands_still_again_and_again_is_used_ever_more_seldom(
    again: Reconnection, agent: StandingAgent, clock: MadeUp
) -> None:
    pauses = []
    for _ in range(9):
        again.note_success()
        assert not again.due()
        agent.answer()
        pauses.append(0.0)
        if not again.due():
            began = clock.now
            while not again._clock() >= again._not_before:
                clock.now += 1.0
            pauses[-1] = clock.now - began
    assert pauses == [0.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]


@pytest.mark.promise("a new agent after the death of the last one")
@pytest.mark.promise("no new agent can be started")
def test_attempts_that_fail_come_ever_more_seldom_and_what_they_cost_counts(again: Reconnection, clock: MadeUp) -> None:
    def pause(cost: float) -> float:
        assert again.due()
        clock.now += cost
        again.note_failure(AgentError("out of processes"))
        began = clock.now
        assert not again.due()
        while clock.now < again._not_before:
            clock.now += 0.5
        return clock.now - began

    assert [pause(0.0), pause(0.0), pause(0.0), pause(30.0), pause(0.0)] == [1.0, 2.0, 4.0, 300.0, 16.0]
    again.note_success()
    assert pause(0.0) == 1.0


def test_where_the_job_waits_for_this_node_there_are_no_pauses(address: AgentAddress, clock: MadeUp) -> None:
    again = Reconnection(address, patience=0.0, pauses=False, clock=clock)
    assert again.due()
    again.note_failure(AgentError("out of processes"))
    assert again.due()


# Waiting for an agent that is connected


@pytest.fixture
def connected(address: AgentAddress, agent: StandingAgent) -> Iterator[tuple[AgentLink, Channel]]:
    """A trainer's link that waits for answers for a moment only, and the agent's end of it."""
    sock = address.connect()
    assert sock is not None
    client = link_over(Channel(sock), AgentConfig(start_seconds=0.02))
    agent.asked.append(Channel(agent.listener.sockets[0].accept()[0]))
    yield client, agent.asked[0]
    client.abandon()


@pytest.mark.promise("an agent that is alive but does not answer")
def test_an_agent_that_is_busy_and_answers_is_waited_for(connected: tuple[AgentLink, Channel]) -> None:
    """A record may take longer than the time limit for answers, as long as the loop answers."""
    client, channel = connected
    with pytest.raises(AgentGoneError, match="it has not answered"):
        client.wait_applied(1)
    assert isinstance(channel.receive(5)[0], StatusRequest)
    channel.send(Credit(1))
    client.wait_applied(1)


@pytest.mark.promise("eager redo that is slower than training")
def test_an_agent_that_answers_and_applies_nothing_is_not_waited_for_for_ever(
    connected: tuple[AgentLink, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, channel = connected
    receive = client.connection.receive

    def receive_an_answer() -> object:
        channel.send(Credit(0))
        return receive()

    with monkeypatch.context() as patched:
        patched.setattr(client.connection, "receive", receive_an_answer)
        with pytest.raises(AgentGoneError, match="it answers, and has applied no record"):
            client.wait_applied(1)
    channel.send(Credit(2))
    client.wait_applied(2)


@pytest.mark.promise("an agent without a sign of life: a slot, an answer, room in its socket")
@pytest.mark.promise("agent that is stopped, not dead")
def test_training_goes_on_without_a_stopped_agent_and_with_it_when_it_goes_on(lab: Lab) -> None:
    agent = lab.start_agent()
    address = AgentAddress.of(lab.run_dir)

    def stop(control: Control) -> None:
        control.journal.note("killed", who="nobody")
        os.kill(agent.pid, signal.SIGSTOP)

    def go_on(control: Control) -> None:
        assert control.session.agent_pid is None, "it is not waited for any more"
        os.kill(agent.pid, signal.SIGCONT)
        until(lambda: ask_status(address) is not None)

    settings = config("eager", agent=AgentConfig(linger_seconds=60.0, start_seconds=600.0, liveness_seconds=2.0))
    actions = {("after commit", 5): stop, ("forward", 13): go_on, ("after commit", 15): kill_self}
    died = lab.train(PLAIN, settings, actions=actions)
    assert died.log.count("training goes on without protection since step") == 1
    assert died.log.count("stands still") == 1
    assert "it has shown no sign of life for 2 s" in died.log
    assert "protected again from step 13 on" in died.log
    final = lab.train(PLAIN, settings, seed=2)
    assert final.restored_step == 15
    lab.check_same(PLAIN, died, final)
