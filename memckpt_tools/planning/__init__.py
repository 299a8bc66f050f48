"""Formulas: memory, time and the share of effective training, for settings and failures. Pure."""
