"""Metrics of an agent for Prometheus: what they are, and how they are shown."""
