"""Formulas in a text as MathML, which browsers render without network access."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import lru_cache
from xml.etree.ElementTree import Element

FORMULA = re.compile(r"\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$([^$\n]+)\$")
"""TeX between ``$$``, ``\\[``, ``\\(`` or ``$``. The report's script searches for the same delimiters."""

_FENCE = re.compile(r"```[^\n`]*\n[\s\S]*?(?:\n {0,3}```|$)")
_LONGEST = 1000  # maximum length of a formula in characters


def formulas_of(texts: Iterable[str]) -> dict[str, list[object]]:
    """Return TeX -> tree for each formula outside code fences. Formulas that cannot be parsed are left out.

    >>> formulas_of(["Add $x$ to $x$."])
    {'x': ['math', {}, ['mrow', {}, ['mi', {}, 'x']]]}
    """
    trees = {}
    for text in texts:
        for match in FORMULA.finditer(_FENCE.sub("\n", text)):
            tex = next(part for part in match.groups() if part is not None).strip()
            tree = _tree_of(tex)
            if tree is not None:
                trees[tex] = tree
    return trees


@lru_cache(maxsize=65_536)
def _tree_of(tex: str) -> list[object] | None:
    from latex2mathml.converter import convert_to_element

    if not tex or len(tex) > _LONGEST:
        return None
    try:
        return _tree(convert_to_element(tex))
    except Exception:  # noqa: BLE001  # for text of a model, the library raises many kinds of errors, also IndexError
        return None


def _tree(element: Element) -> list[object]:
    """``[tag, attributes, children ...]``; a child is text or a tree."""
    attributes = {name: value for name, value in element.attrib.items() if name not in ("xmlns", "display")}
    children: list[object] = [html.unescape(element.text)] if element.text else []  # the library returns entities
    return [element.tag, attributes, *children, *map(_tree, element)]
