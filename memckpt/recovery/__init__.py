"""The plan of a resume, and how its state becomes tensors again.

Read `plan` (pure: the newest record that all can produce) with `sources` (what peers have), then `restore` (from
memory) and `from_storage`. `comparison` compares a state that was made with the truth; `auditor` is a process that
redoes pieces while training runs.
"""
