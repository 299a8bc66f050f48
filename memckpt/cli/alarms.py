"""Problems of a run, derived from the status of its agent and its storage. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from memckpt.cli.common import count, seconds_text
from memckpt.cli.run_view import Stored
from memckpt.protocol.status import Status


def alarms_of(agent: Status) -> Iterator[str]:
    """Problems that a live agent reports itself, one sentence each."""
    if agent.unprotected:
        yield f"training goes on without protection in memory: {agent.unprotected}"
    if agent.storage is not None and agent.storage.alarm:
        yield f"the last checkpoint could not be written: {agent.storage.alarm}"
    if agent.storage is not None and agent.storage.untidy:
        yield f"old files in storage could not be deleted: {agent.storage.untidy}"
    if agent.peers is not None and not agent.peers.protected:
        yield f"other nodes do not protect this run{f': {agent.peers.problem}' if agent.peers.problem else ''}"
    elif agent.peers is not None and agent.peers.problem:
        yield agent.peers.problem
    if "DIFFERENT" in agent.check:
        yield f"the last resume was not exact: {agent.check}"


def problems_of(
    agent: Status, stored: Stored | None, max_behind: int | None, max_age: float | None = None
) -> Iterator[str]:
    """Problems of a run that should be training and protected, one sentence each.

    Args:
        agent: status of its agent.
        stored: findings in storage; None: storage was not read.
        max_behind: steps that storage, and records that other nodes, may be behind memory; None: any number.
        max_age: seconds that the last commit may be ago; None: any number.
    """
    if not agent.trainers:
        yield "no trainer is connected"
    if agent.step is None:
        yield "nothing is held yet"
    # A state restored from peers or storage is held before this agent gets its first commit.
    age = agent.uptime_seconds if agent.seconds_since_commit is None else agent.seconds_since_commit
    if max_age is not None and age > max_age:
        yield f"nothing has been committed for {seconds_text(age)}: more than {max_age:g} s"
    yield from alarms_of(agent)
    if max_behind is not None and agent.peers is not None and agent.committed:
        newest, known = max(record for _, record in agent.committed), agent.peers.watermark or 0
        if newest - known > max_behind:
            where = f"have record {known}" if known else "have nothing"
            late = f"{count(newest - known, 'record')} behind record {newest} in memory"
            yield f"other nodes {where}, {late}: more than {max_behind}"
    if stored is None:
        return
    if stored.problem:
        yield f"storage cannot be read: {stored.problem}"
        return
    for number, what in ((stored.damaged, "damaged"), (stored.unreadable, "not readable")):
        if number:
            yield f"{count(number, 'file')} in storage {'is' if number == 1 else 'are'} {what}; see memckpt verify"
    if stored.missing:
        yield f"the data of {count(stored.missing, 'commit file')} in storage are missing; see memckpt verify"
    if max_behind is not None and agent.step is not None:
        behind = agent.step - (stored.step if stored.step is not None else 0)
        if behind > max_behind:
            where = "has nothing" if stored.step is None else f"has step {stored.step}"
            yield f"storage {where}, {count(behind, 'step')} behind step {agent.step} in memory: more than {max_behind}"
