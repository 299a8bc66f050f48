"""Formulas: what protection takes and saves, before a job runs. Pure; torch-free.

In reading order: ``job``, ``footprint`` (bytes and times), ``scheme`` (tiers, and what they make of a job's failures),
``schemes`` (ways to protect it), ``papers`` (those of others). ``values`` reads what people write, ``pictures`` checks
and writes what is drawn.
"""
