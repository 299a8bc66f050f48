"""A session's link over a connection that a test has made."""

from __future__ import annotations

from memckpt.config import AgentConfig, MemckptConfig
from memckpt.processes.address import AgentAddress
from memckpt.protocol.channel import TrainerChannel
from memckpt.session.connection import AgentConnection
from memckpt.session.link import AgentLink
from memckpt.session.ranks import Ranks
from memckpt.state.records import Timeline


def link_over(channel: TrainerChannel, config: AgentConfig | None = None) -> AgentLink:
    """A link of a single rank, connected over `channel`."""
    config = AgentConfig() if config is None else config
    link = AgentLink(AgentAddress.of("/nowhere"), Ranks(), MemckptConfig(agent=config))
    link._connection = AgentConnection(channel, config)
    link._timeline = Timeline(1, "a")
    return link
