r"""What values do not decide, by math-verify: integrals, limits, sets that are written by other operations.

Slow to import and to run. ``math_verify.parse`` searches a text for something readable; here the text is the answer,
and all of it must be read. Its parser spends most of its time on lookahead with full context, which ANTLR needs only
where the cheaper one fails: a parse that succeeds with the cheaper one is the same (``PredictionMode.SLL``). The
classes used are math-verify 0.9's and are not its public face.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy2
from math_verify import LatexExtractionConfig, verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq
from sympy import Basic

_NORMAL = replace(LatexExtractionConfig().normalization_config, units=False)
_CONVERSION = latex2sympy2.ConversionConfig(lowercase_symbols=False)
_NEEDED = re.compile(
    r"\\(?:i*int|lim|cap|setminus|backslash|mathbb|ne|neq|notin|Gamma|partial|sum|prod|det|le|leq|ge|geq)(?![A-Za-z])|[<>|]"
)
_DROPPED = re.compile(
    r"['\"$]|\\[lc]?dots|\\text|\\mbox|\\x1e|\\x1f|\\approx|[A-Z]{2}|\d\s+\d"
)  # by math-verify, in silence


def same_by_algebra(answer: str, gold: str) -> bool:
    """Whether math-verify finds two respelled texts equal, of which one needs it."""
    if not (is_for_algebra(answer) or is_for_algebra(gold)):
        return False
    wanted, said = read_latex(gold), read_latex(answer)
    if wanted is None or said is None:
        return False
    return bool(verify(wanted, said, timeout_seconds=None, allow_set_relation_comp=True))


def is_for_algebra(text: str) -> bool:
    """Whether it holds what values do not decide."""
    return _NEEDED.search(text) is not None


@lru_cache(maxsize=512)
def read_latex(text: str) -> Basic | None:
    """The SymPy object that the text writes in LaTeX, or None."""
    return None if _DROPPED.search(text) else _read(latex2sympy2.normalize_latex(text, config=_NORMAL))


def _read(text: str) -> Basic | None:
    read = _parsed(text)
    if read is None:
        last = get_last_eq(text)  # of a = b = c
        read = _parsed(last) if last != text else None
    return read


def _parsed(text: str) -> Basic | None:
    try:
        return _LatexReader(is_real=not should_treat_as_complex(text), convert_degrees=False, config=_CONVERSION).parse(
            text
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  (the parser's own errors are plain exceptions)
        return None


class _TwoStageParser(latex2sympy2.PSParser):
    """Parses with the cheap lookahead, and once more with the full one where that fails."""

    def math(self) -> object:
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001  (as above; the second look decides)
            self.reset()
            self._interp.predictionMode = PredictionMode.LL
            return super().math()


class _LatexReader(latex2sympy2._Latex2Sympy):
    def create_parser(self, text: str) -> object:
        tokens = super().create_parser(text).getTokenStream()
        # An unknown command or sign is no reading. It raises here, all of the text at once: raised in the middle of a
        # parse it would be taken for a parse that failed, and the second one would go on behind it.
        tokens.fill()
        two_stage = _TwoStageParser(tokens)
        two_stage.removeErrorListeners()
        two_stage.addErrorListener(self.MathErrorListener(text))
        return two_stage
