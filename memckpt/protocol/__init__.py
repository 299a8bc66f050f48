"""What processes say to each other: typed messages by subject, validated, without pickle.

Read `trainer` (trainer and agent), then `channel` (a socket with descriptors, a union of messages for each direction).
`replication` is for replicators and their trainers, `storing` for writers, `audit` for auditors.
"""
