"""What ``tracelake dev`` shows of its parts, on stderr: a table that changes on a terminal, lines elsewhere.

The terminal may be gone at any time; that is no reason to leave processes behind, so nothing here fails by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from tracelake.cli.show import cell

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tracelake.dev.progress import PartNews

PREFIX = "tracelake dev: "
_COLOURS = {"waiting": "dim", "starting": "yellow", "ready": "green", "died": "yellow", "failed": "red"}
_LONGEST_LINE = 400


class LinesView:
    """One line per change; that one waits or begins to start is no news where nobody watches."""

    def part(self, news: PartNews) -> None:
        match news.state:
            case "ready":
                how = "runs again after" if news.again else "is ready after"
                self.say(f"{news.name} {how} {news.seconds:.1f} s")
            case "died":
                self.say(f"{news.name} {cell(news.why)}; starting it again in {news.seconds:g} s")
                for line in news.last_words:
                    self.say(last_word(news.name, line))

    def say(self, text: str) -> None:
        with suppress(OSError):
            typer.echo(f"{PREFIX}{text}", err=True)

    def close(self) -> None:
        """Nothing is left open."""


class TableView:
    """A row per part until all are ready; from then on what changes is said in lines."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        from rich.live import Live

        self._console = console
        self._now = now
        self._rows: dict[str, tuple[PartNews, float]] = {}
        self._lines = LinesView()
        self._over = False
        self._live = Live(
            get_renderable=self.render,
            console=console,
            refresh_per_second=8,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def part(self, news: PartNews) -> None:
        if self._over:
            self._lines.part(news)
            return
        # Replaced as a whole: the thread that draws reads it at the same time.
        self._rows = {**self._rows, news.name: (news, self._now())}
        with suppress(OSError):
            self._live.start()
        for line in news.last_words:
            self.say(last_word(news.name, line))

    def say(self, text: str) -> None:
        if not self._live.is_started:
            self._lines.say(text)
            return
        with suppress(OSError):
            self._console.print(f"{PREFIX}{text}", markup=False, highlight=False)

    def close(self) -> None:
        self._over = True
        with suppress(OSError):
            self._live.stop()

    def render(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=False, expand=True)
        # A long reason may be cut, a name not.
        table.add_column(no_wrap=True, min_width=max(map(len, self._rows), default=0))
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for name, (news, since) in self._rows.items():
            colour = _COLOURS[news.state]
            table.add_row(Text(name), Text(self._state(news, since), style=colour))
        return table

    def _state(self, news: PartNews, since: float) -> str:
        match news.state:
            case "waiting":
                return f"waits for {news.why}" if news.why else "waits"
            case "starting":
                return f"starting{' again' if news.again else ''} … {self._now() - since:.0f} s"
            case "ready":
                return f"{'restarted' if news.again else 'ready'} in {news.seconds:.1f} s"
            case "died":
                return f"{cell(news.why)}; again in {news.seconds:g} s"
            case _:
                return f"failed: {cell(news.why)}"


def last_word(name: str, line: str) -> str:
    return f"  {name} said: {cell(line)[:_LONGEST_LINE]}"


def dev_view() -> LinesView | TableView:
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return TableView(console)
    return LinesView()
