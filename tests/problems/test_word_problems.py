"""Demonstrations from formulas, and the numbers in texts."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.problems.rows import EmptyProblemsError
from agentrl.problems.sources import mask_numbers, split_by_masked_statement
from agentrl.problems.word_problems import (
    Formula,
    FormulaError,
    formula_demonstrations,
    number_from_words,
    number_mentions,
)
from agentrl_envs.types import Problem

PROGRAM = re.compile(r"\A```py\nfinal_answer\(([\d+*/()-]+)\)\n```\Z")


@pytest.mark.parametrize(
    ("text", "python", "value"),
    [
        ("7+2=9", "7+2", 9),
        ("(25+5)/6=5", "(25+5)//6", 5),
        ("( 290.0 / 2.0 )", "290//2", 145),
        ("10-(3-2)", "10-(3-2)", 9),
        ("((8-3)-2)", "8-3-2", 3),
        ("12/(6/2)", "12//(6//2)", 4),
        ("1,250+50=1300", "1250+50", 1300),
        ("2*(3+4)*5=70", "2*(3+4)*5", 70),
    ],
)
def test_formulas_by_hand(text: str, python: str, value: int):
    formula = Formula.parse(text)
    assert (formula.to_python(), formula.value()) == (python, value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("40/7=5 r5", "more than integer arithmetic"),
        ("19/2", "leaves a remainder"),
        ("3-5", "negative or very large"),
        ("3/0", "leaves a remainder"),
        ("0.65*2", "decimals"),
        ("7+2=10", "does not evaluate to its stated result"),
        ("(7+2", "malformed"),
        ("9**9", "more than integer arithmetic"),
        ("__import__('os')", "more than integer arithmetic"),
        ("10000000*10000000", "negative or very large"),
        ("(" * 150 + "1" + ")" * 150, "more than integer arithmetic"),
        ("-5", "more than integer arithmetic"),
        ("1,2", "more than integer arithmetic"),
        ("x=3", "more than integer arithmetic"),
    ],
)
def test_formulas_that_no_program_of_whole_numbers_follows(text: str, reason: str):
    with pytest.raises(FormulaError, match=reason):
        Formula.parse(text).value()


def trees(depth: int) -> st.SearchStrategy[str]:
    leaf = st.integers(0, 99).map(str)
    if depth == 0:
        return leaf
    below = trees(depth - 1)
    return leaf | st.builds(lambda a, op, b: f"({a}{op}{b})", below, st.sampled_from("+-*/"), below)


@given(trees(3))
def test_written_programs_mean_the_formula(text: str):
    """Python's own reading of the full brackets and of ours agree, wherever the formula has a value."""
    formula = Formula.parse(text)
    try:
        value = formula.value()
    except FormulaError:
        return
    assert eval(formula.to_python()) == value == eval(text.replace("/", "//"))


def test_numbers_in_texts():
    text = "Twenty-six pens cost $1,250.50; 3 boxes of 12, a 2nd and ten A4 sheets, one hundred and five at 1/2."
    assert [mention.value for mention in number_mentions(text)] == [26, 3, 12, 10, 105]
    assert number_from_words("two million three hundred thousand and one") == 2_300_001
    assert number_from_words("twenty thirty") is None


@given(st.integers(0, 999_999))
def test_words_of_a_number_say_it(value: int):
    assert number_from_words(words(value)) == value


