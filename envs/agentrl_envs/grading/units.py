r"""Words next to a number: units and their conversions, counted things, and words that change the number.

>>> split_unit_words(r"12\text{ cm}^2")[1].dimension, split_unit_words("8 hours")[1].factor, split_unit_words("5 pi")
((('m', 2),), Fraction(3600, 1), None)
>>> split_unit_words(r"5\text{ factorial}") is None, split_unit_words(r"5\text{ is wrong, it is 6}") is None
(True, True)
>>> (_, short), (_, long) = split_unit_words("50 mm"), split_unit_words("5cm")
>>> conversion_factor(long, short), conversion_factor(long, None)
(Fraction(1, 10), Fraction(1, 1))
>>> number_from_words("one hundred and three"), number_from_words("two thirds"), number_from_words("evelyn")
(Fraction(103, 1), Fraction(2, 3), None)
>>> split_scaling_word("5 million"), split_scaling_word(r"5\text{ hundredths}"), split_scaling_word("5 miles")
(('5', Fraction(1000000, 1)), ('5', Fraction(1, 100)), None)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

# Numbers in words --------------------------------------------------------------------------------------------------

_NUMBERS_BELOW_TWENTY = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
"""
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBER_WORDS = {name: value for value, name in enumerate(_NUMBERS_BELOW_TWENTY.split())}
_NUMBER_WORDS |= {name: 10 * value for value, name in enumerate(_TENS.split()) if name != "_"}
_SCALES_OF_THOUSANDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALING_WORDS = _SCALES_OF_THOUSANDS | {
    "ten": 10, "dozen": 12, "hundred": 100, "grand": 10**3, "lakh": 10**5, "crore": 10**7,
    "mil": 10**6, "mn": 10**6, "mln": 10**6, "bn": 10**9, "bln": 10**9, "tn": 10**12, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SCALING_SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}  # only in upright type, directly after the digits
_FRACTION_WORDS = {"half": 2, "halve": 2, "quarter": 4, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12}
_SCALED_NUMBER = re.compile(
    r"(?P<rest>.*\d)(?:(?P<suffix>\\(?:text|mathrm)\s*\{[kKMB]\})"
    r"|\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?P<scale>[a-z][a-z-]+|[万亿])(?:\s*\})?)",
    re.DOTALL,
)


def number_from_words(words: str) -> Fraction | None:
    """Return the number that the words spell, or None."""
    *others, last = re.split(r"[\s-]+", words.strip().casefold())
    parts = _denominator_of_word(last)
    if parts is not None and others and (last.endswith("s") or others in (["one"], ["a"])):
        count = Fraction(1) if others == ["a"] else number_from_words(" ".join(others))
        return None if count is None else count / parts
    total = part = 0
    any_number = False
    for word in [*others, last]:
        if word in _NUMBER_WORDS:
            part, any_number = part + _NUMBER_WORDS[word], True
        elif word == "hundred" and part:
            part *= 100
        elif word in _SCALES_OF_THOUSANDS and part:
            total, part = total + part * _SCALES_OF_THOUSANDS[word], 0
        elif word != "and" or not any_number:
            return None
    return Fraction(total + part) if any_number else None


def split_scaling_word(text: str) -> tuple[str, Fraction] | None:
    """Split a scaling word (``million``, ``tenths``, ``k``) off the end. Returns the rest and the factor, or None."""
    match = _SCALED_NUMBER.fullmatch(text)
    if match is None:
        return None
    if match["suffix"]:
        return match["rest"], Fraction(_SCALING_SUFFIXES[match["suffix"][-2]])
    scale = match["scale"]
    factor = _SCALING_WORDS.get(scale) or _SCALING_WORDS.get(scale.removesuffix("s"))
    parts = None if factor else _denominator_of_word(scale)
    return (match["rest"], Fraction(factor) if factor else Fraction(1, parts)) if factor or parts else None


def _denominator_of_word(word: str) -> int | None:
    """Return the denominator of a fraction word: 10 for ``tenths``, 10,000 for ``ten-thousandth``."""
    singular = word.removesuffix("s")
    if singular in _FRACTION_WORDS or not singular.endswith("th"):
        return _FRACTION_WORDS.get(singular)
    cardinal = re.sub(r"ie$", "y", singular.removesuffix("th"))
    if cardinal in ("hundred", *_SCALES_OF_THOUSANDS):
        cardinal = f"one {cardinal}"
    value = number_from_words(cardinal)
    return None if value is None else int(value)


