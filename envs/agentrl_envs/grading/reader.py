r"""Parser of expressions in LaTeX or plain notation. The whole text must be valid.

>>> read_expression(r"\frac12") == read_expression("1/2")
True
>>> read_expression("2 pi r**2 - sqrt(A)") == read_expression(r"2\pi r^2-\sqrt{A}")
True
>>> read_expression("17 0")
Traceback (most recent call last):
agentrl_envs.grading.reader.UnreadableError: a number next to a factor

Adjacent factors bind more tightly than a division sign: ``1/2x`` is ``1/(2x)``. Adjacent numbers are not a product. An
integer before a proper fraction is a mixed number. ``i`` is the imaginary unit unless it is the index of a sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from agentrl_envs.grading.expressions import Expression, FunctionCall, Number, Symbol, divide

_WORDS = {  # names in plain notation, with their LaTeX commands
    "pi": r"\pi", "oo": r"\infty", "inf": r"\infty", "infinity": r"\infty", "ln": r"\ln", "log": r"\ln",
    "abs": r"\abs", "Abs": r"\abs", "asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan",
    "ceiling": r"\ceil", "Fraction": r"\Rational",
}  # fmt: skip
_SAME = "sqrt cbrt root Rational Integer Float exp sin cos tan sec csc cot sinh cosh tanh binomial factorial floor ceil"
_WORDS |= {name: f"\\{name}" for name in (*_SAME.split(), "arcsin", "arccos", "arctan", "gcd", "lcm", "max", "min")}
# Scientific notation, except 2e+1, 3e-4 and the like, which are multiples of Euler's number.
_SCIENTIFIC = r"(?:\d*\.\d+[eE][-+]?\d+|1[eE][-+]?\d+|\d+[eE](?:\d+|[-+]\d{2,}))(?![\d.])"
_PATTERN = re.compile(
    r"(?P<blank>\s+)"
    rf"|(?P<number>{_SCIENTIFIC}|"
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+\.\d+|\d+|\.\d+)"
    rf"|(?P<word>(?<![A-Za-z\\])(?:{'|'.join(sorted(_WORDS, key=len, reverse=True))})(?![A-Za-z]))"
    r"|(?P<command>\\[A-Za-z]+|\\[%{}|\\])"
    r"|(?P<name>[A-Z]{2,}|[A-Za-z])"
    r"|(?P<sign>\*\*|[-+*/^_()\[\]{}|!',=&%:])",
    re.ASCII,
)
_Kind = Literal["number", "command", "name", "sign", "end"]


class UnreadableError(Exception):
    """The text is not in a supported notation."""


@dataclass(frozen=True, slots=True)
class _Token:
    """A token. ``spaced`` is true if a blank precedes the token."""

    kind: _Kind
    text: str
    spaced: bool = False


_END = _Token("end", "")


def _commands(names: str) -> frozenset[str]:
    return frozenset(f"\\{name}" for name in names.split())


_FUNCTIONS = _commands(
    "sin cos tan sec csc cot arcsin arccos arctan arcsec arccsc arccot sinh cosh tanh exp ln lg log det"
)
_CALLS = {  # functions and their number of arguments; 0 for any number
    r"\abs": 1, r"\Integer": 1, r"\Float": 1, r"\factorial": 1, r"\floor": 1, r"\ceil": 1, r"\cbrt": 1,
    r"\Rational": 2, r"\root": 2, r"\binomial": 2, r"\gcd": 0, r"\lcm": 0, r"\max": 0, r"\min": 0,
}  # fmt: skip
_GREEK = _commands(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
_FIGURES = _commands("angle triangle odot widehat parallel")
_ACCENTS = _commands("vec bar hat tilde overline overrightarrow mathbf mathbb mathcal boldsymbol widetilde")
_TIMES = _commands("cdot times ast") | {"*"}
_OVER = frozenset({"/", r"\div", ":"})
_MODULO = _commands("bmod mod")
_BEHIND_FACTORS = _TIMES | _OVER | _MODULO | _commands(r"over choose rfloor rceil rvert end \ }")
_MATRICES = frozenset({"pmatrix", "bmatrix", "matrix", "Bmatrix", "array"})
_FUNCTION_NAMES = frozenset("fghFGHP")
_EXPONENT_DIGITS = 5  # maximum length of an exponent in scientific notation, including its sign
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def read_expression(text: str) -> Expression:
    """Parse the whole text as one expression. Raises UnreadableError."""
    try:
        reader = _Reader(_tokens_of(text))
        tree = reader.sum_or_fraction()
        reader.expect_end()
    except RecursionError as error:
        raise UnreadableError("too deep") from error
    return tree


def _tokens_of(text: str) -> list[_Token]:
    """Split the whole text into tokens. Adjacent capitals are one name, so ``HHT`` differs from ``THH``."""
    found: list[_Token] = []
    place, spaced = 0, False
    while place < len(text):
        match = _PATTERN.match(text, place)
        if match is None:
            raise UnreadableError(repr(text[place]))
        place = match.end()
        if match.lastgroup != "blank":
            found.append(_token(str(match.lastgroup), match.group(), spaced))
        spaced = match.lastgroup == "blank"
    return found


def _token(group: str, text: str, spaced: bool) -> _Token:
    match group:
        case "number":
            return _Token("number", text.replace(",", ""), spaced)
        case "word":
            return _Token("command", _WORDS[text], spaced)
        case "name":
            return _Token("name", text, spaced)
        case "command" if text != r"\%":
            return _Token("command", text, spaced)
    return _Token("sign", {"**": "^", r"\%": "%"}.get(text, text), spaced)


class _Reader:
    """Recursive-descent parser over the tokens."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._position = 0
        self._indices: list[str] = []
        self._bars = 0

    def expect_end(self) -> None:
        if self._next.kind != "end":
            raise UnreadableError(f"{self._next.text!r} at the end")

    def sum_or_fraction(self) -> Expression:
        r"""Parse a sum, or plain TeX's fraction (``\over``) or binomial (``\choose``) of two sums."""
        tree = self.sum()
        if self._taken(r"\over"):
            return divide(tree, self.sum())
        if self._taken(r"\choose"):
            return FunctionCall("binomial", (tree, self.sum()))
        return tree

    def sum(self) -> Expression:
        terms = [self._term()]
        while self._next.text in ("+", "-"):
            minus = self._take().text == "-"
            terms.append(_with_sign(self._term(), minus=minus))
        return terms[0] if len(terms) == 1 else FunctionCall("+", tuple(terms))

    def _term(self) -> Expression:
        factors = [self._signed()]
        while True:
            if self._taken(*_TIMES):
                factors.append(self._signed())
            elif self._taken(*_OVER):
                factors.append(FunctionCall("over", (self._signed(),)))
            elif self._taken(*_MODULO):
                factors = [FunctionCall("mod", (_product(factors), self._signed()))]
            else:
                return _product(factors)

    def _signed(self) -> Expression:
        minus = self._minus()
        return _with_sign(self._adjacent_factors(), minus=minus)

    def _minus(self) -> bool:
        """Consume the following signs. Returns True if their product is a minus."""
        minus = False
        while self._next.text in ("+", "-"):
            minus ^= self._take().text == "-"
        return minus

    def _adjacent_factors(self, *, stop_at_functions: bool = False) -> Expression:
        """Parse adjacent factors."""
        factors = [self._factor()]
        while self._starts_a_factor() and not (stop_at_functions and self._next.text in _FUNCTIONS):
            if self._next.kind == "number":
                raise UnreadableError("a number next to a factor")
            start = self._position
            before, factor = factors[-1], self._factor()
            ahead = (
                {token.text for token in self._tokens[start : self._position]}
                if self._tokens[start].text == "{"
                else ()
            )
            fraction = self._tokens[start].text == r"\frac" or r"\over" in ahead
            if fraction and len(factors) == 1 and _whole(before) and (share := _share(factor)) is not None:
                if share >= 1:
                    raise UnreadableError("neither a mixed number nor a product")
                factors = [FunctionCall("+", (before, factor))]
            else:
                factors.append(factor)
        tree = _product(factors)
        return FunctionCall("percent", (tree,)) if self._taken("%") else tree

    def _starts_a_factor(self) -> bool:
        token = self._next
        if token.kind in ("number", "name"):
            return True
        if token.kind == "command":
            return token.text not in _BEHIND_FACTORS
        return token.text in ("(", "[", "{") or (token.text == "|" and self._bars == 0)

    def _factor(self) -> Expression:
        """Parse an operand with its powers, factorials and degree signs."""
        tree = self._operand()
        while True:
            if self._taken("^"):
                tree = self._raised(tree)
            elif self._taken("!"):
                tree = FunctionCall("factorial", (tree,))
            else:
                return tree

    def _raised(self, base: Expression) -> Expression:
        if self._exponent_is(r"\circ"):
            return FunctionCall("degree", (base,))
        if self._exponent_is(r"\top"):
            return FunctionCall("transpose", (base,))
        return FunctionCall("^", (base, self._exponent()))

    def _exponent_is(self, command: str) -> bool:
        """Consume the exponent and return True if it is the single command ``command``."""
        ahead = [token.text for token in self._tokens[self._position : self._position + 3]]
        taken = 1 if ahead[:1] == [command] else 3 if ahead == ["{", command, "}"] else 0
        self._position += taken
        return taken > 0

    def _exponent(self) -> Expression:
        minus = self._minus()
        if self._next.kind == "name" and len(self._next.text) > 1:
            raise UnreadableError("several letters as an exponent")
        tree = self._operand()
        if self._taken("^"):
            tree = FunctionCall("^", (tree, self._exponent()))
        return _with_sign(tree, minus=minus)

    def _operand(self) -> Expression:
        token = self._take()
        match token.kind:
            case "number":
                return self._number(token)
            case "name":
                return self._name(token)
            case "command":
                return self._command(token)
        if token.text in _CLOSING:
            return self._group(_CLOSING[token.text])
        if token.text == "|":
            self._bars += 1
            tree = self.sum()
            self._bars -= 1
            self._expect("|")
            return FunctionCall("abs", (tree,))
        raise UnreadableError(f"{token.text!r} is not an operand")

    def _number(self, token: _Token) -> Expression:
        if self._next.text == "_":
            raise UnreadableError("a numeral with a base is not supported in an expression")
        mantissa, _, exponent = token.text.lower().partition("e")
        if len(exponent) > _EXPONENT_DIGITS:
            raise UnreadableError("a large exponent")
        whole, _, behind = mantissa.partition(".")
        digits = len((whole + behind).lstrip("0")) if behind else 0
        value = Number(Fraction(token.text), digits, digits if exponent else len(behind))
        if self._next.text == "j" and not self._next.spaced:
            self._take()
            return FunctionCall("*", (value, FunctionCall("i", ())))
        return value

    def _name(self, token: _Token) -> Expression:
        name = token.text
        if name in ("e", "i") and name not in self._indices and self._next.text not in ("_", "'"):
            return FunctionCall(name, ())
        if name == "I" and "*" in (self._next.text, self._before):
            return FunctionCall("i", ())
        return self._marked(name)

    def _marked(self, name: str) -> Expression:
        """Parse the subscript, the primes and the arguments, if any, of a name."""
        function = name in _FUNCTION_NAMES
        while self._next.text in ("_", "'"):
            name += f"_{{{self._raw()}}}" if self._take().text == "_" else "'"
        if function and self._next.text == "(":
            return FunctionCall(f"call {name}", self._arguments())
        return Symbol(name)

    def _raw(self) -> str:
        """Return the text of the next token or braced group."""
        token = self._take()
        if token.kind == "end":
            raise UnreadableError("an unexpected end")
        if token.text != "{":
            return token.text
        depth, said = 1, []
        while depth:
            token = self._take()
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            if token.kind == "end":
                raise UnreadableError("an unclosed brace")
            said.append(token.text)
        return "".join(said[:-1])

    def _group(self, closing: str) -> Expression:
        bars, self._bars = self._bars, 0
        tree = self.sum_or_fraction()
        self._bars = bars
        self._expect(closing)
        return tree

    def _arguments(self) -> tuple[Expression, ...]:
        self._expect("(")
        bars, self._bars = self._bars, 0
        found = self._separated(",")
        self._bars = bars
        self._expect(")")
        return found

    def _separated(self, separator: str) -> tuple[Expression, ...]:
        found = [self.sum()]
        while self._taken(separator):
            found.append(self.sum())
        return tuple(found)

    def _argument(self) -> Expression:
        """Parse the argument of a LaTeX command: a braced group, a digit, a letter, or another command."""
        if self._next.kind == "number" and len(self._next.text) > 1:
            raise UnreadableError("a number of several digits without braces")
        if self._next.kind == "name" and len(self._next.text) > 1:
            raise UnreadableError("several letters without braces")
        if self._next.kind == "sign" and self._next.text != "{":
            raise UnreadableError(f"{self._next.text!r} is not an argument")
        return self._operand()

    def _command(self, token: _Token) -> Expression:
        name = token.text
        if name in _SIMPLE:
            return _SIMPLE[name](self)
        if name in _FUNCTIONS:
            return self._function(name[1:])
        if name in _CALLS:
            return self._call(name)
        if name in _GREEK:
            return self._marked(name[1:].removeprefix("var"))
        if name in _FIGURES and (self._next.kind in ("name", "number") or self._next.text == "{"):
            return Symbol(f"{name[1:]} {self._raw()}")
        if name in _ACCENTS:
            return self._marked(f"{name[1:]} {self._raw()}")
        raise UnreadableError(name)

    def _call(self, name: str) -> Expression:
        arguments = self._arguments()
        if _CALLS[name] not in (0, len(arguments)):
            raise UnreadableError(f"{name} with {len(arguments)} arguments")
        match name:
            case r"\Rational":
                return divide(*arguments)
            case r"\Integer" | r"\Float":
                return arguments[0]
            case r"\cbrt":
                return FunctionCall("root", (arguments[0], Number(Fraction(3))))
        return FunctionCall(name[1:], arguments)

    def _function(self, name: str) -> Expression:
        """Parse ``\\sin^2 x``, ``\\log_2 8``, ``\\sin(x)`` or ``\\sin 2x``."""
        base: Expression | None = None
        power: Expression | None = None
        while self._next.text in ("_", "^"):
            if self._take().text == "_":
                base = self._operand()
            else:
                power = self._exponent()
        argument = self._function_argument()
        if name in ("log", "lg", "ln"):
            tree = FunctionCall("ln", (argument,))
            if name != "ln":
                tree = divide(tree, FunctionCall("ln", (base or Number(Fraction(10)),)))
        elif base is not None:
            raise UnreadableError(f"{name} with a subscript")
        elif power == FunctionCall("neg", (Number(Fraction(1)),)):
            return FunctionCall(f"arc{name}", (argument,))
        else:
            tree = FunctionCall(name, (argument,))
        return tree if power is None else FunctionCall("^", (tree, power))

    def _function_argument(self) -> Expression:
        if self._next.text in _CLOSING:
            return self._operand()
        minus = self._taken("-")
        return _with_sign(self._adjacent_factors(stop_at_functions=True), minus=minus)

    def _fraction(self) -> Expression:
        digits = self._next.text
        if len(digits) == 2 and digits.isdecimal():
            self._take()
            upper, lower = (Number(Fraction(digit)) for digit in digits)
            return divide(upper, lower)
        return divide(self._argument(), self._argument())

    def _root(self) -> Expression:
        degree = self._group("]") if self._taken("[") else Number(Fraction(2))
        inner = self._operand() if self._next.text == "(" else self._argument()
        return FunctionCall("root", (inner, degree))

    def _series(self, name: str) -> Expression:
        r"""Parse ``\sum_{k=1}^{n} a_k``."""
        for sign in ("_", "{"):
            self._expect(sign)
        index = self._take()
        if index.kind != "name":
            raise UnreadableError("a sum without an index")
        self._expect("=")
        low = self.sum()
        for sign in ("}", "^"):
            self._expect(sign)
        high = self._operand()
        self._indices.append(index.text)
        body = self._term()
        self._indices.pop()
        return FunctionCall(name, (body, Symbol(index.text), low, high))

    def _matrix(self) -> Expression:
        kind = self._environment()
        if kind not in _MATRICES | {"vmatrix"}:
            raise UnreadableError(kind)
        if kind == "array":
            self._raw()
        rows: list[FunctionCall] = []
        while self._next.text != r"\end":
            rows.append(FunctionCall("row", self._separated("&")))
            self._taken("\\\\")
        self._take()
        if self._environment() != kind or len({len(row.arguments) for row in rows}) != 1:
            raise UnreadableError("an invalid matrix")
        matrix = FunctionCall("matrix", tuple(rows))
        return FunctionCall("det", (matrix,)) if kind == "vmatrix" else matrix

    def _environment(self) -> str:
        if self._next.text != "{":
            raise UnreadableError("an environment without a name")
        return self._raw()

    @property
    def _next(self) -> _Token:
        return self._tokens[self._position] if self._position < len(self._tokens) else _END

    @property
    def _before(self) -> str:
        """The sign before the last token."""
        return self._tokens[self._position - 2].text if self._position >= 2 else ""

    def _take(self) -> _Token:
        token = self._next
        self._position += 1
        return token

    def _taken(self, *texts: str) -> bool:
        """Consume the next token and return True if it is in ``texts``."""
        found = self._next.kind != "end" and self._next.text in texts
        self._position += found
        return found

    def _expect(self, text: str) -> None:
        if not self._taken(text):
            raise UnreadableError(f"{self._next.text!r} instead of {text!r}")


