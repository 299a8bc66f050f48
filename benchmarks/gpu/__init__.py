"""Benchmarks for a GPU (``make bench-gpu``); the tests run them with ``--quick --device cpu``."""
