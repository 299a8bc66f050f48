"""What a training's state is. Torch-free where agents need it: `spec`, `layout`, `records`.

Read `spec` (tensors, owners, ranks), `layout` (the place of each byte). Then `records` (a record's metadata,
timelines), `redo` (a state advanced by one record, with the user's optimizer), `codec` (values as bytes, decoded
without code).
"""
