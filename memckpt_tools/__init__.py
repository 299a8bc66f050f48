"""Tools of operators, beside the engine: it never imports them, and its ``memckpt`` command finds them by entry points.

``planning``: formulas of what protection costs, and what a failure does. ``plan``, ``simulation``, ``report``,
``doctor``, ``drill``: a command each, with what only it needs; ``command.py`` is read first.
"""
