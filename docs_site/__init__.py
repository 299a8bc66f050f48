"""The documentation site: Sphinx's configuration, and the pages made from the code. ``make docs`` builds it."""
