"""Write docs/metrics.md from the catalogue of metrics: ``python docs/generate_metrics.py``.

``--check`` writes nothing and ends with 1 when the file is not what the catalogue says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from generated_page import write_or_check  # beside this script

from agentrl.telemetry.alerts import RULES
from agentrl.telemetry.metrics.catalogue import SECTIONS
from agentrl.telemetry.metrics.definitions import Metric

TARGET = Path(__file__).with_name("metrics.md")

HEAD = """# Metrics

`metrics.jsonl` has a row for each training step and each evaluation. This page is generated from
`agentrl/telemetry/metrics/catalogue.py` (`make docs`), which the console and the plots read too. *Healthy* is what a
run that learns shows, and the [alerts](telemetry.md#alerts) that read the metric. *When* says which rows have the
metric; without it, every training row has it. `{...}` stands for any text.

A loss or an estimator of your own adds `policy/NAME` for each metric that it returns.

## Metrics of your own

A [plug-in](environments.md#names-of-your-own) registers a function of a step's trajectories. Its number stands in
`metrics.jsonl`, and on request in the progress line and in `plots/`:

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

The trajectories are those of [the Python page](python.md), without greedy ones and those that are no data. A metric
that raises, or returns no finite number, is named once in a warning, and its number is missing in the row.
"""


def page() -> str:
    """The whole page."""
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
