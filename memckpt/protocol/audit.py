"""What an agent and its auditor say to each other: typed, validated, no pickle."""

from __future__ import annotations

import msgspec

from memckpt.protocol.trainer import Arithmetic
from memckpt.state.spec import StateSpec


class AuditorReady(msgspec.Struct, frozen=True, tag="auditor ready"):
    """The process has imported what it needs, which took it so many seconds of a core."""

    cpu_seconds: float


class AuditedGeneration(msgspec.Struct, frozen=True, array_like=True):
    """Generation whose slots come along as a descriptor.

    `search_path`: where the trainers find modules. `threads`: those of the trainers, on whose number bits may depend.
    `accelerated`: the trainers' device rounds otherwise than a CPU. `arithmetic`: theirs.
    """

    number: int
    spec: StateSpec
    accelerated: bool
    arithmetic: Arithmetic
    threads: int
    search_path: tuple[str, ...]


class Audit(msgspec.Struct, frozen=True, tag="audit"):
    """To the auditor: redo pieces from their anchors at record `first` to those of T records later, and compare.

    `key`: the generation's, which comes with the first message. `metas`: scalars of records that the auditor has not
    got yet; `first` is None where there are only these. `pieces`: parameter and first element of each.
    """

    key: int
    metas: dict[int, bytes]
    first: int | None = None
    pieces: tuple[tuple[int, int], ...] = ()
    generation: AuditedGeneration | None = None


class ForgetAudits(msgspec.Struct, frozen=True, tag="forget audits"):
    """To the auditor: let go of a generation's memory; its audits have no answer any more."""

    key: int


class Audited(msgspec.Struct, frozen=True, tag="audited"):
    """Answer to an Audit of `key` and `first`.

    `cpu_seconds`: taken since the last answer. `late`: slots were filled anew before they were read; nothing is known
    of these pieces. `tensor`, `ulp`: where the two differ most, and by how many units in the last place; empty if they
    do not. `problem`: why the pieces cannot be redone in the auditor, in words, or what the redo of `tensor` has
    raised.
    """

    key: int
    first: int
    cpu_seconds: float
    late: bool = False
    tensor: str = ""
    ulp: float = 0.0
    problem: str = ""


# This file's part of what is said on each connection

AgentToAuditor = Audit | ForgetAudits
AuditorToAgent = AuditorReady | Audited
