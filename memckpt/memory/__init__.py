"""A training's state on a node: shared memory, the records in it, and the replica that redoes them.

Read `region`, `slots`, `generation`, `ledger`, `pending_generation`, `replica`; then what stands in shared memory
beside the state (`pages`), and `budget`. The agent owns all of it; trainers map it.
"""
