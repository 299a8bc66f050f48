"""The reference pages, made from the code as Markdown.

Settings come from their dataclasses, commands from the Typer app, events from their structs, metrics and messages from
the source.

A page has a comment such as ``<!-- made: settings -->`` where its text goes; :mod:`docs_site.conf` puts it there.
Nothing here imports Sphinx, so that fast tests check what the pages say.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator

import typer.core
import typer.main

from docs_site import promises as marks
from docs_site.messages import ERRORS, FRAMEWORKS_ERRORS, LINE, ROOT, Message, all_messages
from memckpt.cli.main import app
from memckpt.config import AgentConfig, ErasureConfig, MemckptConfig, StorageConfig
from memckpt.config.checks import alternatives
from memckpt.config.settings import Setting, describe_settings
from memckpt.errors import MemckptError
from memckpt.journal.events import AnyEvent

#: Parts of the tree that a page shows under headings of their own, and the classes that hold them.
PARTS: dict[str, tuple[type, ...]] = {
    "": (MemckptConfig,),
    "agent": (AgentConfig,),
    "storage": (StorageConfig,),
    "peers": (ErasureConfig,),
    "compression": tuple(alternatives(typing.get_type_hints(MemckptConfig)["compression"])[0]),
}
#: Units by the ends of names, the longest first.
_UNITS = {
    "_bytes_per_second": "bytes/s",
    "_seconds": "s",
    "_bytes": "bytes",
    "_steps": "steps",
    "_elements": "elements",
}
_UNITS_OF = {
    "overhead": "share",
    "overhead_budget": "share",
    "audit_budget": "share of a core",
    "ratio": "share",
    "threads": "threads",
    "tolerate": "nodes",
    "data": "fragments",
    "keep_last": "checkpoints",
    "rank": "columns",
}
#: A bar within code in a cell of a table.
SAFE_BAR = "\\|"

#: What the page of the Python interface shows: modules, and their public names.
MODULES = (
    "memckpt",
    "memckpt.errors",
    "memckpt.compression",
    "lightning_memckpt",
    "accelerate_plugin",
    "transformers_memckpt",
    "memckpt_hydra",
)


def unit_of(name: str) -> str:
    """The unit of a setting by its name; empty: it has none."""
    return _UNITS_OF.get(name) or next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


def settings() -> str:
    """Every setting of :class:`memckpt.MemckptConfig`, under a heading for each part of the tree."""
    everything = list(describe_settings())
    lines: list[str] = []
    for part, kinds in PARTS.items():
        lines += [f"## {', '.join(f'`{kind.__name__}`' for kind in kinds)}", ""]
        for kind in kinds:
            lines += [f"`{kind.__name__}`: {_first_line(kind)}", ""]
        for setting in everything:
            if setting.part == part:
                lines += [*_setting(setting, kinds), ""]
    return "\n".join(lines)


def _setting(setting: Setting, kinds: tuple[type, ...]) -> Iterator[str]:
    of = [kind for kind in kinds if any(each.name == _name(setting) for each in dataclasses.fields(kind))]
    hint = typing.get_type_hints(of[0])[_name(setting)]
    yield f"### `{setting.path}`"
    yield ""
    facts = [f"type `{type_text(hint)}`", f"default `{_default(of[0], _name(setting))}`"]
    facts += [f"unit {unit}"] if (unit := unit_of(_name(setting))) else []
    facts += [f"only {', '.join(f'`{kind.__name__}`' for kind in of)}"] if len(of) < len(kinds) else []
    yield "; ".join(facts) + "."
    yield f"Expected: {_escaped(setting.expected)}. Variable `{setting.variable}`, option `{setting.option}`."
    yield ""
    yield _sentence(setting.help)


def _name(setting: Setting) -> str:
    return setting.path.rpartition(".")[2]


def type_text(hint: object) -> str:
    """A type as a person writes it: choices by their values, classes by their names."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(map(type_text, typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(f'"{each}"' for each in typing.get_args(hint))
    if hint is types.NoneType:
        return "None"
    if typing.get_origin(hint) is tuple:
        return f"tuple[{type_text(typing.get_args(hint)[0])}, ...]"
    assert isinstance(hint, type), hint
    return hint.__name__


