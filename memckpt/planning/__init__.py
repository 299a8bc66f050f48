"""What protection costs and saves, before a job and while it runs: pure formulas, and a simulator of failures."""