# Units -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """A known unit with its size in base units, or a counted thing without a size (``apples``)."""

    name: str
    factor: Fraction | None = None
    dimension: tuple[tuple[str, int], ...] = ()


# An entry lists a unit's symbols and names, then its size in preceding units. Entries without a size are base units.
_UNIT_TABLE = """
    m meter metre 米; g gram gm 克; s sec second 秒; A amp ampere; mol mole; month 个月; °; dollar usd USD; euro eur;
    yuan 元; pound-sterling; yen; rad radian; ton tonne 吨; celsius; fahrenheit; unit
    L liter litre l 升 = 1/1000 m^3; h hr hour 小时 = 3600 s; min minute 分钟 = 60 s; day 天 = 24 h; week 周 = 7 day
    year yr 年 = 12 month; N newton = 1000 g m/s^2; J joule = 1 N m; W watt = 1 J/s; Pa pascal = 1 N/m^2
    C coulomb = 1 A s; V volt = 1 W/A; Hz hertz = 1 s^-1; eV electronvolt = 801088317/5000000000000000000000000000 J
    in inch inche = 127/5000 m; ft foot feet = 12 in; yd yard = 3 ft; mi mile = 5280 ft; lb pound = 45359237/100000 g
    oz ounce = 1/16 lb; gal gallon = 231 in^3; qt quart = 1/4 gal; pint = 1/8 gal; acre = 43560 ft^2
    ha hectare 公顷 = 10000 m^2; cent ¢ = 1/100 dollar; mph = 1 mi/h; kph kmh kmph = 5/18 m/s
    公里 = 1000 m; 公斤 = 1000 g
"""
_PREFIXES: dict[str, Fraction | int] = {
    "giga G": 10**9, "mega M": 10**6, "kilo k 千": 10**3, "deci d 分": Fraction(1, 10), "centi c 厘": Fraction(1, 100),
    "milli m 毫": Fraction(1, 10**3), "micro u": Fraction(1, 10**6), "nano n": Fraction(1, 10**9),
}  # fmt: skip
_UNITS_WITH_PREFIXES = (
    "m meter metre 米 g gram 克 s second L liter litre l 升 N J joule W watt Pa V Hz hertz eV A mol C"
)
_KNOWN_UNITS: dict[str, Unit] = {}
_NUMBER_CHANGING_WORD_LIST = """
    score factorial pi root least most more less fewer greater larger smaller about nearly not no never to is are was be
    it wrong or and plus minus times over divided multiplied by mod modulo infinity negative maybe perhaps possibly
    approximately approx almost around roughly between through until below above under than then if when where but equal
    except without exp log ln sin cos tan sqrt base power raised squared cubed answer percent pct percentage inclusive
    exclusive remainder
"""
_NUMBER_CHANGING_WORDS = frozenset(_NUMBER_CHANGING_WORD_LIST.split())
_NUMBER_CHANGING_CHINESE = frozenset(
    "零一二三四五六七八九十百千万亿倍半不非没约多少余以上下几分之或至到负点又和左右等于"
)
_NOT_COUNTABLE = frozenset({"none", "nan", "null", "undefined", "unknown", "error", "true", "false", "left", "right"})
_LETTER_UNITS = frozenset("msghl")
_TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathit|mathbf)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
_POWER = r"\s*(?:\^\s*\{?\s*-?\d\s*\}?)?"
_NUMBER_AND_TEXT_COMMANDS = re.compile(
    rf"(?P<rest>.*?[\w}})|\]!%])\s*(?P<words>{_TEXT_COMMAND}{_POWER}(?:(?:\s|\\cdot|/)*{_TEXT_COMMAND}{_POWER})*)\s*",
    re.DOTALL,
)
_NUMBER_AND_PLAIN_WORDS = re.compile(
    rf"(?P<rest>(?:.*[\d}})%])?)\s*(?<![A-Za-z\\])(?P<words>[A-Za-z][A-Za-z./ -]+{_POWER}|[\u4e00-\u9fff/]+)", re.DOTALL
)
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound-sterling", "¥": "yen"}
_CURRENCY = re.compile(r"(?P<sign>[+-]?)\s*\\?([$€£¥])\s*(?P<rest>[^$€£¥]*)|(?P<before>[^$€£¥]*?)\s*\\?([$€£¥])")
_DEGREES = re.compile(
    r"(?P<rest>.*[\d})])\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?P<scale>[CF]?)(?:\s*\})?",
    re.DOTALL,
)
_COUNTED_THING = re.compile(  # 12 apples
    r"(?:[-+\d.,/]+|-?\\frac *(?:\{\d+\}\{\d+\}|\d\d)) [a-z]{4,}(?: [a-z]+)*"
)
_NUMBER_AND_UNIT = re.compile(r"(\d[\d.]*) ?([A-Za-z]+)(?: and |, | |$)")


