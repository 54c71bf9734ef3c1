r"""Words behind a number: units and things counted, which an answer may add or leave out, and words that change it.

>>> split_words(r"12\text{ cm}^2"), split_words("8 hours"), split_words("5 pi")
(('12', 'cm^2'), ('8', 'hour'), None)
>>> split_words(r"5\text{ factorial}") is None, split_words(r"5\text{ is wrong, it is 6}") is None
(True, True)
"""

from __future__ import annotations

import re

_SPELLINGS = """
    mm,millimeter,millimetre; cm,centimeter,centimetre; m,meter,metre; km,kilometer,kilometre;
    in,inch,inche; ft,foot,feet; yd,yard; mi,mile;
    g,gram,gm; kg,kilogram; mg,milligram; lb,pound,lbs; oz,ounce; ton;
    s,sec,second; min,minute,mins; hour,h,hr,hrs; day; week; month; year,yr,yrs; am; pm;
    mph,miles per hour,mile per hour,mi/h; km/h,kph,kmh,kmph,kilometers per hour; m/s,meters per second;
    degree,deg; radian,rad; dollar,usd; cent; euro;
    liter,litre,l; ml,milliliter,millilitre; gallon,gal; acre; unit
"""  # of a unit, the one that is kept first
_UNITS = [unit.strip().split(",") for unit in _SPELLINGS.split(";")]
_KNOWN = {spelling: unit[0] for unit in _UNITS for spelling in unit}
_NAMES = frozenset(_KNOWN.values())
_CHANGING_WORDS = """
    hundred thousand million billion trillion dozen score half halve third fourth fifth sixth seventh eighth ninth tenth
    quarter squared cubed factorial pi root least most more less fewer greater larger smaller about nearly not no never
    to is are was be it wrong or and plus minus times over divided multiplied by mod modulo infinity negative maybe
    perhaps possibly approximately approx almost around roughly between through until below above under than then if
    when where but equal except without exp log ln sin cos tan sqrt base power raised one two three four five six seven
    eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety zero answer percent pct
    percentage inclusive exclusive remainder
"""
_NOTHING = frozenset({"none", "nan", "null", "undefined", "unknown", "error", "true", "false", "left", "right"})
_CHANGES = frozenset(_CHANGING_WORDS.split())
_LETTER_UNITS = frozenset("msghl")
_STYLE = r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathit|mathbf)\s*\{([^{}]*)\}"
_POWER = r"\s*(?:\^\s*\{?\s*([23])\s*\}?)?"
_STYLED = re.compile(rf"(?P<rest>.*?[\w}})|\]!%])\s*(?P<words>{_STYLE}(?:\s*{_STYLE})*){_POWER}\s*", re.DOTALL)
_PLAIN = re.compile(rf"(?P<rest>(?:.*[\d}})%])?)\s*(?<![A-Za-z\\])(?P<words>[A-Za-z][A-Za-z./ -]+){_POWER}", re.DOTALL)
_DOLLARS = re.compile(r"(?P<sign>[+-]?)\s*\\?\$\s*(?P<rest>[^$]*)|(?P<before>[^$]*?)\s*\\?\$")
_DEGREES = re.compile(r"(?P<rest>.*[\d})])\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})(?:\s*[CF])?", re.DOTALL)
_COUNTED = re.compile(r"(?:[-+\d.,/]+|-?\\frac *(?:\{\d+\}\{\d+\}|\d\d)) [a-z]{4,}(?: [a-z]+)*")  # 12 apples
_INSIDE = re.compile(_STYLE)
_WORD = re.compile(r"[a-z]+")


def split_words(text: str) -> tuple[str, str] | None:
    """What stands before the words at the end, and the unit they name in one spelling; None where they name none."""
    dollars = _DOLLARS.fullmatch(text)
    if dollars is not None:
        return (f"{dollars['sign'] or ''}{dollars['rest'] or dollars['before'] or ''}", "dollar")
    degrees = _DEGREES.fullmatch(text)
    if degrees is not None and "\\" not in text.replace(r"\circ", "").replace(r"\frac", ""):
        return (degrees["rest"], "degree")
    for pattern in (_STYLED, _PLAIN):
        match = pattern.fullmatch(text)
        if match is not None and match["rest"]:
            words = " ".join(_INSIDE.findall(match["words"])) if pattern is _STYLED else match["words"]
            unit = unit_of(words, match[match.re.groups])
            if pattern is _PLAIN and unit is not None and _base(unit) not in _NAMES and not _COUNTED.fullmatch(text):
                return None
            return None if unit is None else (match["rest"].strip(), unit)
    return None


def split_letter(text: str) -> str | None:
    """What stands before a single letter that may be a unit: ``5m``."""
    match = re.fullmatch(r"(.*\d)\s*([A-Za-z])", text)
    return match[1] if match is not None and match[2] in _LETTER_UNITS else None


def agree(answer: str | None, gold: str | None) -> bool:
    """Whether two units may be the same: either may be left out, and words that nobody knows are things counted."""
    if answer is None or gold is None or answer == gold or "unit" in (_base(answer), _base(gold)):
        return True
    return _base(answer) not in _NAMES or _base(gold) not in _NAMES


def _base(unit: str) -> str:
    return unit.partition("^")[0]


def unit_of(words: str, power: str | None = None) -> str | None:
    """The unit or thing that words name, in one spelling; None where they say more than that."""
    plain = " ".join(words.lower().replace(".", "").replace("~", " ").split())
    for prefix, exponent in (("square ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if plain.startswith(prefix):
            plain, power = plain.removeprefix(prefix), exponent
    if not plain or not re.fullmatch(r"[a-z]+(?:[ /-][a-z]+){0,3}", plain):
        return None
    singular = plain if plain in _KNOWN else plain.removesuffix("s")
    named = _KNOWN.get(singular)
    if named is None:
        if plain in _NOTHING:
            return None
        found = _WORD.findall(plain)
        if any(word in _CHANGES or word.removesuffix("s") in _CHANGES or len(word) < 2 for word in found):
            return None
        named = plain
    return f"{named}^{power}" if power else named
