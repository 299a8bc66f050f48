"""Messages between replicators.

`wire` (the messages), `links` (order and repetition between two nodes), `sockets` (and who may speak), `transport` (all
links of a node), `directory` (where peers are).
"""