def split_unit_words(text: str) -> tuple[str, Unit] | None:
    """Split a unit or counted noun from a text. Returns the rest and the unit, or None."""
    currency = _CURRENCY.fullmatch(text)
    if currency is not None:
        name = _CURRENCIES[currency[2] or currency[5]]
        return (f"{currency['sign'] or ''}{currency['rest'] or currency['before'] or ''}", _KNOWN_UNITS[name])
    degrees = _DEGREES.fullmatch(text)
    if degrees is not None and "\\" not in text.replace(r"\circ", "").replace(r"\frac", "").replace(r"\text", ""):
        return (degrees["rest"], _KNOWN_UNITS[{"C": "celsius", "F": "fahrenheit"}.get(degrees["scale"], "°")])
    for pattern in (_NUMBER_AND_TEXT_COMMANDS, _NUMBER_AND_PLAIN_WORDS):
        match = pattern.fullmatch(text)
        if match is not None and match["rest"]:
            unit = unit_from_words(re.sub(_TEXT_COMMAND, r" \1 ", match["words"]))
            if (
                pattern is _NUMBER_AND_PLAIN_WORDS
                and unit is not None
                and unit.factor is None
                and match["words"].isascii()
            ):
                return (match["rest"].strip(), unit) if _COUNTED_THING.fullmatch(text) else None
            return None if unit is None else (match["rest"].strip(), unit)
    return None


def split_unit_letter(text: str) -> tuple[str, Unit] | None:
    """Split off a single last letter that may be a unit (``5m``). Returns the rest and the unit, or None."""
    match = re.fullmatch(r"(.*\d)\s*([A-Za-z])", text)
    return (match[1], _KNOWN_UNITS[match[2]]) if match is not None and match[2] in _LETTER_UNITS else None


def split_quantities(text: str) -> tuple[list[tuple[str, Fraction]], Unit] | None:
    """Split a quantity that is given in several units, such as ``5 ft 6 in``.

    Returns (number, size of its unit in the first unit) for each part, and the first unit. Returns None unless all
    units have one dimension and descending sizes.
    """
    plain = " ".join(re.sub(_TEXT_COMMAND, r" \1 ", text).split())
    pairs = _NUMBER_AND_UNIT.findall(plain)
    if len(pairs) < 2 or "".join(_NUMBER_AND_UNIT.split(plain)[::3]):
        return None
    units = [unit_from_words(name) for _, name in pairs]
    first, sizes = units[0], [unit.factor for unit in units if unit is not None and unit.factor is not None]
    if first is None or len(sizes) < len(units) or len({unit.dimension for unit in units if unit is not None}) > 1:
        return None
    falling = all(larger > smaller for larger, smaller in pairwise(sizes))
    return ([(pairs[index][0], size / sizes[0]) for index, size in enumerate(sizes)], first) if falling else None


def conversion_factor(answer: Unit | None, reference: Unit | None) -> Fraction | None:
    """Return the factor that converts the reference answer's unit to the answer's unit.

    Returns 1 if either unit is missing, and None if the units do not match.
    """
    if answer is None or reference is None or answer.factor is None or reference.factor is None or answer == reference:
        return Fraction(1)
    bases = {base for unit in (answer, reference) for base, _ in unit.dimension}
    if "unit" in bases or bases in (
        {"°", "celsius"},
        {"°", "fahrenheit"},
    ):  # an unspecific unit: "square units", or degrees without a scale
        return Fraction(1)
    return reference.factor / answer.factor if answer.dimension == reference.dimension else None


