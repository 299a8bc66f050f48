"""Benchmarks: the cost of protection, the time of a restore, and their distance from the machine's bounds.

The modules of this package, and ``benchmarks.gpu``, are commands: ``python -m benchmarks.run_all`` runs all of them
(``make bench``), ``python -m benchmarks.<name>`` one. ``--quick`` uses a smaller model and few repetitions; its figures
are not for quoting. ``workloads`` is what they measure, ``harness`` how they do; each file of ``results``
has one table.
"""
