"""A record as bytes for other nodes, without I/O.

`blob` (a record in one piece), `code` (its stripes as fragments, and back), `placement` (which node keeps which).
"""
