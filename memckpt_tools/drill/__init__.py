"""``memckpt drill``: a script is trained undisturbed, then killed and resumed, and its runs are compared.

In reading order: ``command``, ``supervisor`` (all runs, and one) with ``job`` (its processes), ``comparison`` (the
verdict), ``text``. In the drilled training ``probe`` writes what ``lines`` reads. ``stock`` drills a script's own
checkpoints; ``witness`` writes its lines.
"""
