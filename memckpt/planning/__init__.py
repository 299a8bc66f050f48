"""Costs and benefits of protection, before a job and while it runs: pure formulas, and a simulator of failures."""
