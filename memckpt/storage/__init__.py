"""Files of a run on a disk or in an object store. What is written, and when, is decided by `memckpt.agent.saving`.

Read `store` (durable files) with `local_store` and `urls`, `format` (commit files), `node_files` (a node's part) with
`dcp` (its tensors) and `batch` (logged records). Then `catalog` (what is there), `chain` (what can be redone from it),
`retention` and `owner` (whose a store is). `export` is for other tools.
"""
