"""A record as bytes for other nodes, without I/O.

`blob` (a record in one piece), `code` (the erasure code of its stripes), `fragments` (one of them, checked),
`placement` and `topology` (which node keeps which).
"""
