"""What agents say of themselves, made up."""

from __future__ import annotations

from typing import Any

from memckpt.cli.run_view import Stored, View
from memckpt.processes.address import AgentAddress
from memckpt.protocol.status import AuditStatus, PeerLinkStatus, PeersStatus, Status, StorageStatus


def an_agent(**fields: Any) -> Status:
    settings: dict[str, Any] = {
        "pid": 4711,
        "run_dir": "/runs/one",
        "node": "node",
        "mode": "eager",
        "trainers": ((0, 42), (1, 43)),
        "committed": ((0, 9), (1, 10)),
        "applied": 7,
        "step": 10,
        "held_bytes": 3 << 20,
        "generation": 2,
        "max_drift_ulp": 1.0,
        "redo_seconds_per_record": 0.0123,
        "storage": StorageStatus("/runs/one/storage", 8, 60.0, None, 5e8, True, "no space left"),
        "records_held": 3,
        "seconds_since_commit": 0.25,
        "uptime_seconds": 7200.0,
        "audit": AuditStatus(16, 9, 1, 0.5),
    }
    return Status(**{**settings, **fields})


def an_alarm(alarm: str, untidy: str = "") -> StorageStatus:
    return StorageStatus("/runs/one/storage", 8, 60.0, None, 5e8, False, alarm, untidy=untidy)


def some_peers(**fields: Any) -> PeersStatus:
    settings: dict[str, Any] = {
        "scheme": "erasure code, k=2, m=1",
        "security": "curve",
        "ack": "wait",
        "watermark": 9,
        "acknowledged": (((0, 1), 10), ((2, 3), 9), ((4, 5), 10)),
        "protected": True,
        "problem": "",
        "held_bytes": 5 << 20,
        "kept": (("b", (2, 3), 10), ("c", (4,), 9)),
        "links": (PeerLinkStatus("b", True, 0, 0.1), PeerLinkStatus("c", True, 3 << 20, 9.0)),
        "bytes_sent": 7 << 20,
        "bytes_per_record": 1 << 20,
        "rate_limit_bytes_per_second": 125e6,
        "pace": "as fast as the link takes it",
        "refused": 0,
        "gap": None,
    }
    return PeersStatus(**{**settings, **fields})


def a_view(agent: Status | None, stored: Stored | None = None, problem: str = "") -> View:
    address = AgentAddress.of("/runs/one", "node")
    return View(address, agent, problem, stored or Stored("/runs/one/storage"))
