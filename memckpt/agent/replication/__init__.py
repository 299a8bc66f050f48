"""The agent's side of replication. `peer_tier` is what the replicator is told, says, and fetches in a recovery. Then
`own_replicator` (its process, and the memory that outlives it), `handing_out` (what it is given of states here).
"""
