"""math-verify's reading of LaTeX, of the whole text or not at all, in half of its time. Slow to import.

``math_verify.parse`` searches a text for something readable; here the text is the answer. Its parser spends most of its
time on lookahead with full context, which ANTLR needs only where the cheaper one fails: a parse that succeeds with the
cheaper one is the same (``PredictionMode.SLL``). The classes used are math-verify 0.9's and are not its public face.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy2
from math_verify import LatexExtractionConfig
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq

_NORMAL = LatexExtractionConfig().normalization_config
_COMMANDS = r"\\(?:text(?:bf|it|rm|normal)?|mbox|math(?:bf|it|rm))\s*\{[^{}]*\}"
_WORDS = re.compile(_COMMANDS)
_ONLY_WORDS = re.compile(rf"(?:{_COMMANDS}|\s|\^\{{?\d\}}?|\{{\^\d\}})*")
_OPERATOR = re.compile(r"[-+*=<>]")
_WITHOUT_UNITS = replace(_NORMAL, units=False)


def read_latex(text: str, *, units: bool = True) -> Any | None:
    """The SymPy object that the text writes in LaTeX, or None.

    Units are dropped; where that leaves nothing readable, the last letter was none (``sin t`` has no tons). Without
    ``units`` there are none.
    """
    plain = latex2sympy2.normalize_latex(text, config=_WITHOUT_UNITS)
    bare = latex2sympy2.normalize_latex(text, config=_NORMAL)
    read = _read(bare) if units and not _goes_on(text) and not _OPERATOR.search(_dropped(plain, bare)) else None
    return _read(plain) if read is None else read


def _goes_on(text: str) -> bool:
    """Whether more than words stand behind words: math-verify drops all of it as one unit (``5\\text{ m}+{x}``)."""
    words = _WORDS.search(text)
    return words is not None and _ONLY_WORDS.fullmatch(text, words.end()) is None


def _dropped(plain: str, bare: str) -> str:
    """What was taken for a unit, but for words: by accident also terms (`` b + c``)."""
    return _WORDS.sub("", plain[len(bare) :]) if plain.startswith(bare) else ""


def _read(text: str) -> Any | None:
    read = _parsed(text)
    if read is None:
        last = get_last_eq(text)  # of a = b = c
        read = _parsed(last) if last != text else None
    return read


def _parsed(text: str) -> Any | None:
    try:
        return _Reader(is_real=not should_treat_as_complex(text), convert_degrees=False).parse(text)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  (the parser's own errors are plain exceptions)
        return None


class _TwoStageParser(latex2sympy2.PSParser):
    """Parses with the cheap lookahead, and once more with the full one where that fails."""

    def math(self) -> Any:
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001  (as above; the second look decides)
            self.reset()
            self._interp.predictionMode = PredictionMode.LL
            return super().math()


class _Reader(latex2sympy2._Latex2Sympy):
    def create_parser(self, text: str) -> Any:
        tokens = super().create_parser(text).getTokenStream()
        # An unknown command or sign is no reading. It raises here, all of the text at once: raised in the middle of a
        # parse it would be taken for a parse that failed, and the second one would go on behind it.
        tokens.fill()
        two_stage = _TwoStageParser(tokens)
        two_stage.removeErrorListeners()
        two_stage.addErrorListener(self.MathErrorListener(text))
        return two_stage
