"""Benchmarks: the cost of protection, the time of a restore, and their distance from the machine's bounds.

``python -m benchmarks.run_all`` runs all of them (``make bench``), ``python -m benchmarks.<name>`` one;
``--quick`` uses a smaller model and few repetitions; its figures are not for quoting.
"""
