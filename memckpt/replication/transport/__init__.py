"""Messages between replicators.

`wire` (the messages), `envelope` and `links` (order and repetition between two nodes), `sockets`, `transport` (all
links of a node), `directory` (where peers are), `keys` and `zap` (who may speak).
"""
