"""What of an agent's memory goes to storage, and when; other processes write.

In reading order: `saver` (decides), `schedule` (when), `checkpoints` (a checkpoint's way, one flow, and what is there).
Then `state_copies` (made while training runs), `jobs` (for the process that writes), `record_log` (records between
checkpoints), and `writer/`, which the agent never imports. Called by the agent's units.
"""