_SIMPLE: dict[str, Callable[[_Reader], Expression]] = {
    r"\pi": lambda _: FunctionCall("pi", ()),
    r"\infty": lambda _: FunctionCall("infinity", ()),
    r"\imath": lambda _: FunctionCall("i", ()),
    r"\frac": _Reader._fraction,
    r"\sqrt": _Reader._root,
    r"\binom": lambda reader: FunctionCall("binomial", (reader._argument(), reader._argument())),
    r"\sum": lambda reader: reader._series("sum"),
    r"\prod": lambda reader: reader._series("product"),
    r"\begin": _Reader._matrix,
    r"\lfloor": lambda reader: FunctionCall("floor", (reader._group(r"\rfloor"),)),
    r"\lceil": lambda reader: FunctionCall("ceil", (reader._group(r"\rceil"),)),
    r"\lvert": lambda reader: FunctionCall("abs", (reader._group(r"\rvert"),)),
}


def _with_sign(tree: Expression, *, minus: bool) -> Expression:
    return FunctionCall("neg", (tree,)) if minus else tree


def _product(factors: list[Expression]) -> Expression:
    return factors[0] if len(factors) == 1 else FunctionCall("*", tuple(factors))


def _whole(tree: Expression) -> bool:
    return isinstance(tree, Number) and tree.value.denominator == 1 and tree.digits == 0


def _share(tree: Expression) -> Fraction | None:
    """Return the value of a fraction of two plain integers, or None for other expressions."""
    match tree:
        case FunctionCall("*", (Number(over, 0), FunctionCall("over", (Number(under, 0),)))) if over and under:
            return over / under
    return None
