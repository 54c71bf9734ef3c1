r"""Wrong neighbours and respellings of real gold answers: how many of the first pass the grader, of the second do not.

    AGENTRL_DATA_DIR=DIR python benchmarks/grading_neighbours.py [--each 3] [--seed 0] [--workers 2]

Gold answers are those of MATH, AIME and AMC, every one that is no plain integer and as many that are. Each kind below
makes of a gold answer, by its text alone, something that is wrong (``WRONG``) or the same (``SAME``), or nothing. A
wrong neighbour that passes is printed, and so is a respelling that fails; those that were looked at and turned out to
be the other thing stand in ``LOOKED_AT`` with the reason, and are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path

from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.grading.comparing.fast import is_plain_number
from agentrl_envs.types import Verdict

Maker = Callable[[str, str, random.Random], str | None]

INTEGER = re.compile(r"-?\d+")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
BRACKETED = re.compile(r"(?:\\left)?\s*([(\[])(.+?)(?:\\right)?\s*([)\]])", re.DOTALL)
LETTERS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z](?![A-Za-z}])")
LOOKED_AT: dict[tuple[str, str], str] = {
    (r"33\%", "033"): "a percentage is its number",
    ("27", r"27^\circ"): "the sign of degrees left out",
}


def pieces(gold: str) -> list[str]:
    """What stands between commas outside of brackets."""
    found, depth, last = [], 0, 0
    for match in re.finditer(r"[(\[{]|[)\]}]|,(?!\\!)", gold):
        if match.group() == ",":
            if depth == 0:
                found.append(gold[last : match.start()].strip())
                last = match.end()
        else:
            depth += 1 if match.group() in "([{" else -1
    return [*found, gold[last:].strip()]


def bracketed(gold: str) -> tuple[str, list[str], str] | None:
    """A tuple's or an interval's brackets and parts."""
    match = BRACKETED.fullmatch(gold.strip())
    if match is None or any(bracket in match[2] for bracket in ("(", ")", "[", "]")):
        return None
    parts = pieces(match[2])
    return (match[1], parts, match[3]) if len(parts) > 1 else None


def plain(gold: str) -> bool:
    """An expression alone: no words, relation, bracket, comma or second sign."""
    return not re.search(
        r"[,=<>\[\]:;$%_]|\\(?:text|textnormal|mbox|begin|pm|cup|leq?|geq?|in|approx|infty)(?![a-z])|\\\$|[A-Z]{2}",
        gold,
    )


# Wrong neighbours


def another_digit(gold: str, other: str, rng: random.Random) -> str | None:
    places = [match.start() for match in re.finditer(r"\d", gold)]
    if not places:
        return None
    place = rng.choice(places)
    return gold[:place] + rng.choice([digit for digit in "123456789" if digit != gold[place]]) + gold[place + 1 :]


def digit_lost(gold: str, other: str, rng: random.Random) -> str | None:
    places = [match.start() for match in re.finditer(r"(?<=[1-9])\d|(?<!\d)[1-9](?=[1-9])", gold)]
    if "." in gold or ":" in gold or "approx" in gold:  # a zero behind a point says nothing
        return None
    return None if not places else (lambda place: gold[:place] + gold[place + 1 :])(rng.choice(places))


def sign_turned(gold: str, other: str, rng: random.Random) -> str | None:
    if not plain(gold) or gold.strip() == "0":
        return None
    return f"-({gold})" if not INTEGER.fullmatch(gold) else str(-int(gold))


def plus_for_minus(gold: str, other: str, rng: random.Random) -> str | None:
    places = [match.start() for match in re.finditer(r"(?<=[\w})] )[+-]|(?<=[\w})])[+-]", gold)]
    if not places or "text" in gold or "phantom" in gold:
        return None
    place = rng.choice(places)
    return gold[:place] + ("-" if gold[place] == "+" else "+") + gold[place + 1 :]


def other_brackets(gold: str, other: str, rng: random.Random) -> str | None:
    found = bracketed(gold)
    if found is None:
        return None
    left, parts, right = found
    inner = ", ".join(parts)
    pairs = ["()", "[]", "(]", "[)"]
    pairs.remove(left + right)
    kinds = [f"{pair[0]}{inner}{pair[1]}" for pair in pairs] + [f"\\{{{inner}\\}}"]
    return rng.choice(kinds)


def parts_swapped(gold: str, other: str, rng: random.Random) -> str | None:
    found = bracketed(gold)
    if found is None or found[1][0].replace(" ", "") == found[1][-1].replace(" ", ""):
        return None
    left, parts, right = found
    return left + ", ".join([parts[-1], *parts[1:-1], parts[0]]) + right


def part_lost(gold: str, other: str, rng: random.Random) -> str | None:
    found = bracketed(gold)
    if found is not None:
        left, parts, right = found
        return f"{left}{', '.join(parts[:-1])}{right}" if len(parts) > 2 else parts[0]
    parts = pieces(gold)
    return ", ".join(parts[1:]) if len(parts) > 1 and "text" not in gold and "," not in parts[0] else None


def part_more(gold: str, other: str, rng: random.Random) -> str | None:
    if "text" in gold or "infty" in gold:
        return None
    return rng.choice(["{}, 7919", "{} \\text{{ or }} 7919", "7919, {}", "{}; 7919", "{} \\text{{ and }} 7919"]).format(
        gold
    )


def part_repeated_otherwise(gold: str, other: str, rng: random.Random) -> str | None:
    return f"{gold} {other}" if is_plain_number(gold) and is_plain_number(other) else None


def more(gold: str, other: str, rng: random.Random) -> str | None:
    added = rng.choice(
        ["+ 1", "+ 0.01", "+ \\frac{1}{1000}", "+ 10^{-9}", "- 2", "+ x", "+ \\pi", "+ i", "\\cdot 2", "^2 + 3"]
    )
    return f"({gold}) {added}" if plain(gold) and (gold != "0" or "cdot" not in added) else None


def marked(gold: str, other: str, rng: random.Random) -> str | None:
    mark = rng.choice(["'", "^T", "!!", "\\ldots", "^{7}", "\\cdots", "''", "?"])
    if not plain(gold) or gold.strip("-0 ") in ("", "1") or "^" in gold or "!" in gold:
        return None
    return f"{gold}{mark}" if re.fullmatch(r"[\w]+", gold) else f"({gold}){mark}"


def worded(gold: str, other: str, rng: random.Random) -> str | None:
    words = (
        "million thousand dozen factorial squared cubed pi percent$or$more at$least halves thirds hundred is$wrong not "
        "plus$one times$two over$2 mod$7 or$6 to$7 to$the$power$of$2 root billion minus$1"
    )
    word = rng.choice(words.split()).replace("$", " ")
    return f"{gold} \\text{{ {word}}}" if is_plain_number(gold) and gold not in ("0", "1") else None


def words_before(gold: str, other: str, rng: random.Random) -> str | None:
    word = rng.choice(["not", "more than", "at least", "less than", "about half of", "minus", "twice"])
    return f"\\text{{{word} }}{gold}" if is_plain_number(gold) and gold != "0" else None


def other_case(gold: str, other: str, rng: random.Random) -> str | None:
    places = [match.start() for match in LETTERS.finditer(gold) if gold[match.start()] not in "eiEI"]
    if not places or re.search(
        r"text|mbox|=|_|[A-Za-z]{3}|\\in(?![a-z])", re.sub(r"\\(?!text|mbox|in)[a-z]+", "", gold)
    ):
        return None
    place = rng.choice(places)
    return gold[:place] + gold[place].swapcase() + gold[place + 1 :]


def other_letter(gold: str, other: str, rng: random.Random) -> str | None:
    places = [match.start() for match in LETTERS.finditer(gold)]
    if not places or "=" in gold or "\\text" in gold or "\\in " in gold:
        return None
    place = rng.choice(places)
    return gold[:place] + ("w" if gold[place] != "w" else "u") + gold[place + 1 :]


def letters_lost(gold: str, other: str, rng: random.Random) -> str | None:
    found = re.findall(r"\\pi(?![a-z])|\\sqrt(?![a-z])|(?<![\\a-zA-Z{])[a-z](?![a-zA-Z])", gold)
    if not found or "text" in gold or "=" in gold or (gold.startswith("\\sqrt") and "{1}" in gold):
        return None
    lost = gold.replace(rng.choice(found), " ", 1).strip()
    return lost or None


def reciprocal(gold: str, other: str, rng: random.Random) -> str | None:
    match = FRACTION.fullmatch(gold)
    return None if match is None or match[2] == match[3] else f"{match[1]}\\frac{{{match[3]}}}{{{match[2]}}}"


def point_shifted(gold: str, other: str, rng: random.Random) -> str | None:
    if not re.fullmatch(r"-?\d*\.?\d+", gold) or float(gold) == 0:
        return None
    return str(float(Fraction(gold) * rng.choice([10, 100, 1000]))) if "." in gold else f"{gold[:-1]}.{gold[-1]}"


def rounded(gold: str, other: str, rng: random.Random) -> str | None:
    match = FRACTION.fullmatch(gold)
    if match is None or 10**6 % int(match[3]) == 0 or 10**6 * int(match[2]) % int(match[3]) == 0:
        return None
    value = int(match[2]) / int(match[3])
    return f"{match[1]}{value:.{rng.choice([2, 3, 4])}f}"


def relation(gold: str, other: str, rng: random.Random) -> str | None:
    sign = rng.choice(["<", ">", "\\le", "\\ge", "\\ne"])
    return f"x {sign} {gold}" if plain(gold) else None


def right_side(gold: str, other: str, rng: random.Random) -> str | None:
    left, sign, right = gold.partition("=")
    return right.strip() if sign and re.search(r"[-+]", left) else None


def false_equation(gold: str, other: str, rng: random.Random) -> str | None:
    both_integers = INTEGER.fullmatch(gold) and INTEGER.fullmatch(other) and int(gold) != int(other)
    return f"{other} = {gold}" if both_integers else None


def other_base(gold: str, other: str, rng: random.Random) -> str | None:
    match = re.fullmatch(r"(\w+)_\{?(\d+)\}?", gold)
    return None if match is None else f"{match[1]}_{{{int(match[2]) + rng.choice([1, 2, 7])}}}"


def other_unit(gold: str, other: str, rng: random.Random) -> str | None:
    units = {"cm": "inches", "inches": "cm", "feet": "miles", "miles": "km", "degrees": "radians", "hours": "minutes"}
    units |= {"dollars": "cents", "cents": "dollars", "pounds": "kg", "p.m.": "a.m.", "a.m.": "p.m.", "days": "hours"}
    for unit, changed in units.items():
        if f" {unit}}}" in gold:
            return gold.replace(f" {unit}}}", f" {changed}}}")
    return None


def anagram(gold: str, other: str, rng: random.Random) -> str | None:
    match = re.fullmatch(r"(?:\\text\{)?([A-Za-z]{3,})\}?", gold)
    if match is None or len(set(match[1].lower())) < 2:
        return None
    letters = list(match[1].lower())
    while "".join(letters) == match[1].lower():
        rng.shuffle(letters)
    return "".join(letters) if match[1].islower() else "".join(letters).upper()


def another_gold(gold: str, other: str, rng: random.Random) -> str | None:
    return (
        other
        if re.sub(r"\W|text|d?frac|left|right", "", other) != re.sub(r"\W|text|d?frac|left|right", "", gold)
        else None
    )


WRONG: tuple[Maker, ...] = (
    another_digit, digit_lost, sign_turned, plus_for_minus, other_brackets, parts_swapped, part_lost, part_more,
    part_repeated_otherwise, more, marked, worded, words_before, other_case, other_letter, letters_lost, reciprocal,
    point_shifted, rounded, relation, right_side, false_equation, other_base, other_unit, anagram, another_gold,
)  # fmt: skip


# Respellings


def dressed(gold: str, other: str, rng: random.Random) -> str | None:
    dress = [
        "${}$",
        "$$ {} $$",
        "\\( {} \\)",
        "\\[ {} \\]",
        "**{}**",
        "\\boxed{{{}}}",
        "\\fbox{{{}}}",
        "{}.",
        " {} ",
        "\\displaystyle {}",
    ]
    return rng.choice(dress).format(gold)


def other_fractions(gold: str, other: str, rng: random.Random) -> str | None:
    if "frac" not in gold or re.search(r"\d\s*\\[dt]?frac", gold):
        return None
    style = rng.choice(["\\dfrac", "\\tfrac", "\\cfrac", "/", "digits"])
    if style == "/":
        return re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}(?![\w\\(^])(?! ?[\\\w(])", r"\1/\2", gold)
    if style == "digits":
        return re.sub(r"\\[dt]?frac\{(\d)\}\{(\d)\}(?!\d)", r"\\frac\1\2", gold)
    return re.sub(r"\\[dt]?frac(?![a-z])", lambda _: style, gold)


def spaced(gold: str, other: str, rng: random.Random) -> str | None:
    if "text" in gold or "mbox" in gold or "begin" in gold or "\\!" in gold:
        return None
    blank = rng.choice([" ", "\\,", "\\ ", "\\;"])
    return (
        re.sub(
            r"(?<=[\w})])([-+=<,])(?=[\w\\({\-])(?!\\!)",
            lambda match: f"{match[1] if match[1] == ',' else blank + match[1]}{blank}",
            gold,
        )
        if not re.search(r"\d,\d{3}", gold)
        else None
    )


def sized(gold: str, other: str, rng: random.Random) -> str | None:
    if "\\left" in gold:
        return (
            gold.replace("\\left", "").replace("\\right", "")
            if rng.random() < 0.5
            else gold.replace("\\left", "\\bigl").replace("\\right", "\\bigr")
        )
    return (
        None
        if "(" not in gold or bracketed(gold) is None
        else gold.replace("(", "\\left(").replace(")", "\\right)")
        if "[" not in gold and "]" not in gold
        else None
    )


def assigned(gold: str, other: str, rng: random.Random) -> str | None:
    name = rng.choice(
        ["x", "y", "S", "A", "a_1", "f(x)", "\\theta", "m", "n", "P(A)", "\\text{Area}", "AB", "\\angle ABC"]
    )
    return f"{name} = {gold}" if plain(gold) and not re.search(r"[a-zA-Z]", re.sub(r"\\[a-z]+", "", gold)) else None


def as_decimal(gold: str, other: str, rng: random.Random) -> str | None:
    match = FRACTION.fullmatch(gold)
    if match is None:
        return None
    value = Fraction(int(match[2]), int(match[3]))
    exact = 10**6 % value.denominator == 0
    return f"{match[1]}{float(value):.6f}".rstrip("0") if exact else f"{match[1]}{float(value)!r}"


def as_python(gold: str, other: str, rng: random.Random) -> str | None:
    """For roots, fractions and powers of integers."""
    if re.search(r"[\d.a-z]\s*\\[dt]?frac|[a-z]\s*\\(?:sqrt|pi)|\\pi\s*\\sqrt", gold):
        return None  # mixed numbers, and products that programs do not print like this
    text = re.sub(
        r"\\[dt]?frac\{([^{}]*(?:\{[^{}]*\})?[^{}]*)\}\{([^{}]*(?:\{[^{}]*\})?[^{}]*)\}", r"((\1)/(\2))", gold
    )
    text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text).replace("\\pi", "pi").replace("\\infty", "oo")
    text = re.sub(r"\^\{([^{}]*)\}", r"**(\1)", text).replace("^", "**").replace("\\cdot", "*")
    text = text.replace("\\left", "").replace("\\right", "")
    text = re.sub(r"(?<=[\d)])\s*(?=[a-z(])(?<!sqrt)", "*", text)
    return (
        None
        if "\\" in text
        or "text" in text
        or "_" in text
        or "\\" not in gold
        or re.search(r"[a-z]\(", text.replace("sqrt(", ""))
        else text
    )


def as_unicode(gold: str, other: str, rng: random.Random) -> str | None:
    text = (
        gold.replace("\\pi", "π")
        .replace("\\infty", "∞")
        .replace("\\cup", "∪")
        .replace("^\\circ", "°")
        .replace("\\cdot", "·")
    )
    text = re.sub(r"\\sqrt\{(\d+)\}", r"√\1", text).replace("^2", "²").replace("^3", "³").replace("-", "−")
    return text if text != gold else None


def full_width(gold: str, other: str, rng: random.Random) -> str | None:
    return (
        re.sub(r"\d", lambda digit: chr(ord(digit.group()) + 0xFEE0), gold)
        if re.fullmatch(r"[-\d.,() ]*\d[-\d.,() ]*", gold)
        else None
    )


def turned_sum(gold: str, other: str, rng: random.Random) -> str | None:
    match = re.fullmatch(r"([\w\\{}^]+)\s*\+\s*([\w\\{}^]+)", gold)
    return (
        None
        if match is None or "text" in gold or match[1].count("{") != match[1].count("}")
        else f"{match[2]}+{match[1]}"
    )


def nothing_added(gold: str, other: str, rng: random.Random) -> str | None:
    ways = [
        "{} + 0",
        "1 \\cdot ({})",
        "\\frac{{2({})}}{{2}}",
        "({}) + 1 - 1",
        "-(-({}))",
        "\\frac{{{}}}{{1}}",
        "(\\sqrt{{3}})^2 \\cdot \\frac{{{}}}{{3}}",
    ]
    return rng.choice(ways).format(gold) if plain(gold) else None


def list_otherwise(gold: str, other: str, rng: random.Random) -> str | None:
    parts = pieces(gold)
    if len(parts) < 2 or re.search(r"text|mbox|\d,\s*(?:\\!)?\s*\d{3}(?!\d)|=|\\pm|\\,", gold):
        return None
    rng.shuffle(parts)
    return (
        rng.choice(["{}", "\\{{{}\\}}"]).format(", ".join(parts))
        if rng.random() < 0.7
        else " \\text{ and } ".join(parts)
    )


def as_inequality(gold: str, other: str, rng: random.Random) -> str | None:
    found = bracketed(gold)
    if found is None or len(found[1]) != 2 or ("infty" not in gold and found[0] + found[2] == "()"):
        return None
    left, (low, high), right = found
    below, above = ("<" if left == "(" else "\\le"), ("<" if right == ")" else "\\le")
    if "-\\infty" in low and "infty" in high:
        return None
    if "-\\infty" in low:
        return f"x {above} {high}"
    if "infty" in high:
        return f"{low} {below} x"
    return f"{low} {below} x {above} {high}"


def with_unit(gold: str, other: str, rng: random.Random) -> str | None:
    unit = rng.choice(
        [" units", " cm", " square units", " apples", " degrees", " ways", " dollars", " km", " miles per hour"]
    )
    if not is_plain_number(gold) or "/" in gold:
        return None
    return rng.choice(["{}\\text{{{}}}", "{} \\mathrm{{{}}}", "{}{}"]).format(gold, unit)


def without_unit(gold: str, other: str, rng: random.Random) -> str | None:
    if re.search(r"\\(?:sin|cos|tan|,)", gold):
        return None
    text = re.sub(r"\s*(?:\\(?:text|mbox)\s*\{[ a-z.]*\}(?:\^\d)?|\^\\circ|\^\{\\circ\})$|^\\\$\s*", "", gold)
    return text if text and text != gold and re.fullmatch(r"[\w.\\{} +!,]+", text) else None


def words_set_otherwise(gold: str, other: str, rng: random.Random) -> str | None:
    match = re.fullmatch(r"\\text\{([A-Za-z ]{2,})\}", gold)
    return (
        None
        if match is None
        else rng.choice(["{}", "\\textbf{{{}}}", "\\mathrm{{{}}}", "**{}**"]).format(match[1].strip())
    )


def thousands(gold: str, other: str, rng: random.Random) -> str | None:
    if not INTEGER.fullmatch(gold) or abs(int(gold)) < 1000:
        return None
    return f"{int(gold):,}".replace(",", rng.choice([",", "{,}", ",\\!", " ", "\\,"]))


def mixed(gold: str, other: str, rng: random.Random) -> str | None:
    match = FRACTION.fullmatch(gold)
    if match is None or int(match[2]) < int(match[3]):
        return None
    whole, over = divmod(int(match[2]), int(match[3]))
    return f"{match[1]}{whole}\\frac{{{over}}}{{{match[3]}}}" if over else str(whole)


def coloured(gold: str, other: str, rng: random.Random) -> str | None:
    return (
        rng.choice(["\\color{{red}}{{{}}}", "\\textcolor{{blue}}{{{}}}", "{{\\color{{red}} {}}}"]).format(gold)
        if plain(gold)
        else None
    )


def other_matrix(gold: str, other: str, rng: random.Random) -> str | None:
    if "pmatrix" not in gold:
        return None
    rows = re.sub(r"\\(?:begin|end)\{pmatrix\}", "", gold).split("\\\\")
    if rng.random() < 0.5 or "frac" in gold or "sqrt" in gold:
        return gold.replace("pmatrix", "bmatrix")
    return (
        "[" + ", ".join(f"[{', '.join(cell.strip() for cell in row.split('&'))}]" for row in rows if row.strip()) + "]"
    )


def scientific(gold: str, other: str, rng: random.Random) -> str | None:
    if not INTEGER.fullmatch(gold) or int(gold) == 0:
        return None
    return f"{int(gold)}.0" if abs(int(gold)) < 10**6 else f"{int(gold):.15e}"


SAME: tuple[Maker, ...] = (
    dressed, other_fractions, spaced, sized, assigned, as_decimal, as_python, as_unicode, full_width, turned_sum,
    nothing_added, list_otherwise, as_inequality, with_unit, without_unit, words_set_otherwise, thousands, mixed,
    coloured, other_matrix, scientific,
)  # fmt: skip


def gold_answers(data_dir: Path, rng: random.Random) -> list[str]:
    """All that are no plain integers, and as many integers."""
    found: set[str] = set()
    for name in ("math500", "math35_train", "aime24", "aime25", "amc23"):
        rows = (data_dir / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        found |= {answer for row in rows if (answer := json.loads(row)["answer"].strip())}
    integers = sorted(answer for answer in found if INTEGER.fullmatch(answer))
    others = sorted(answer.rstrip(".") for answer in found.difference(integers, ["None"]))
    return [*others, *rng.sample(integers, min(len(others), len(integers)))]


def made(golds: list[str], makers: Iterable[Maker], each: int, rng: random.Random) -> list[tuple[str, str, str]]:
    """``(kind, answer, gold)``, none twice."""
    found: dict[tuple[str, str], str] = {}
    for gold in golds:
        for maker in makers:
            for _ in range(each):
                answer = maker(gold, rng.choice(golds), rng)
                if answer is not None and answer.strip() != gold and (answer, gold) not in LOOKED_AT:
                    found.setdefault((answer, gold), maker.__name__)
    return [(kind, answer, gold) for (answer, gold), kind in found.items()]


async def graded(cases: list[tuple[str, str, str]], workers: int) -> list[Verdict]:
    """Every case's verdict."""
    grader = Grader(GraderSettings(workers=workers))
    slots = asyncio.Semaphore(256)

    async def one(answer: str, gold: str) -> Verdict:
        async with slots:
            return await grader.grade(answer, gold)

    try:
        return await asyncio.gather(*(one(answer, gold) for _, answer, gold in cases))
    finally:
        await grader.close()


