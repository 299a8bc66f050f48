"""The processes that write: one makes checkpoints from the agent's memory, one writes batches of the log.

They are apart from the agent since storage may hang, and since they import torch. Started and ended by
`memckpt.agent.saving`, with which they speak by `memckpt.protocol.storing`.
"""
