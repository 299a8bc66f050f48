"""Hydra plugin: makes the configuration group ``memckpt`` known to every Hydra application in this environment.

Hydra imports the members of the namespace package ``hydra_plugins`` when an application starts. There must be no
``__init__.py`` beside this package: other distributions have members there, too.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from memckpt_hydra import register


class MemckptSearchPathPlugin(SearchPathPlugin):
    """Appends our configurations behind the application's own, and registers their schemas."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        register()
        search_path.append(provider="memckpt", path="pkg://memckpt_hydra.conf")
