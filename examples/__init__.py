"""Examples: a plain loop, the model that they share, and a demo that kills a training run."""
