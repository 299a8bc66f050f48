"""A training run is killed again and again, and ends with the very bits of one that was left alone.

``python -m examples.demo`` (or ``make demo``). Who does what:

- ``__main__`` reads the arguments and says what happens,
- ``supervise`` starts, watches and kills the training process,
- ``train`` is that process: an ordinary Lightning training with one callback more,
- ``black_box`` is the page of memory in which it leaves its position,
- ``verdict`` compares what the two runs wrote, bit for bit,
- ``show`` draws tables and curves.
"""
