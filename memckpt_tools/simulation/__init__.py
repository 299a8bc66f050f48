"""``memckpt simulate``: failures drawn or read, and replayed on schemes of protection.

In reading order: ``failures``, ``replay`` (one training), ``run`` (repetitions, sweeps), ``command``.
"""
