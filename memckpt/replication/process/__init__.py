"""The replicator: the process through which a node reaches others.

`replicator` (its loop), `node` (its part in an attempt), `send` (what it sends), `states_by_value` (states in place of
records); `questions` (what it reads from peers, and they from it) with `reader`.
"""
