"""What is taken from a running training, in the trainer: a step's gradients, anchors, tensors by value, rank state.

Read `recorder` (one record), `taps` (where gradients are taken), `slot_writer` (where they go), `live_state` (tensors
by name). Then what makes it exact: `gradient_ops` and `staging_check` (changed gradients), `self_test` (can steps be
redone?), `evidence` (the sample), `beside` (what no slot has). `data` follows data loaders, for adapters, too.
"""
