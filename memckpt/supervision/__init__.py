"""``memckpt run``: a process that starts a training, and starts it again when it fails."""