@lru_cache(maxsize=4096)
def unit_from_words(words: str) -> Unit | None:
    """Return the unit or counted thing that the words name, or None if the words contain anything else."""
    plain = " ".join(words.replace("~", " ").replace(".", " ").replace(r"\cdot", " ").split())
    plain = re.sub(r" ?\^ ?", "^", plain)
    return _unit_product(plain) or _parse_counted_thing(plain.lower())


def _unit_product(words: str) -> Unit | None:
    """Return a product of known units: ``m/s^2``, ``kg m per second squared``, ``square feet``, ``平方米``."""
    factor, dimension = Fraction(1), dict[str, int]()
    named = re.sub(r"\s*[{}]\s*", "", words).replace("平方", "square ").replace("立方", "cubic ")
    for side_number, side in enumerate(re.split(r"\s*/\s*|\s+per\s+", named)):
        before, units = 1, list[tuple[Unit, int]]()
        for word in re.sub(r"(?<=[a-z])-", " ", side).split():
            name, _, power = word.partition("^")
            if word in ("square", "sq", "cubic", "cu"):
                before = 2 if word.startswith("sq") else 3
            elif word in ("squared", "cubed") and units:
                units[-1] = (units[-1][0], 2 if word == "squared" else 3)
            elif (unit := _known_unit(name)) is not None and re.fullmatch(r"-?\d|", power):
                units.append((unit, int(power or before)))
                before = 1
            else:
                return None
        if not units:
            return None
        for unit, power_of in units:
            exponent = -power_of if side_number else power_of
            assert unit.factor is not None
            factor *= unit.factor**exponent
            for base, count in unit.dimension:
                dimension[base] = dimension.get(base, 0) + count * exponent
    powers = tuple(sorted((base, count) for base, count in dimension.items() if count))
    return Unit(words, factor, powers)


def _known_unit(name: str) -> Unit | None:
    """Return a known unit, or None. Case matters only for symbols that differ in case (``mW``, ``MW``)."""
    lower = name.lower() if len(name) > 1 else name
    return _KNOWN_UNITS.get(name) or _KNOWN_UNITS.get(lower) or _KNOWN_UNITS.get(lower.removesuffix("s") or name)


def _parse_counted_thing(plain: str) -> Unit | None:
    if re.fullmatch(r"[\u4e00-\u9fff]{1,6}", plain):
        return None if _NUMBER_CHANGING_CHINESE & set(plain) else Unit(plain)
    if not re.fullmatch(r"[a-z]+(?:[ /-][a-z]+){0,3}(?:\^[23])?", plain) or plain in _NOT_COUNTABLE:
        return None
    return None if any(map(_may_change_number, re.findall(r"[a-z]+", plain))) else Unit(plain)


def _may_change_number(word: str) -> bool:
    """Return True if a word may change the number before it."""
    singular = word.removesuffix("s")
    if len(word) < 2 or not _NUMBER_CHANGING_WORDS.isdisjoint((word, singular)) or singular in _SCALING_WORDS:
        return True
    return word in _SCALING_WORDS or singular in _NUMBER_WORDS or _denominator_of_word(word) is not None


def _fill_known_units() -> None:
    for line in re.split(r"[;\n]", _UNIT_TABLE):
        names, _, size = line.partition("=")
        if not names.strip():
            continue
        number, _, of = size.strip().partition(" ")
        unit = _unit_product(of) if of else None
        base = names.split()[0]
        for name in names.split():
            factor = Fraction(number) * (unit.factor or 1) if unit is not None else Fraction(1)
            _KNOWN_UNITS[name] = Unit(base, factor, unit.dimension if unit is not None else ((base, 1),))
            for prefixes, multiple in _PREFIXES.items() if name in _UNITS_WITH_PREFIXES.split() else ():
                for prefix in prefixes.split():
                    if (len(prefix) > 2) == (len(name) > 3) or (not name.isascii() and not prefix.isascii()):
                        _KNOWN_UNITS.setdefault(
                            prefix + name, Unit(prefix + base, factor * multiple, _KNOWN_UNITS[name].dimension)
                        )


_fill_known_units()
