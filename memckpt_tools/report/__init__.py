"""``memckpt report``: the story of a run as one page of HTML."""
