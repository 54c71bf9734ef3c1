"""Console output of a run: notes, tables and progress. Live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich import box
from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from agentrl.errors import append_help_link
from agentrl.telemetry.metrics import METRICS, USER_METRICS
from agentrl.telemetry.settings import TelemetrySettings

_RECENT_STEPS = 20  # steps in the running average and in the estimate of the remaining time
_PLAIN_WIDTH = 160


class Console:
    """Terminal output of a run. Nothing else may write to the terminal while a console is active."""

    def __init__(self, settings: TelemetrySettings, file: TextIO | None = None, copy: TextIO | None = None) -> None:
        """Write to ``file``, by default standard output. ``copy`` also receives all output, as plain lines."""
        self._settings = settings
        self.copy = None if copy is None else Console(settings, copy)
        probe = RichConsole(file=file)
        self.live = settings.console == "auto" and probe.is_terminal
        # In a notebook, rich would render each line as an HTML block. Without force_terminal=False, it would also emit
        # colour codes, because Jupyter kernels set FORCE_COLOR.
        plain = RichConsole(file=file, width=_PLAIN_WIDTH, force_jupyter=False, force_terminal=False)
        self._rich = probe if probe.is_terminal else plain

    def note(self, text: str) -> None:
        """Print a line, above an active progress display. On a terminal, the line is wrapped between words."""
        self._print(Text(text))

    def warning(self, text: str) -> None:
        """Print a line that requires the user's attention."""
        self._print(Text.assemble(("warning: ", "bold yellow"), append_help_link(text)))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a small table. The first column is left-aligned, and all others are right-aligned."""
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=bool(index))
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._print(table)

    def _print(self, content: Text | Table) -> None:
        # Log files keep long lines. On a terminal, rich wraps between words; the terminal itself would break words.
        self._rich.print(content, soft_wrap=isinstance(content, Text) and not self._rich.is_terminal)
        if self.copy is not None:
            self.copy._print(content)

    def progress(self, total: int, done: int = 0, unit: str = "step", lines: int | None = None) -> RunProgress:
        """Return a context manager that displays progress over ``total`` steps, of which ``done`` are complete.

        Without a live display, at most about ``lines`` lines are printed.
        """
        every = None if self._settings.console == "off" else self._settings.plain_every
        if every is not None and lines is not None:
            every = max(every, total // lines)
        return RunProgress(self, _progress_bar(self._rich) if self.live else None, unit, total, done, every)


class RunProgress:
    """Progress display of a loop. Call ``update`` after each step, and ``close`` (or exit the context) at the end."""

    def __init__(
        self, console: Console, bar: Progress | None, unit: str, total: int, done: int, every: int | None
    ) -> None:
        """Display progress in ``bar``. If ``bar`` is None, print a line every ``every`` steps instead."""
        self._progress_bar, self._unit = bar, unit
        self._plain = console if bar is None else console.copy
        self._total, self._every = total, every
        self._rewards: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._times: deque[tuple[float, int]] = deque([(time.monotonic(), done)], maxlen=_RECENT_STEPS + 1)
        if bar is not None:
            bar.add_task(unit, total=total, completed=done, figures="", left="")
            bar.start()

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the number of complete steps to ``step`` and display ``metrics``, the step's row of ``metrics.jsonl``."""
        self._times.append((time.monotonic(), step))
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        average = sum(self._rewards) / len(self._rewards) if self._rewards else None
        figures, left = format_step(metrics, average), f"{format_duration(self._remaining_seconds(step))} left"
        if self._progress_bar is not None:
            self._progress_bar.update(self._progress_bar.task_ids[0], completed=step, figures=figures, left=left)
        if self._plain is not None and self._every and (step % self._every == 0 or step == self._total):
            self._plain.note(f"{self._unit} {step}/{self._total}  {figures}  {left}")

    def close(self) -> None:
        """Stop the display, whose last state remains visible."""
        if self._progress_bar is not None:
            self._progress_bar.stop()

    def _remaining_seconds(self, step: int) -> float | None:
        (first_time, first_step), (last_time, last_step) = self._times[0], self._times[-1]
        if last_step <= first_step:
            return None
        return (self._total - step) * (last_time - first_time) / (last_step - first_step)


class _MetricsColumn(ProgressColumn):
    """Column with the metrics of the latest step, wrapped between metrics."""

    def render(self, task: Task) -> Columns:
        return Columns([Text(part) for part in task.fields["figures"].split("  ")], padding=(0, 2))


def _progress_bar(rich: RichConsole) -> Progress:
    """Build a progress bar that is redrawn in place."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[left]}"),
        _MetricsColumn(table_column=Column(ratio=1)),
        console=rich,
        expand=True,
    )


def format_step(metrics: Mapping[str, float], average_reward: float | None) -> str:
    """Format the figures of one step. Missing metrics are left out.

    >>> format_step({"reward/mean": 0.5, "tokens_per_s": 5210.0, "policy/entropy": 0.31}, 0.4)
    'reward 0.500 (avg 0.400)  entropy 0.310  5.2k tokens/s'
    """
    parts = []
    if "reward/mean" in metrics:
        average = "" if average_reward is None else f" (avg {average_reward:.3f})"
        parts.append(f"reward {metrics['reward/mean']:.3f}{average}")
    if "eval/correct" in metrics:
        parts.append(f"correct {metrics['eval/correct']:.3f}")
    if "policy/loss" in metrics and "reward/mean" not in metrics:
        parts.append(f"loss {metrics['policy/loss']:.3f}")
    known = [*METRICS.values(), *(USER_METRICS[name].metric for name in USER_METRICS.names())]
    parts += [one.console.format(metrics[one.name]) for one in known if one.console and one.name in metrics]
    if "tokens_per_s" in metrics:
        rate = metrics["tokens_per_s"]
        parts.append(f"{rate / 1000:.1f}k tokens/s" if rate >= 1000 else f"{rate:.0f} tokens/s")
    return "  ".join(parts)


def format_duration(seconds: float | None) -> str:
    """Format a duration as ``m:ss`` or ``h:mm:ss``, or ``?`` if it is unknown.

    >>> format_duration(192.4), format_duration(7322), format_duration(None)
    ('3:12', '2:02:02', '?')
    """
    if seconds is None:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
