"""Benchmarks for a GPU (``make bench-gpu``); small enough with ``--quick --device cpu`` to be run by the tests."""
