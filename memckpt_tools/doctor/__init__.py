"""``memckpt doctor``: whether this machine, and a run's storage, are fit for protection.

In reading order: ``command``, ``probes`` (facts), ``checks`` (what follows from them, pure). ``plan`` uses the probes.
"""
