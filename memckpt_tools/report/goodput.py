"""Goodput of a run: the share of its time that advanced training (ETTR), and what the plan's formula gives. Pure."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from memckpt_tools.planning.job import Failures
from memckpt_tools.planning.scheme import Scheme, Tier, expect
from memckpt_tools.report.story import Attempt, Story


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Time of a run by use, in seconds.

    Attributes:
        wall: from the first attempt's begin to the run's end, without pauses after training had finished.
        training, stalled: time that advanced it, and that ranks have waited for protection.
        repeated: time of steps that were taken again: lost ones, and those repeated as a proof.
        starting, down: from the first attempt's begin, and from failures, to the next first steps.
        steps_lost: number of committed steps that were taken again; at least that, if `lost_more`: an attempt has ended
            without a witness of how far it came.
        step, stall: time of a step, and what of it waits for protection; None where it is not known.
        ettr: measured: `training` of `wall`.
        expected: what the plan's closed form gives for failures, restarts, restores and an overhead as they were; None
            where too little is known.
    """

    wall: float
    training: float
    stalled: float
    repeated: float
    starting: float
    down: float
    steps: int
    steps_lost: int
    lost_more: bool
    step: float | None
    stall: float | None
    ettr: float
    expected: float | None


def lost_steps(before: Attempt, after: Attempt) -> tuple[int, bool]:
    """Committed steps of an attempt that the next one has to take again, and whether they are all.

    Where agent and trainers have died together, the steps since the last figures in the journal are not among them.
    """
    if after.recovered is None:
        return before.last_step or 0, before.seen_ending
    if after.recovered.steps_lost is not None:
        return after.recovered.steps_lost, True
    return max(0, (before.last_step or 0) - after.recovered.step), before.seen_ending


def measure(story: Story) -> Goodput:
    """The goodput of a run that has at least one attempt."""
    attempts = story.attempts
    ends = [one.ended_at if one.ended_at is not None else story.until for one in attempts]
    step = _step_seconds(story)
    starting = (attempts[0].first_step_at or ends[0]) - attempts[0].began
    up = steps = lost = again = 0.0
    down = paused = 0.0
    known = True
    for number, (attempt, end) in enumerate(zip(attempts, ends, strict=True)):
        if attempt.first_step_at is not None and attempt.first_step is not None:
            up += max(0.0, end - attempt.first_step_at)
            steps += max(0, (attempt.last_step or attempt.first_step) - attempt.first_step + 1)
        if not number:
            continue
        before, ended = attempts[number - 1], ends[number - 1]
        back = attempt.first_step_at if attempt.first_step_at is not None else end
        if before.end == "finished":
            paused += max(0.0, attempt.began - ended)
            down += max(0.0, back - attempt.began)
        else:
            down += max(0.0, back - ended)
            steps_again, all_known = lost_steps(before, attempt)
            lost, known = lost + steps_again, known and all_known
        again += attempt.recovered is not None and attempt.recovered.repeated is not None
    stall = _stall_seconds(story)
    stalled = min(up, steps * stall) if stall is not None else 0.0
    repeated = min(up - stalled, (lost + again) * (step or 0.0))
    wall = max(1e-9, ends[-1] - attempts[0].began - paused)
    training = max(0.0, up - stalled - repeated)
    return Goodput(
        wall=wall,
        training=training,
        stalled=stalled,
        repeated=repeated,
        starting=max(0.0, starting),
        down=down,
        steps=int(steps),
        steps_lost=int(lost),
        lost_more=not known,
        step=step,
        stall=stall,
        ettr=min(1.0, training / wall),
        expected=_expected(story, wall, step, stall),
    )


def _step_seconds(story: Story) -> float | None:
    """The mean time of a step between samples, as stalls are means; of a short run that of whole attempts."""
    seconds, steps = 0.0, 0
    for (at, attempt, sample), (later, same, after) in itertools.pairwise(story.samples):
        if attempt == same and sample.step is not None and after.step is not None and after.step > sample.step:
            ended_at = story.attempts[attempt].ended_at if attempt >= 0 else None
            if ended_at is not None and at < ended_at < later:
                later = ended_at  # the next figures came when nothing was trained any more
            seconds, steps = seconds + later - at, steps + after.step - sample.step
    if not steps:
        for one in story.attempts:
            end = one.ended_at if one.ended_at is not None else story.until
            if not one.seen_ending or one.first_step is None or one.first_step_at is None:
                continue
            if (one.last_step or 0) > one.first_step:
                seconds += end - one.first_step_at
                steps += (one.last_step or 0) - one.first_step
    return seconds / steps if steps else None


def _stall_seconds(story: Story) -> float | None:
    """What a rank's step waits, on average."""
    known = [(sample.commits, sample.stall_ms) for _, _, sample in story.samples if sample.stall_ms is not None]
    commits = sum(number for number, _ in known)
    return sum(number * stall for number, stall in known) / commits / 1e3 if commits else None


def _expected(story: Story, wall: float, step: float | None, stall: float | None) -> float | None:
    if step is None or stall is None or step <= stall:
        return None
    seconds: dict[str, list[float]] = {"local memory": [], "peers": [], "storage": []}
    counts = dict.fromkeys(seconds, 0)
    restarts = []
    for before, after in itertools.pairwise(story.attempts):
        if before.end == "finished":
            continue
        tier = after.recovered.tier if after.recovered is not None else ""
        kind = tier if tier in counts else "storage"  # a start over, and other places: no memory was left
        counts[kind] += 1
        restore = after.recovered.seconds if after.recovered is not None else 0.0
        if after.recovered is not None:
            seconds[kind].append(restore)
        if before.ended_at is not None and after.first_step_at is not None:
            restarts.append(max(0.0, after.first_step_at - before.ended_at - restore))
    bare = step - stall
    steps = [stored.step for _, stored in story.stored]
    gaps = [after - before for before, after in itertools.pairwise(steps) if after > before]
    mean = {name: statistics.fmean(values) if values else 0.0 for name, values in seconds.items()}
    tiers = [Tier(name="local memory", every_steps=1, lag_steps=0, restore_seconds=mean["local memory"])]
    if counts["peers"]:
        peers = mean["peers"]
        tiers.append(Tier(name="peers", every_steps=1, lag_steps=1, restore_seconds=peers, group_nodes=2, tolerates=1))
    every = statistics.fmean(gaps) if gaps else max(1.0, wall / step)
    storage = mean["storage"]
    tiers.append(Tier(name="storage", every_steps=every, lag_steps=0, restore_seconds=storage, survives_cluster=True))
    failures = Failures(
        process=counts["local memory"] / wall, node=counts["peers"] / wall, cluster=counts["storage"] / wall
    )
    return expect(
        Scheme(name="as measured", overhead=stall / bare, tiers=tuple(tiers)),
        failures,
        step_seconds=bare,
        run_seconds=wall,
        restart_seconds=statistics.fmean(restarts) if restarts else 0.0,
    ).ettr
