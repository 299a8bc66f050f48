"""Demo: a training run is killed again and again, and ends with the same bits as an undisturbed one.

``python -m examples.demo`` (or ``make demo``). Modules:

- ``__main__`` reads the arguments and reports progress,
- ``supervise`` starts, watches and kills the training process,
- ``train`` is that process: an ordinary Lightning training with one more callback,
- ``black_box`` is the page of memory in which it leaves its position,
- ``verdict`` compares the results of the two runs, bit for bit,
- ``show`` draws tables and curves.
"""
