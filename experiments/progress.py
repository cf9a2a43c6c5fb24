"""What a run shows while it goes on, and what it says when it is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def counted(console: Console, *, remaining: bool = False) -> Progress:
    """A bar with what is done of what there is and the time it took; `remaining` adds the time left."""
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    ]
    if remaining:
        columns += [TextColumn("left"), TimeRemainingColumn()]
    return Progress(*columns, console=console)


@contextlib.contextmanager
def saying_how_to_resume(console: Console, kept: Callable[[], str]) -> Iterator[None]:
    """Says on Ctrl-C what is kept, such as "finished steps are kept in runs/a", and goes on interrupting."""
    try:
        yield
    except KeyboardInterrupt:
        text = f"Interrupted: {kept()}; run the same command to resume."
        console.print(text, highlight=False, soft_wrap=True)
        raise
