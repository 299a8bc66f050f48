"""``memckpt run`` and ``memckpt worker``: trainings that are started again when they fail, without imports.

The engine never imports it; its ``memckpt`` command finds it by entry points. In reading order: ``commands``,
``supervisor`` with ``attempts``; ``warm`` has ``warm_process`` fork attempts from a process that has imported what
``recording`` told, ahead; ``worker`` and its keeper do so below torchrun.
"""
