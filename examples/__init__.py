"""Examples: a plain loop, framework trainings, their shared model, and a demo that kills a training run."""
