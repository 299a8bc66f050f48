"""Sphinx's configuration. The site has the pages that the repository has, at the same paths, so links hold in both.

``python -m sphinx -c docs_site . build/docs``: its source directory is the repository's root.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs_site.reference import with_made  # noqa: E402
from memckpt import __version__  # noqa: E402

#: What the sidebar lists, in its order. A page that is missing here is a warning, which is an error.
SECTIONS = {
    "Begin": ["docs/quickstart", "docs/runs", "docs/concepts", "docs/drill", "docs/comparison"],
    "Frameworks": ["docs/integrations", "docs/lightning", "docs/accelerate"],
    "Use": [
        "docs/guarantees",
        "docs/configuration",
        "docs/sharding",
        "docs/gpu",
        "docs/compression",
        "docs/storage",
        "docs/planning",
        "docs/simulation",
        "docs/costs",
    ],
    "Operate": [
        "docs/restart",
        "docs/operations",
        "docs/observability",
        "docs/security",
        "docs/faults",
        "docs/troubleshooting",
        "docs/recipes/torchrun",
        "docs/recipes/slurm",
        "docs/recipes/kubernetes",
        "docs/recipes/ray",
    ],
    "Reference": [
        "docs/reference/settings",
        "docs/reference/commands",
        "docs/reference/messages",
        "docs/reference/events",
        "docs/reference/metrics",
        "docs/reference/promises",
        "docs/reference/interface",
    ],
    "Project": ["docs/design", "docs/versions", "CONTRIBUTING", "SECURITY", "CHANGELOG"],
}

project = "memckpt"
author = "The memckpt authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "benchmarks/results/*.md"]
exclude_patterns = [".venv", "build", "tests", "runs", "**/__pycache__", ".*_cache"]
nitpicky = True

# Anchors as GitHub makes them.
myst_heading_anchors = 6

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# In docstrings single backquotes mark names, mostly of arguments.
default_role = "literal"
# Two hyphens begin an option.
smartquotes = False
# Types in signatures that have no page: other libraries', and ours that are not public.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(accelerate|argparse|collections|lightning|msgspec|numpy|omegaconf|os|pathlib|torch|transformers|typing)\..*",
    ),
    ("py:.*", r"memckpt\.(capture|compression|config|recovery|session|state|storage)\.\w+\..*"),
    ("py:.*", r".*\.?(LoaderT|ResumeChoice|Parts)"),
    # The bare name in a signature whose result is imported for type checkers only (memckpt.load).
    ("py:class", "Path"),
    # A piece of `tuple[str, ...]` as Sphinx splits the type of a field that has a default.
    ("py:.*", r"tuple\[\w+"),
]

html_theme = "furo"
html_title = f"memckpt {release}"
html_extra_path = ["extra"]
html_copy_source = False
html_show_sourcelink = False


def _toctrees() -> str:
    lines = []
    for caption, pages in SECTIONS.items():
        lines += ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *(f"/{page}" for page in pages), "```"]
    return "\n".join(lines)


def _without_links_to_directories(text: str, page: Path) -> str:
    """The text alone: the site has files, and no listings of directories."""

    def shown(link: re.Match[str]) -> str:
        return link[1] if (page.parent / link[2]).is_dir() else link[0]

    return re.sub(r"\[([^][]*)\]\(([^)#:\s]+)\)", shown, text)


def _prepare(app: Sphinx, name: str, content: list[str]) -> None:
    """Complete a page: what is made from the code, the sidebar of the first page, results as pages beside it."""
    text = _without_links_to_directories(with_made(content[0]), ROOT / f"{name}.md")
    if name == root_doc:
        text += _toctrees()
    if name.startswith("benchmarks/"):
        text = f"---\norphan: true\n---\n\n{text}"
    content[0] = text


def _prepare_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Complete a docstring before napoleon reads it: an entry for each of several names that share one text."""
    found: list[str] = []
    at = 0
    while at < len(lines):
        entry = re.match(r"( +)(\w+(?:, \w+)+)(: .*)", lines[at])
        end = at + 1
        if entry is None:
            found.append(lines[at])
        else:
            while end < len(lines) and lines[end].startswith(entry[1] + " "):
                end += 1
            for each in entry[2].split(", "):
                found += [f"{entry[1]}{each}{entry[3]}", *lines[at + 1 : end]]
        at = end
    lines[:] = found


def setup(app: Sphinx) -> None:
    app.connect("source-read", _prepare)
    app.connect("autodoc-process-docstring", _prepare_docstring, priority=100)