def _default(kind: type, name: str) -> str:
    (field,) = [each for each in dataclasses.fields(kind) if each.name == name]
    if field.default_factory is not dataclasses.MISSING:
        return f"{type(field.default_factory()).__name__}()"
    return f'"{field.default}"' if isinstance(field.default, str) else f"{field.default}"


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")


def _sentence(text: str) -> str:
    """A help text as a sentence of a page, in which nothing is markup."""
    escaped = _escaped(text)
    return (escaped[:1].upper() + escaped[1:]).rstrip(".") + "."


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>\[\]{}|])", r"\\\1", text)


def commands() -> str:
    """Every command of the command line with its arguments and options, in the order of ``memckpt --help``."""
    root = typer.main.get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    context = typer.Context(root, info_name="memckpt")
    lines: list[str] = []
    for name, command in root.commands.items():
        inner = typer.Context(command, info_name=name, parent=context)
        usage = command.get_usage(inner).removeprefix("Usage: ")
        lines += [f"## `memckpt {name}`", "", "```text", usage, "```", "", *_help(command.help or ""), ""]
        rows = [row for each in command.params if not getattr(each, "hidden", False) if (row := _row(each, inner))]
        if rows:
            lines += ["| | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _help(text: str) -> Iterator[str]:
    """A command's help. A paragraph behind a form feed is not for it; one behind \\b keeps its lines."""
    for paragraph in inspect.cleandoc(text.partition("\f")[0]).split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```text", paragraph.removeprefix("\b").strip("\n"), "```")
        else:
            yield _escaped(paragraph)
        yield ""


def _row(parameter: typing.Any, context: typer.Context) -> str:
    """A row of a command's table: the option or argument, and its help."""
    record = parameter.get_help_record(context)
    if record is None:
        return ""
    shown, text = (each.replace("\n", " ") for each in record)
    return f"| `{shown.replace('|', SAFE_BAR)}` | {_escaped(text)} |"


def interface() -> str:
    """The public names of the packages, described by their docstrings: directives for Sphinx's autodoc."""
    lines: list[str] = []
    for module in MODULES:
        found = importlib.import_module(module)
        lines += [f"## `{module}`", "", "```{eval-rst}"]
        for name in shown_names(module):
            thing = getattr(found, name)
            kind = "exception" if _is_error(thing) else "class" if inspect.isclass(thing) else "function"
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                kind = "data"
            lines += [f".. auto{kind}:: {module}.{name}", ""]
        lines += ["```", ""]
    return "\n".join(lines)


def public_names(module: str) -> list[str]:
    """Of a module with ``__all__``; of another one what is defined in it."""
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return list(found.__all__)
    return [
        name
        for name, thing in vars(found).items()
        if inspect.isclass(thing) and thing.__module__ == module and not name.startswith("_")
    ]


def shown_names(module: str) -> list[str]:
    """Public names of a module without those that a module of the page defines itself, which shows them."""
    found = importlib.import_module(module)
    homes = set(MODULES) - {module}
    return [name for name in public_names(module) if getattr(getattr(found, name), "__module__", "") not in homes]


def _is_error(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)


def messages() -> str:
    """Every error by its class, with what it derives from, then every line of the log, by module."""
    by_kind: dict[str, list[Message]] = defaultdict(list)
    for message in all_messages():
        by_kind[message.kind].append(message)
    lines: list[str] = []
    for name, kind in ERRORS.items():
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        lines += [f"## `{name}`", "", f"{_first_line(kind)} Derives from {bases}.", ""]
        lines += [*_listed(by_kind[name]), ""]
    for name in FRAMEWORKS_ERRORS:
        lines += [f"## `{name}`", "", "An error of Lightning, raised by the callback.", "", *_listed(by_kind[name]), ""]
    lines += ["## Lines of the log", "", *_listed(by_kind[LINE]), ""]
    return "\n".join(lines)


def _listed(found: list[Message]) -> Iterator[str]:
    for message in sorted(found, key=lambda each: (each.module, each.shown)):
        yield f"- ``{message.shown}`` (`{message.module}`)"


def exit_statuses() -> str:
    """A table of exit statuses, with the errors of each and what they mean."""
    by_status: dict[int, list[type[MemckptError]]] = defaultdict(list)
    for kind in ERRORS.values():
        if kind is MemckptError or kind.exit_code != MemckptError.exit_code:
            by_status[kind.exit_code].append(kind)
    lines = ["| status | error | meaning |", "|---:|---|---|"]
    for status, kinds in sorted(by_status.items()):
        meaning = "Any other error." if kinds == [MemckptError] else _first_line(kinds[0])
        lines.append(f"| {status} | {', '.join(f'`{kind.__name__}`' for kind in kinds)} | {meaning} |")
    return "\n".join(lines)


def events() -> str:
    """Every event of a journal with its fields."""
    lines: list[str] = []
    for kind in dict.fromkeys(typing.get_args(AnyEvent)):
        source = inspect.getsource(kind)
        meant = {name: f": {_plain(text)}." for name, text in re.findall(r"^    (\w+): .*  #: (.*)$", source, re.M)}
        lines += [f"## `{kind.__struct_config__.tag}`", "", _plain(inspect.getdoc(kind) or ""), ""]
        lines += [f"- `{name}`{meant.get(name, '')}" for name in kind.__struct_fields__]
        lines.append("")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """A docstring's text without roles."""
    return re.sub(r":\w+:`([^`]*)`", r"`\1`", text).replace("\n", " ")


def metrics() -> str:
    """Every metric of an agent, by the calls that make them in ``metrics.py``."""
    lines = ["| metric | kind | meaning |", "|---|---|---|"]
    tree = ast.parse((ROOT / "memckpt/agent/metrics.py").read_text())
    lines += sorted(row for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for row in _metrics_of(node))
    return "\n".join(lines)


_SUFFIXES = {"counter": "_total", "info": "_info"}


def _metrics_of(function: ast.FunctionDef) -> Iterator[str]:
    """Rows for the metrics that a function makes: kind, name, text, ..., label."""
    texts: dict[str, object] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            texts[ast.unparse(node.targets[0])] = node.value.value
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Call):
            given = node.value.args
            args = [each.value if isinstance(each, ast.Constant) else texts.get(ast.unparse(each)) for each in given]
            if (maker := ast.unparse(node.value.func)) != "Measured":
                args.insert(0, maker.strip("_"))
            kind, name, text, _, *more = args
            by = f"{{{more[0]}}}" if more and maker != "Measured" else ""
            yield f"| `memckpt_{name}{_SUFFIXES.get(str(kind), '')}{by}` | {kind} | {text} |"


def promises() -> str:
    """Every promise, and the tests that try to break it."""
    lines: list[str] = []
    for promise, tests in sorted(marks.promises().items(), key=lambda each: each[0].lower()):
        lines += [f"- {promise}", *(f"  - `{test}`" for test in tests)]
    return "\n".join(lines)


MADE: dict[str, Callable[[], str]] = {
    "settings": settings,
    "commands": commands,
    "messages": messages,
    "exit_statuses": exit_statuses,
    "events": events,
    "metrics": metrics,
    "promises": promises,
    "interface": interface,
}
_PLACE = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)


def with_made(text: str) -> str:
    """A page's Markdown with what is made in its places."""
    return _PLACE.sub(lambda place: MADE[place[1]](), text)
