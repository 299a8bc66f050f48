"""The resume of an attempt: what is held, one plan for all ranks, the state in the live tensors, and its proof.

Read `resume` first: the phases. Then `chosen` (a state that is held, and its restore), `storage_tier` (what a store
has, and how memory's states get to other ranks), `proof` (the check of the first steps, by `first_steps`) and `report`
(what the user gets). Its caller is the session; all read the reports.
"""
