"""``memckpt plan``: settings for a job that is to come.

In reading order: ``command``, ``measure`` (this machine, a link, a job that runs), ``table`` (text, JSON, a picture).
"""
