"""How a sweep gets on, drawn on a terminal: a line for each run under way, and one for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from loraledger.cli.output import printable
from loraledger.units import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import TaskID

    from loraledger.replay.fleet.outcome import Outcome
    from loraledger.replay.fleet.run import Progress
    from loraledger.replay.scenarios.sweep import Watcher


class Silent:
    """Where nobody looks."""

    def moved(self, index: int, progress: Progress) -> None:
        """Nothing."""

    def ended(self, index: int, outcome: Outcome) -> None:
        """Nothing."""


class Drawn:
    """Draws on ``display``: simulated time, requests a second, time left."""

    def __init__(self, display: Display, labels: Sequence[str], requests: int) -> None:
        self._display = display
        self._labels = [printable(label) for label in labels]
        self._requests = requests
        self._tasks: dict[int, TaskID] = {}
        self._all = display.add_task("all runs", total=requests * len(labels), said="", visible=len(labels) > 1)
        self._done = [0] * len(labels)
        self._ended = 0

    def moved(self, index: int, progress: Progress) -> None:
        """The n-th run is so far."""
        task = self._tasks.get(index)
        if task is None:
            total = progress.total or self._requests
            task = self._tasks[index] = self._display.add_task(self._labels[index], total=total, said="")
        said = "writing its record" if progress.writing else _said(progress)
        self._display.update(task, completed=progress.requests, said=said)
        self._count(index, progress.requests)

    def ended(self, index: int, outcome: Outcome) -> None:
        """The n-th run is complete, and its line goes."""
        if (task := self._tasks.pop(index, None)) is not None:
            self._display.remove_task(task)
        self._ended += 1
        self._count(index, self._requests)

    def _count(self, index: int, requests: int) -> None:
        self._done[index] = requests
        said = f"{self._ended} of {len(self._labels)} runs"
        self._display.update(self._all, completed=sum(self._done), said=said)


def _said(progress: Progress) -> str:
    left = "" if progress.left_s is None else f", {format_duration(round(progress.left_s * 1e9))} left"
    return f"{format_duration(progress.simulated_ns)} simulated, {progress.rate:,.0f} requests/s{left}"


@contextmanager
def watching(labels: Sequence[str], requests: int) -> Iterator[Watcher]:
    """Draws on stderr while the block runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[said]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        yield Drawn(display, labels, requests)
