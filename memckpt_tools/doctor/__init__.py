"""``memckpt doctor``: whether this machine, and a run's storage, are fit for protection."""
