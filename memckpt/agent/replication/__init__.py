"""The agent's side of replication.

`peer_tier` (what the replicator is told, and what it says), `own_replicator` (its process, replaced when it dies, and
the memory that outlives it), `handing_out` (what it is given of states here), `recovery` (what it fetches).
"""
