"""docs/reference/estimators.md says what the code does."""

import re
import subprocess
import sys
from pathlib import Path

from agentrl.algorithms import ESTIMATORS

PAGE = Path(__file__).parents[2] / "docs/reference/estimators.md"
BUILT_IN = [n for n in ESTIMATORS.names() if ESTIMATORS[n].function.__module__.startswith("agentrl.algorithms")]
OTB = ["otb", "tir_otb", "otb_isolated", "otb_total"]


def rows(first: str) -> dict[str, list[str]]:
    """The table whose first heading is `first`: name -> the other cells."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return {row[0].strip("` "): row[1:] for row in cells}


def test_the_table_lists_exactly_the_registered_estimators():
    assert sorted(rows("name")) == sorted(BUILT_IN)


def test_the_table_says_what_each_needs():
    for name, (kind, _, needs, *_) in rows("name").items():
        entry = ESTIMATORS[name]
        wanted = entry.requirements(entry.options())
        assert kind == ("token" if entry.per_token else "scalar"), name
        named = set(re.findall(r"`(\w+)`", needs)) - {"bootstrap_values"}
        assert named == wanted.inputs, name
        assert ("the whole step" in needs) == wanted.step_wide, name


def test_the_table_of_options_is_that_of_the_records():
    for option, (of, default, _) in rows("option").items():
        named = set(re.findall(r"`(\w+)`", of))
        if "`otb` family" in of:
            named |= set(OTB)
        if of == "all":
            named = set(BUILT_IN)
        expected = {name for name in BUILT_IN if option in ESTIMATORS.option_names(name)}
        assert named == expected - ({"eob"} if option == "energy" else set()), option
        for name in named:
            value = getattr(ESTIMATORS[name].options(), option)
            if option == "normalize":
                assert (value == "whiten") == (f"`{name}`" in default), name
            elif isinstance(value, str):
                assert default == f"`{value}`"
            else:
                assert float(default.strip("`").replace("false", "0")) == float(value)


def test_the_example_prints_what_the_page_says():
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"prints `{done.stdout.strip()}`" in text
