"""What an agent and its auditor say to each other: typed, validated, no pickle."""

from __future__ import annotations

import msgspec

from memckpt.protocol.trainer import Arithmetic
from memckpt.state.spec import StateSpec


class AuditorReady(msgspec.Struct, frozen=True, tag="auditor ready"):
    """The process has imported what it needs, which took it so many seconds of a core."""

    cpu_seconds: float


class AuditedGeneration(msgspec.Struct, frozen=True, array_like=True):
    """Generation whose slots come along as a descriptor."""

    number: int
    spec: StateSpec
    accelerated: bool  #: the trainers' device rounds otherwise than a CPU
    arithmetic: Arithmetic  #: the trainers'
    threads: int  #: the trainers', on whose number bits may depend
    search_path: tuple[str, ...]  #: where the trainers find modules


class Audit(msgspec.Struct, frozen=True, tag="audit"):
    """To the auditor: redo pieces from their anchors at record `first` to those of T records later, and compare."""

    key: int  #: the generation's, of the agent's choice
    metas: dict[int, bytes]  #: scalars of records that the auditor has not got yet
    first: int | None = None  #: None: there are only these
    pieces: tuple[tuple[int, int], ...] = ()  #: parameter and first element of each
    generation: AuditedGeneration | None = None  #: with the first message of the key


class ForgetAudits(msgspec.Struct, frozen=True, tag="forget audits"):
    """To the auditor: let go of a generation's memory; its audits have no answer any more."""

    key: int


class Audited(msgspec.Struct, frozen=True, tag="audited"):
    """Answer to an Audit of `key` and `first`."""

    key: int
    first: int
    cpu_seconds: float  #: that the process has taken since its last answer
    late: bool = False  #: slots were filled anew before they were read; nothing is known of these pieces
    tensor: str = ""  #: where the two differ most; empty if they do not
    ulp: float = 0.0  #: by how many units in the last place
    problem: str = ""  #: why the pieces cannot be redone in the auditor, or what the redo of `tensor` has raised


AgentToAuditor = Audit | ForgetAudits
AuditorToAgent = AuditorReady | Audited
