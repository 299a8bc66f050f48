"""The messages of each connection, in each direction: one union of types for each; each file has its part of them."""

from __future__ import annotations

from memckpt.protocol import audit, peer_job, recovery, replication, status, storing, trainer

#: What trainers and visitors, such as the command line, say to an agent.
TrainerToAgent = (
    peer_job.TrainerToAgent | recovery.TrainerToAgent | status.TrainerToAgent | storing.TrainerToAgent
    | trainer.TrainerToAgent
)  # fmt: skip
#: What an agent says to trainers and visitors.
AgentToTrainer = (
    peer_job.AgentToTrainer | recovery.AgentToTrainer | replication.AgentToTrainer | status.AgentToTrainer
    | storing.AgentToTrainer | trainer.AgentToTrainer
)  # fmt: skip
#: What an agent says to its writer processes.
AgentToWriter = storing.AgentToWriter
#: What writer processes say to their agent.
WriterToAgent = storing.WriterToAgent
#: What an agent says to its auditor.
AgentToAuditor = audit.AgentToAuditor
#: What an auditor says to its agent.
AuditorToAgent = audit.AuditorToAgent
#: What an agent says to its replicator.
AgentToReplicator = peer_job.AgentToReplicator | recovery.AgentToReplicator | replication.AgentToReplicator
#: What a replicator says to its agent.
ReplicatorToAgent = (
    peer_job.ReplicatorToAgent | recovery.ReplicatorToAgent | replication.ReplicatorToAgent | status.ReplicatorToAgent
)
#: Any of these, as a channel decodes them.
Message = (
    TrainerToAgent | AgentToTrainer | AgentToWriter | WriterToAgent | AgentToAuditor | AuditorToAgent
    | AgentToReplicator | ReplicatorToAgent
)  # fmt: skip
