"""The messages of each connection, in each direction: one union of types for each."""

from __future__ import annotations

from typing import Union

from memckpt.protocol.audit import Audit, Audited, AuditorReady, ForgetAudits
from memckpt.protocol.peers import AskPhases, Join, Listen, Listening, PhasesAre
from memckpt.protocol.recovery import Describe, Described, Fill, Filled, Recover, Recovered, RecoveryProgress
from memckpt.protocol.replication import (
    Deserted,
    Drain,
    Drained,
    Fragments,
    GivenUp,
    GiveUp,
    Halt,
    Halted,
    Holds,
    KeepRoom,
    LetGoOfRoom,
    ListFragments,
    ReplicatorLost,
    SendGeneration,
    SendRecord,
    StateMissed,
    StateTaken,
    TakeState,
    WatermarkAdvanced,
)
from memckpt.protocol.status import PeersReport, Status, StatusRequest, StopRequest
from memckpt.protocol.storing import (
    Logged,
    RecordSaved,
    Saved,
    SaveFailed,
    SaveRecord,
    SaveTo,
    SnapshotTaken,
    TakeSnapshot,
)
from memckpt.protocol.trainer import (
    Advance,
    Advanced,
    Alarm,
    Begin,
    Checked,
    Commit,
    Configure,
    Credit,
    Drift,
    Fencing,
    Gap,
    GenerationCommit,
    Goodbye,
    Hello,
    HoldingOn,
    Inventory,
    Leaving,
    NeedGeneration,
    NeedSlots,
    Note,
    Observed,
    OthersStay,
    Preempted,
    Prepare,
    Prepared,
    Protected,
    Refused,
    Resume,
    SlotsMade,
    Void,
)
from memckpt.protocol.writer import (
    Announce,
    Announced,
    Append,
    Appended,
    LookForAnnounced,
    LookForRoom,
    OpenLog,
    Room,
    Save,
)

# msgspec reads the unions at run time, on Python 3.10 too.
#: What trainers and visitors, such as the command line, say to an agent.
TrainerToAgent = Union[  # noqa: UP007
    Hello,
    Prepare,
    NeedSlots,
    Resume,
    Advance,
    Checked,
    Note,
    Observed,
    SaveRecord,
    Configure,
    GenerationCommit,
    Commit,
    Listen,
    Join,
    AskPhases,
    Recover,
    SnapshotTaken,
    Void,
    NeedGeneration,
    Preempted,
    Goodbye,
    StatusRequest,
    SaveTo,
    StopRequest,
]
#: What an agent says to trainers and visitors.
AgentToTrainer = Union[  # noqa: UP007
    Fencing,
    Inventory,
    Prepared,
    SlotsMade,
    Advanced,
    RecordSaved,
    Begin,
    TakeSnapshot,
    Saved,
    SaveFailed,
    Logged,
    Credit,
    Protected,
    Drift,
    Gap,
    Alarm,
    Refused,
    OthersStay,
    Leaving,
    HoldingOn,
    Status,
    Listening,
    PhasesAre,
    Recovered,
    RecoveryProgress,
    WatermarkAdvanced,
    ReplicatorLost,
]
#: What an agent says to its writer processes.
AgentToWriter = Union[  # noqa: UP007
    Save,
    Announce,
    LookForAnnounced,
    LookForRoom,
    OpenLog,
    Append,
]
#: What writer processes say to their agent.
WriterToAgent = Union[  # noqa: UP007
    Saved,
    SaveFailed,
    Announced,
    Room,
    Appended,
]
#: What an agent says to its auditor.
AgentToAuditor = Union[Audit, ForgetAudits]  # noqa: UP007
#: What an auditor says to its agent.
AuditorToAgent = Union[AuditorReady, Audited]  # noqa: UP007
#: What an agent says to its replicator.
AgentToReplicator = Union[  # noqa: UP007
    Listen,
    Join,
    PhasesAre,
    KeepRoom,
    ListFragments,
    SendGeneration,
    SendRecord,
    Deserted,
    StateTaken,
    StateMissed,
    GiveUp,
    Holds,
    Drain,
    Describe,
    Fill,
    Halt,
]
#: What a replicator says to its agent.
ReplicatorToAgent = Union[  # noqa: UP007
    Listening,
    Fragments,
    Halted,
    Drained,
    KeepRoom,
    LetGoOfRoom,
    WatermarkAdvanced,
    TakeState,
    PeersReport,
    GivenUp,
    Described,
    Filled,
    RecoveryProgress,
]
#: Any of these, as a channel decodes them.
Message = Union[  # noqa: UP007
    TrainerToAgent,
    AgentToTrainer,
    AgentToWriter,
    WriterToAgent,
    AgentToAuditor,
    AuditorToAgent,
    AgentToReplicator,
    ReplicatorToAgent,
]
