"""How our processes are started, found, watched and ended.

Read `address` (what the run directory says of an agent, and its sockets), and `launch` (how one is started). Then
`event_loop` (of agents and replicators), `helper_process` (a process that an agent owns) and `helper` (that process's
own end).
"""
