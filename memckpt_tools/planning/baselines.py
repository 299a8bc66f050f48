"""Schemes without this product: nothing, ``torch.save``, checkpoints that are written meanwhile."""

from __future__ import annotations

from memckpt.user_messages import seconds_text
from memckpt_tools.planning.footprint import NodeMemory
from memckpt_tools.planning.intervals import daly_interval, young_interval
from memckpt_tools.planning.job import Job
from memckpt_tools.planning.planned import Planned, evaluate, storage_tier
from memckpt_tools.planning.restoring import from_storage_seconds
from memckpt_tools.planning.scheme import Scheme


def node_state_bytes(job: Job) -> float:
    """Bytes of the state that a node holds."""
    return job.node_parameters * job.state_bytes


def read_seconds(job: Job) -> float:
    """Time in which all nodes read the newest checkpoint: each replica reads all of it."""
    return from_storage_seconds(job.state_total_bytes, job.disk_bytes_per_second, job.replicas)


def unprotected(job: Job) -> Planned:
    """Nothing: each failure starts over."""
    scheme = Scheme(name="none", overhead=0.0, tiers=())
    return evaluate(job, scheme, choice="starts over", memory=NodeMemory(agent=0.0), in_memory=False)


def synchronous(job: Job) -> Planned:
    """``torch.save`` or DCP to storage, for which training waits, at Daly's interval."""
    write = node_state_bytes(job) / job.copy_bytes_per_second + job.state_total_bytes / job.disk_bytes_per_second
    interval = max(job.step_seconds, daly_interval(write, job.mtbf_seconds))
    scheme = Scheme(
        name="torch.save",
        overhead=write / interval,
        tiers=(storage_tier("storage", job, interval, 0.0, read_seconds(job)),),
        disk_bytes=job.state_total_bytes * job.step_seconds / interval,
    )
    return evaluate(
        job, scheme, choice=f"every {seconds_text(interval)}", memory=NodeMemory(agent=0.0), in_memory=False
    )


def asynchronous(job: Job) -> Planned:
    """Checkpoints that are copied to host memory and persisted meanwhile, as ``dcp.async_save`` or CheckFreq.

    One is persisted at a time, so the interval is Young's or the time that persisting takes, whichever is longer.
    """
    copy = node_state_bytes(job) / job.copy_bytes_per_second
    persist = job.state_total_bytes / job.disk_bytes_per_second
    interval = max(job.step_seconds, persist, young_interval(copy, job.mtbf_seconds))
    scheme = Scheme(
        name="async to disk",
        overhead=copy / interval,
        tiers=(storage_tier("storage", job, interval, persist, read_seconds(job)),),
        memory_bytes=node_state_bytes(job),
        disk_bytes=job.state_total_bytes * job.step_seconds / interval,
    )
    memory = NodeMemory(agent=0.0, snapshot=node_state_bytes(job))
    return evaluate(job, scheme, choice=f"every {seconds_text(interval)}", memory=memory, in_memory=False)