def report(title: str, cases: list[tuple[str, str, str]], verdicts: list[Verdict], *, correct: bool) -> None:
    """One line a kind, and every case that went wrong."""
    totals = Counter(kind for kind, _, _ in cases)
    missed = [
        (case, verdict)
        for case, verdict in zip(cases, verdicts, strict=True)
        if (verdict is Verdict.CORRECT) != correct
    ]
    bad = Counter(case[0] for case, _ in missed)
    for (kind, answer, gold), verdict in missed:
        print(f"{verdict.value}: {kind} {answer!r} for {gold!r}")
    print(f"\n| {title} | made | {'refused' if correct else 'accepted'} |\n|---|---:|---:|")
    for kind, count in totals.items():
        print(f"| {kind.replace('_', ' ')} | {count} | {bad[kind]} |")
    slow = sum(verdict in (Verdict.ANSWER_TIMEOUT, Verdict.GRADER_TIMEOUT) for verdict in verdicts)
    print(f"| all | {len(cases)} | {len(missed)} |\n\n{slow} timeouts\n")


def main() -> None:
    """Print the cases that went wrong, and two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--each", type=int, default=3, help="tries of each kind on each gold answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    golds = gold_answers(Path(os.environ["AGENTRL_DATA_DIR"]), rng)
    begun = time.monotonic()
    for title, makers, correct in (("wrong neighbours", WRONG, False), ("respellings", SAME, True)):
        cases = made(golds, makers, arguments.each, rng)
        report(title, cases, asyncio.run(graded(cases, arguments.workers)), correct=correct)
    print(f"{len(golds)} gold answers, seed {arguments.seed}, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
