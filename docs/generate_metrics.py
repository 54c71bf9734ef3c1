"""Write docs/reference/metrics.md from the catalogue of metrics: ``python docs/generate_metrics.py``.

``--check`` only compares, and exits with 1 if the file is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from generated_page import write_or_check  # beside this script

from agentrl.telemetry.alerts import RULES
from agentrl.telemetry.metrics import SECTIONS, Metric

TARGET = Path(__file__).parent / "reference" / "metrics.md"

HEAD = """# Metrics

`metrics.jsonl` has a row for each training step and each evaluation. This page is generated from
`agentrl/telemetry/metrics.py` (`make docs`), which the console and the plots also use. The column *healthy* describes
the values of a run that learns, and names the [alerts](telemetry.md#alerts) that use the metric. The column *when*
describes the rows that contain the metric; if it is empty, every training row does. `{...}` in a name matches any text.

A custom loss or estimator adds `policy/NAME` for each metric that it returns.

## Custom metrics

A [plug-in](../how-to/environments.md#short-names) registers a function of a step's trajectories. Its value is written
to `metrics.jsonl`, and optionally to the progress line and to `plots/`:

```python
# searches.py; agentrl train plugins=[searches.py] ...
import agentrl


@agentrl.register_metric(
    "search/calls_mean",
    unit="calls",
    meaning="Mean number of tool calls of a trajectory that ended with an answer.",
    console="searches {:.1f}",
)
def searches(trajectories):
    counts = [len(one.tool_calls) for one in trajectories if one.ended == "answered"]
    return sum(counts) / len(counts) if counts else None
```

[Training from Python](../how-to/python.md) describes the trajectories. Greedy and excluded trajectories are omitted. If
the function raises or returns a value that is not finite, a warning is logged once and the row has no value.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(line for title, metrics in SECTIONS.items() for line in _section(title, metrics))])


def _section(title: str, metrics: tuple[Metric, ...]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| metric | unit | meaning | healthy | when |"
    yield "|---|---|---|---|---|"
    for metric in metrics:
        cells = (f"`{metric.name}`", metric.unit, metric.meaning, _healthy(metric), metric.when)
        yield "| " + " | ".join(_escaped(cell) for cell in cells) + " |"
    yield ""


def _healthy(metric: Metric) -> str:
    watched = [f"alert `{rule.name}`" for rule in RULES if metric.name in rule.metrics]
    return "; ".join([*([metric.healthy] if metric.healthy else []), *watched])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, page()))
