"""``memckpt drill``: a script is trained undisturbed, then killed and resumed, and its runs are compared."""
