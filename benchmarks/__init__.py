"""Benchmarks: what protection costs, what a restore takes, and how far both are from the machine's bounds.

``python -m benchmarks.run_all`` runs all of them (``make bench``), ``python -m benchmarks.<name>`` one;
``--quick`` takes a smaller model and few repetitions, for a look and not for quoting.
"""
