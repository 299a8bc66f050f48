"""Tools of operators, beside the engine: it never imports them, and its ``memckpt`` command finds them by entry points.

A folder for each command, whose ``command.py`` is read first: ``plan``, ``simulation``, ``report``, ``doctor``,
``drill``. ``planning`` below them has the formulas that plan, report and simulation share.
"""
