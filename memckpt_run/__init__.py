"""``memckpt run`` and ``memckpt worker``: trainings that are started again when they fail, without imports.

The engine never imports it; the ``memckpt`` command finds it by entry points. In reading order: ``commands``,
``supervisor`` with ``policy``, ``attempts``; ``warm`` and ``warm_process`` fork attempts from a process that has
imported ahead; ``worker`` and ``keeper`` do so below torchrun.
"""
