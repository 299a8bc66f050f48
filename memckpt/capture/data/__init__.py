"""Exact resume of the data position of a PyTorch DataLoader after its process was killed.

`graft` adopts a loader in place, and its `position` is read after every step. In a new process `resume` makes the next
iteration continue after that position. Indices come in the same order, and workers draw the same augmentation. No
skipped sample is loaded.

    graft.py        public functions
    iteration.py    a loader's record, and the classes of grafted loaders and iterators
    sampler_tap.py  tap between loader and sampler: start of a pass, draws, replay with checksums
    worker_rng.py   in the workers: sends their generators' states with each batch, restores them
    own_state.py    generators and sampler counters of the loader's own objects
    passes.py       bookkeeping of one pass
    prefetch.py     how many batches a loop takes before it trains on them
    follower.py     the loaders of one training, and of loops written by hand
    surroundings.py what a loop has put around an iteration
    places.py       places of a loop in its loaders, and whether a restart there would be exact
"""
