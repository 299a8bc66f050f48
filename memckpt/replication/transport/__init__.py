"""Messages between replicators.

`messages` (what they say), `links` (order and repetition between two nodes), `directory` (sockets, keys, where peers
are), `transport` (one node's links, over ZeroMQ).
"""
