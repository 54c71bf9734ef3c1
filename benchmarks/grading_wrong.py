"""Wrong answers that resemble gold answers. Each is made from the text of the gold answer alone."""

from __future__ import annotations

import random
import re
from fractions import Fraction

from grading_texts import FRACTION, INTEGER, LETTERS, Maker, bracketed, pieces, plain

from agentrl_envs.grading.grader import is_plain_number


def another_digit(gold: str, other: str, rng: random.Random) -> str | None:
    places = [match.start() for match in re.finditer(r"\d", gold)]
    if not places:
        return None
    place = rng.choice(places)
    return gold[:place] + rng.choice([digit for digit in "123456789" if digit != gold[place]]) + gold[place + 1 :]


def digit_lost(gold: str, other: str, rng: random.Random) -> str | None:
    places = [match.start() for match in re.finditer(r"(?<=[1-9])\d|(?<!\d)[1-9](?=[1-9])", gold)]
    if "." in gold or ":" in gold or "approx" in gold:  # a zero after a point may not change the value
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
