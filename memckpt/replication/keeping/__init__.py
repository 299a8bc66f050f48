"""What is kept of others, and what others keep of this node.

`fragment_store` (all windows), `kept_window` (one of them, in memory that outlives the process); `sender` and `stream`
(the node's own records, a queue for each holder), `outgoing` (their bytes).
"""
