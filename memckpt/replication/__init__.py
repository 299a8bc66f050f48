"""Records in other nodes' memory.

In reading order, each room knows only those before it: `coding` (a record as stripes and fragments, and who keeps
which), `transport` (messages to other nodes), `pacing` (when bytes may go, and N), `keeping` (fragments of others, and
streams of one's own), `process` (the replicator: one process beside each agent). Agents start it,
and speak with it by `memckpt.protocol`; sessions use `coding` and the names of `transport` only.
"""
