"""What lies beside the staged tensors: looked for in each commit, carried where that is possible, else named.

Read `modules` (the modules in sight) and `param_groups` (what a rank state has of groups and modules), `attributes`
(of any object) and `objects` (as something with a state). Gradients between two steps: `pending` (no step has used
them) and `presence` (a step has). `watch` finds changes that no optimizer has made. Then what nobody carries:
`variables` (of a loop), `strangers` (optimizers that the session was not given), `unfollowed` (loaders). The rank
state, the live state and adapters call it.
"""
