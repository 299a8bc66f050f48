"""``python -m memckpt``: the ``memckpt`` command."""

from memckpt.cli.main import main

main()
