# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the doctor found, said as it is found.

Owns levels, layout and the verdict. Refuses to know what is checked.
"""

from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

Level = Literal["ok", "note", "warning", "error"]

_SIGNS = {"ok": "[green]✓[/]", "note": "[dim]·[/]", "warning": "[yellow]![/]", "error": "[bold red]✗[/]"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    """`error`: training would fail or learn from wrong data. `warning`: look at it. `note`: a fact."""
    text: str
    """What is so."""
    advice: str = ""
    """What to do; set for warnings and errors."""


class Report:
    """Findings in order; each is printed at once.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console):
        self.console = console
        """Where findings go."""
        self.findings: list[Finding] = []
        """All so far."""

    def section(self, title: str) -> None:
        """Head the findings that follow."""
        self.console.print()
        self.console.rule(f"[bold]{escape(title)}[/]", align="left", style="dim")

    def ok(self, text: str) -> None:
        """Something is as it should be."""
        self._add(Finding(level="ok", text=text))

    def note(self, text: str) -> None:
        """A fact that is neither good nor bad."""
        self._add(Finding(level="note", text=text))

    def warn(self, text: str, advice: str) -> None:
        """Something that may be meant so."""
        self._add(Finding(level="warning", text=text, advice=advice))

    def error(self, text: str, advice: str) -> None:
        """Something that must be mended before training."""
        self._add(Finding(level="error", text=text, advice=advice))

    def show(self, text: Text) -> None:
        """Print coloured text below a finding."""
        self.console.print(Padding(text, (0, 0, 0, 4)))

    def count(self, level: Level) -> int:
        """How many findings have this level."""
        return sum(finding.level == level for finding in self.findings)

    def verdict(self) -> int:
        """Say how it went.

        Returns:
            Exit status: 1 when there is an error, else 0.
        """
        num_errors, num_warnings = self.count("error"), self.count("warning")
        self.console.print()
        if num_errors:
            self.console.print(f"[bold red]{_plural(num_errors, 'error')}[/], {_plural(num_warnings, 'warning')}.")
            return 1
        colour = "yellow" if num_warnings else "green"
        self.console.print(f"[bold {colour}]ready to train[/], {_plural(num_warnings, 'warning')}.")
        return 0

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.console.print(f"{_SIGNS[finding.level]} {escape(finding.text)}", highlight=False, soft_wrap=True)
        if finding.advice:
            self.console.print(f"  [bold]→[/] {escape(finding.advice)}", highlight=False, soft_wrap=True)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
