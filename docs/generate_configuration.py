"""Write docs/reference/configuration.md from the settings' models: ``python docs/generate_configuration.py``.

``--check`` writes nothing and ends with 1 when the file is not what the models say.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated_page import write_or_check  # beside this script
from pydantic import BaseModel

from agentrl.config.messages import describe_valid_values
from agentrl.config.settings import RESUME_MAY_CHANGE, SIMPLETIR, SimpleTIRRunSettings
from agentrl.problems.settings import ProblemSourceSettings

TARGET = Path(__file__).parent / "reference" / "configuration.md"

HEAD = """# Configuration

Every setting has one default, in the settings model of the package that uses it. This page is generated from those
models (`make docs`). Settings are applied in this order; later values override earlier ones:

1. the defaults, which are the published values for large models;
2. without `model.path`, the preset [`tiny`](../../configs/tiny.yaml);
3. each `--config FILE`, in order, after the files in its `base`;
4. `key=value` on the command line.

Mappings are merged key by key; all other values are replaced. `data.train.0.weight=2` changes one entry of a list.
`agentrl train --dry-run` prints the resolved settings.

A config file is YAML with the sections below. `base: tiny` applies it on top of another config file, or on top of
several if `base` is a list. `${VARIABLE}` is replaced by the value of an environment variable. Unknown keys, wrong
types and contradictions end the command with a message and exit code 2.

`--resume` continues with the settings of the run. Only settings that do not affect the problems, the sampling
distribution or the gradient may change:
"""

NOTES = {
    "environment": (
        "These keys apply to `env: simpletir`. `env: reasoning` has `instruction`, `chat`, `system_prompt` and "
        "`template_options`; a gymnasium class has `kwargs`, `threads` and `call_deadline`. Other environments have "
        "different keys ([environments.md](../how-to/environments.md))."
    ),
    "data": "Problem sources; several are sampled in proportion to their weights ([data.md](../how-to/data.md)).",
}


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD + _changeable(), *_sections()])


def _changeable() -> str:
    names = ", ".join(f"`{key}*`" if key.endswith(".") else f"`{key}`" for key in RESUME_MAY_CHANGE)
    return textwrap.fill(names, 120, break_long_words=False, break_on_hyphens=False) + ".\n"


def _sections() -> Iterator[str]:
    plain = {
        name: field for name, field in SimpleTIRRunSettings.model_fields.items() if not _is_section(field.annotation)
    }
    yield _section("Top level", "", SimpleTIRRunSettings, list(plain))
    for name, field in SimpleTIRRunSettings.model_fields.items():
        if _is_section(field.annotation):
            yield from _model(name, field.annotation)
    yield from _model("data.train.0", ProblemSourceSettings, title="data.train.N and data.eval.N")


def _model(path: str, model: Any, title: str | None = None) -> Iterator[str]:
    inner = [name for name, field in model.model_fields.items() if _is_section(field.annotation)]
    yield _section(title or path, path, model, [name for name in model.model_fields if name not in inner])
    for name in inner:
        yield from _model(f"{path}.{name}", model.model_fields[name].annotation)


def _section(title: str, path: str, model: type[BaseModel], names: list[str]) -> str:
    lines = [f"## {title}\n"]
    if path:
        lines.append(f"{NOTES.get(path, (model.__doc__ or '').strip().splitlines()[0].replace('``', '`'))}\n")
    lines += ["| key | default | valid | meaning |", "|---|---|---|---|"]
    for name in names:
        key = f"{path}.{name}" if path else name
        field = model.model_fields[name]
        valid = re.sub(r"(?<=matching )\S+", r"`\g<0>`", describe_valid_values(key, SIMPLETIR))
        cells = (f"`{name}`", _default(field), valid, field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "must be given"
    value = json.dumps(field.get_default(call_default_factory=True), ensure_ascii=False)
    return f"`{value}`" if len(value) <= 60 else "[text](../../envs/agentrl_envs/settings.py)"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, page()))
