"""The resume of an attempt: what is held, one plan for all ranks, the state in the live tensors, and its proof.

Read `resume` first: the phases. Then `chosen` (a state that is held), `storage_tier` (what a store has, and how
memory's states get to other ranks). `first_steps` (their check, and whether "auto" repeats a step) and `report` (what
the user gets). Its caller is the session; all read the reports.
"""
