"""Respellings of gold answers. Each is made from the text of the answer alone."""

from __future__ import annotations

import random
import re
from fractions import Fraction

from grading_texts import FRACTION, INTEGER, Maker, bracketed, pieces, plain

from agentrl_envs.grading.grader import is_plain_number


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
    """Respell roots, fractions and powers of integers as Python."""
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
