"""One training with the protections of the field, for ``benchmarks.peers_of_the_field``.

``arms`` has the training with each protection, as its documentation shows it; ``train`` is the command that runs one;
``gate`` is what the training says to the benchmark, and waits for; ``trainee`` is the benchmark's side of it.
"""
