"""What happened to a run: `events` (the typed schema), `journal` (agents write it, commands read it)."""
