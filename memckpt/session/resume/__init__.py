"""The resume of an attempt: what is held, one plan for all ranks, the state in the live tensors, and its proof.

Read `resume` first: the phases. Then `chosen` (a state that is held), `restoration` (a state in the live tensors),
`storage_tier` (what a store has), `proof` (the check of the first steps, by `repetition` and `witness`) and `report`
(what the user gets). `resharding`: other ranks, or other shards. Its caller is the session; all read the reports.
"""
