"""How our processes are started, found, watched and ended.

Read `address` (what the run directory says of an agent), `launch` (how one is started), `listener` (its sockets),
`event_loop` (of agents and replicators), `helper_process` (a process that another one owns) and `helper` (its own end).
"""
