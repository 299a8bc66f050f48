"""The writer process's loop, which does one job after the other until the agent is gone.

Urgent jobs (the end of a training, a machine that may be gone soon) are written by the main thread, with the agent's
own priority. The main thread also imports torch's parts beside the first steps of a training. All else is written by a
thread of the lowest priority: a process can give priority up and, without privileges, not get it back, but threads have
theirs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from memckpt.checkpointing.writer import writer
from memckpt.errors import AgentError
from memckpt.memory.region import Region
from memckpt.processes.helper import step_back
from memckpt.protocol.channel import WriterChannel
from memckpt.protocol.descriptors import readable
from memckpt.protocol.storing import Saved, SaveFailed
from memckpt.protocol.writer import Announce, Announced, LookForAnnounced, LookForRoom, Room, Save


def serve(channel: WriterChannel) -> None:
    """Do the agent's jobs; before the first one, import torch's parts."""
    if not readable(channel, 0):
        writer.warm_up()
    with ThreadPoolExecutor(1, "memckpt-writer", step_back) as background:
        while True:
            job, fds = channel.receive(None)
            match job:
                case Announce():
                    writer.announce(job)
                case LookForAnnounced():
                    channel.send(Announced(job.timeline, writer.announced(job)))
                case LookForRoom():
                    channel.send(Room(job.url, writer.free(job)))
                case Save():
                    channel.send(_save(job, fds, background))
                case _:
                    raise AgentError(f"expected a job for the writer from the agent, found {type(job).__name__}")


def _save(job: Save, fds: list[int], background: ThreadPoolExecutor) -> Saved | SaveFailed:
    regions = [Region.open(fd) for fd in fds]
    try:
        if job.urgent:
            return writer.try_to_save(job, regions)
        return background.submit(writer.try_to_save, job, regions).result()
    finally:
        for region in regions:
            region.close()
