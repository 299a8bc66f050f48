"""The replicator: the process through which a node reaches others.

`replicator` (its loop), `node` (its part in an attempt) with `node_plan` and `node_status`; `ask` (what it reads from
peers) with `reader`, `answer` (what they read from it) with `source`, `send` (what it sends), `wait` (for whom training
waits); `states_by_value` (states in place of records), `fragment_memory` (memory that the agent keeps, too).
"""
