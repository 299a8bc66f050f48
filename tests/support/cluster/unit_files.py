"""Parser of systemd unit files, for the features that the shipped ones use."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEMD = Path(__file__).resolve().parents[3] / "deploy" / "systemd"
#: Ends by these signals are no failures: systemd.service(5), Restart=.
_CLEAN_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)


@dataclass(frozen=True)
class Unit:
    """A unit file.

    Attributes:
        settings: section, name and value of each line, in the file's order.
    """

    path: Path
    settings: tuple[tuple[str, str, str], ...]

    @classmethod
    def read(cls, path: Path) -> Unit:
        found, section = [], ""
        for line in path.read_text().replace("\\\n", " ").splitlines():
            line = line.strip()
            if not line or line[0] in "#;":
                continue
            if line[0] == "[":
                assert line[-1] == "]", f"{path.name}: {line!r}"
                section = line[1:-1]
                continue
            name, equals, value = line.partition("=")
            assert section, f"{path.name}: {line!r} is in no section"
            assert equals, f"{path.name}: {line!r} is no setting"
            found.append((section, name.strip(), value.strip()))
        return cls(path, tuple(found))

    def values(self, name: str) -> list[str]:
        return [value for _, key, value in self.settings if key == name]

    def value(self, name: str) -> str:
        found = self.values(name)
        assert len(found) == 1, f"{self.path.name}: expected {name}= once, found {found}"
        return found[0]

    def seconds(self, name: str) -> float:
        value = self.value(name)
        units = {"": 1, "s": 1, "min": 60, "h": 3600}
        number, unit = re.fullmatch(r"(\d+)(\w*)", value).groups()  # type: ignore[union-attr]
        return float(number) * units[unit]

    def command(self, specifiers: Mapping[str, str]) -> list[str]:
        return shlex.split(expand(self.value("ExecStart"), specifiers))

    def environment(self, specifiers: Mapping[str, str]) -> dict[str, str]:
        words = [word for value in self.values("Environment") for word in shlex.split(expand(value, specifiers))]
        return dict(word.split("=", 1) for word in words)

    def restarts_after(self, code: int) -> bool:
        """Whether the manager restarts it; a signal is a negative exit code."""
        assert self.value("Restart") == "on-failure"
        prevented = " ".join(self.values("RestartPreventExitStatus")).split()
        if str(code) in prevented:
            return False
        return code != 0 and -code not in _CLEAN_SIGNALS


def expand(text: str, specifiers: Mapping[str, str]) -> str:
    """Replace ``%h`` and other specifiers; an unknown one is an error."""
    return re.sub(r"%(.)", lambda found: {"%": "%", **specifiers}[found[1]], text)
