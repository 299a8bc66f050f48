"""What happened to a run: `events` (the typed schema), `journal` (written by a thread, bounded), `reading`.

Agents write it; commands read it.
"""
