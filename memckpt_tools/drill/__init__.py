"""``memckpt drill``: a script is trained undisturbed, then killed and resumed, and its runs are compared.

In reading order: ``command``, ``carry_out`` (all runs), ``supervisor`` (one run) with ``job`` (its processes),
``comparison`` (the verdict), ``text``. In the drilled training ``probe`` and ``attributes`` write what ``lines`` reads.
"""
