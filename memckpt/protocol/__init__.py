"""What processes say to each other: typed messages by subject, validated, without pickle.

Read `trainer` (trainer and agent), then `messages` (one union for each direction of a connection) and `channel` (a
socket with descriptors). `replication`, `recovery` and `peer_job` are for replicators, `storing` for writers.
"""
