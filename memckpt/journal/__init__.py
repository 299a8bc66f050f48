"""What happened to a run: `events` (the typed schema), `journal` (agents write it), `reading` (commands read it)."""
