"""The agent: one process per node and run, which outlives trainers and holds base and log.

Read `server` (its event loop, and what each message leads to), `units` and `unit` (what is held, and what it can
produce). Then `lifetime` (when it saves and ends), `fencing` (the gate of a new attempt). `saving` brings the state to
storage, `replication` to other nodes, `metrics` to Prometheus. Started by `memckpt.processes.launch`.
"""
