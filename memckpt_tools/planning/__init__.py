"""Formulas: what protection takes and saves, before a job runs. Pure; torch-free.

In reading order: ``scheme`` (tiers, and what they make of failures), ``job``, ``footprint`` (bytes and times),
``planned`` (a scheme for a job), ``schemes`` (all ways to protect it). ``values`` reads what people write,
``pictures`` checks and writes what is drawn.
"""
