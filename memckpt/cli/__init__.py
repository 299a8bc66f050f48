"""The `memckpt` command: `main` has its subcommands, and finds those of other packages by entry points.

A command looks at agents (`status`, `events`) or at storage (`stored`, `export`, `tidying`). None of them imports
torch before it needs it.
"""