def words(value: int) -> str:
    """English for 0 to 999,999, the slow and obvious way."""
    units = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    small = [*units.split(), "seventeen", "eighteen", "nineteen"]
    tens = [*["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]]
    if value >= 1000:
        return words(value // 1000) + " thousand" + (f" {words(value % 1000)}" if value % 1000 else "")
    if value >= 100:
        return small[value // 100] + " hundred" + (f" and {words(value % 100)}" if value % 100 else "")
    if value >= 20:
        return tens[value // 10] + (f"-{small[value % 10]}" if value % 10 else "")
    return small[value]


def write(path: Path, *rows: tuple[str, str, str]) -> Path:
    lines = [json.dumps({"id": f"r{i}", "problem": p, "answer": a, "formula": f}) for i, (p, a, f) in enumerate(rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_equal_numbers_stay_equal_and_every_mention_changes(tmp_path: Path):
    path = write(tmp_path / "f.jsonl", ("Two cups and 2 pens of 30 things. How many?", "34", "30+2+2=34"))
    made, report = formula_demonstrations(path, variants=5, seed=0)
    assert (report.rows, report.usable, report.demonstrations) == (1, 1, 5)
    assert made[0].turns[0].model == "```py\nfinal_answer(30+2+2)\n```"
    assert [shown.problem.id for shown in made] == ["r0", "r0~1", "r0~2", "r0~3", "r0~4"]
    for shown in made[1:]:
        found = re.fullmatch(r"(\d+) cups and (\d+) pens of (\d+) things\. How many\?", shown.problem.statement)
        assert found is not None
        cups, pens, things = map(int, found.groups())
        assert cups == pens
        assert int(shown.problem.answer) == things + 2 * cups
    assert len({shown.problem.statement for shown in made}) == 5


def test_unusable_rows_are_counted_by_reason(tmp_path: Path):
    path = write(
        tmp_path / "f.jsonl",
        ("4 pens and 5 more?", "9", "4+5=9"),
        ("4 pens and 5 more?", "10", "4+5=9"),
        ("How many inches are 4 feet?", "48", "4*12=48"),
        ("4 pens?", "4", ""),
    )
    _, report = formula_demonstrations(path)
    assert report.unusable == {
        "the formula does not equal the answer": 1,
        "the statement lacks a number of the formula": 1,
        "there is no formula": 1,
    }
    with pytest.raises(EmptyProblemsError, match="none of the 1 rows has a formula"):
        formula_demonstrations(write(tmp_path / "g.jsonl", ("4 pens?", "4", "")))


@pytest.mark.parametrize(("name", "rows", "usable"), [("asdiv", 2215, 1370), ("svamp", 1000, 985)])
def test_real_demonstrations_solve_their_problems(data_dir: Path, name: str, rows: int, usable: int):
    made, report = formula_demonstrations(data_dir / f"{name}.jsonl", variants=3, seed=1)
    assert (report.rows, report.usable) == (rows, usable)
    assert report.usable + sum(report.unusable.values()) == rows
    assert report.demonstrations > 2.5 * usable
    assert len({shown.problem.id for shown in made}) == len(made)
    for shown in made:
        found = PROGRAM.match(shown.turns[0].model)
        assert found is not None
        assert eval(found[1]) == int(shown.problem.answer) >= 0
        stated = {mention.value for mention in number_mentions(shown.problem.statement)}
        assert set(map(int, re.findall(r"\d+", found[1]))) <= stated
    assert made == formula_demonstrations(data_dir / f"{name}.jsonl", variants=3, seed=1)[0]


def test_variants_share_the_masked_statement_of_their_original(data_dir: Path):
    """So leaving the originals out of the training problems leaves out what the variants could give away."""
    made, _ = formula_demonstrations(data_dir / "asdiv.jsonl", variants=3, seed=1)
    masks = {shown.problem.id: mask_numbers(shown.problem.statement) for shown in made}
    assert all(mask == masks[name.partition("~")[0]] for name, mask in masks.items())


def test_split_counts_everything_once():
    def problem(number: int, statement: str) -> Problem:
        return Problem(id=str(number), statement=statement, answer="1", source="t")

    texts = ["Tom has 3 pens", "Tom has 40 pens!", "tom has seven pens", "Ann has 3 pens", "Gone 5"]
    given = [problem(number, text) for number, text in enumerate(texts)]
    split = split_by_masked_statement(given, heldout_fraction=0.5, exclude=["gone six"])
    assert split.excluded == 1
    assert len(split.train) + len(split.heldout) == 4
    sides = [{problem.id for problem in part} for part in (split.train, split.heldout)]
    assert {"0", "1", "2"} <= sides[0] or {"0", "1", "2"} <= sides[1]
    assert not split_by_masked_statement(given, heldout_fraction=0.0).heldout
    assert not split_by_masked_statement(given, heldout_fraction=1.0).train


@given(st.lists(st.text(alphabet="ab1 2", min_size=1, max_size=6), min_size=1, max_size=40), st.floats(0, 1))
def test_split_sides_share_no_masked_statement(texts: list[str], fraction: float):
    given_problems = [Problem(id=str(i), statement=text, answer="1", source="t") for i, text in enumerate(texts)]
    split = split_by_masked_statement(given_problems, heldout_fraction=fraction)
    sides = [{mask_numbers(problem.statement) for problem in part} for part in (split.train, split.heldout)]
    assert not sides[0] & sides[1]
    assert len(split.train) + len(split.heldout) == len(texts)
