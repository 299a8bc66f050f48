"""``memckpt report``: the story of a run as one page of HTML.

In reading order: ``command``, ``story`` (out of journals, and its goodput), ``figures``, ``page``.
"""
