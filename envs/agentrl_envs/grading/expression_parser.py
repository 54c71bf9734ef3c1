r"""Parser of expressions in LaTeX or plain notation. The whole text must be valid.

>>> parse_expression(r"\frac12") == parse_expression("1/2")
True
>>> parse_expression("2 pi r**2 - sqrt(A)") == parse_expression(r"2\pi r^2-\sqrt{A}")
True
>>> parse_expression("17 0")
Traceback (most recent call last):
agentrl_envs.grading.expression_parser.ExpressionSyntaxError: a number cannot follow a factor

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

_PLAIN_NAMES = {  # names in plain notation, with their LaTeX commands
    "pi": r"\pi", "oo": r"\infty", "inf": r"\infty", "infinity": r"\infty", "ln": r"\ln", "log": r"\ln",
    "abs": r"\abs", "Abs": r"\abs", "asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan",
    "ceiling": r"\ceil", "Fraction": r"\Rational",
}  # fmt: skip
_NAMES_OF_COMMANDS = (
    "sqrt cbrt root Rational Integer Float exp sin cos tan sec csc cot sinh cosh tanh binomial factorial floor ceil "
    "arcsin arccos arctan gcd lcm max min"
)
_PLAIN_NAMES |= {name: f"\\{name}" for name in _NAMES_OF_COMMANDS.split()}
# Scientific notation, except 2e+1, 3e-4 and the like, in which e is Euler's number.
_SCIENTIFIC = r"(?:\d*\.\d+[eE][-+]?\d+|1[eE][-+]?\d+|\d+[eE](?:\d+|[-+]\d{2,}))(?![\d.])"
_TOKEN_PATTERN = re.compile(
    r"(?P<blank>\s+)"
    rf"|(?P<number>{_SCIENTIFIC}|"
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+\.\d+|\d+|\.\d+)"
    rf"|(?P<word>(?<![A-Za-z\\])(?:{'|'.join(sorted(_PLAIN_NAMES, key=len, reverse=True))})(?![A-Za-z]))"
    r"|(?P<command>\\[A-Za-z]+|\\[%{}|\\])"
    r"|(?P<name>[A-Z]{2,}|[A-Za-z])"
    r"|(?P<sign>\*\*|[-+*/^_()\[\]{}|!',=&%:])",
    re.ASCII,
)
_Kind = Literal["number", "command", "name", "sign", "end"]


class ExpressionSyntaxError(Exception):
    """The text is not in a supported notation."""


@dataclass(frozen=True, slots=True)
class _Token:
    """A token. ``spaced`` is true if a blank precedes the token."""

    kind: _Kind
    text: str
    spaced: bool = False


_END = _Token("end", "")


def _latex_commands(names: str) -> frozenset[str]:
    return frozenset(f"\\{name}" for name in names.split())


_FUNCTIONS = _latex_commands(
    "sin cos tan sec csc cot arcsin arccos arctan arcsec arccsc arccot sinh cosh tanh exp ln lg log det"
)
_ARGUMENT_COUNTS = {  # functions and their number of arguments; 0 means any number
    r"\abs": 1, r"\Integer": 1, r"\Float": 1, r"\factorial": 1, r"\floor": 1, r"\ceil": 1, r"\cbrt": 1,
    r"\Rational": 2, r"\root": 2, r"\binomial": 2, r"\gcd": 0, r"\lcm": 0, r"\max": 0, r"\min": 0,
}  # fmt: skip
_GREEK = _latex_commands(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
_GEOMETRY_COMMANDS = _latex_commands("angle triangle odot widehat parallel")
_ACCENTS = _latex_commands("vec bar hat tilde overline overrightarrow mathbf mathbb mathcal boldsymbol widetilde")
_MULTIPLICATION_SIGNS = _latex_commands("cdot times ast") | {"*"}
_DIVISION_SIGNS = frozenset({"/", r"\div", ":"})
_MODULO_SIGNS = _latex_commands("bmod mod")
_NOT_A_FACTOR = (
    _MULTIPLICATION_SIGNS | _DIVISION_SIGNS | _MODULO_SIGNS | _latex_commands(r"over choose rfloor rceil rvert end \ }")
)
_MATRICES = frozenset({"pmatrix", "bmatrix", "matrix", "Bmatrix", "array"})
_FUNCTION_NAMES = frozenset("fghFGHP")
_MAX_EXPONENT_CHARACTERS = 5  # maximum length of an exponent in scientific notation, including its sign
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def parse_expression(text: str) -> Expression:
    """Parse the whole text as one expression. Raises ExpressionSyntaxError if the text is not valid."""
    try:
        parser = _ExpressionParser(_tokenize(text))
        tree = parser.sum_or_fraction()
        parser.expect_end()
    except RecursionError as error:
        raise ExpressionSyntaxError("the expression is nested too deeply") from error
    return tree


def _tokenize(text: str) -> list[_Token]:
    """Split the whole text into tokens. Adjacent capitals are one name, so ``HHT`` differs from ``THH``."""
    tokens: list[_Token] = []
    position, spaced = 0, False
    while position < len(text):
        match = _TOKEN_PATTERN.match(text, position)
        if match is None:
            raise ExpressionSyntaxError(repr(text[position]))
        position = match.end()
        if match.lastgroup != "blank":
            tokens.append(_make_token(str(match.lastgroup), match.group(), spaced))
        spaced = match.lastgroup == "blank"
    return tokens


def _make_token(group: str, text: str, spaced: bool) -> _Token:
    match group:
        case "number":
            return _Token("number", text.replace(",", ""), spaced)
        case "word":
            return _Token("command", _PLAIN_NAMES[text], spaced)
        case "name":
            return _Token("name", text, spaced)
        case "command" if text != r"\%":
            return _Token("command", text, spaced)
    return _Token("sign", {"**": "^", r"\%": "%"}.get(text, text), spaced)


class _ExpressionParser:
    """Recursive-descent parser over the tokens."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._position = 0
        self._indices: list[str] = []
        self._bars = 0

    def expect_end(self) -> None:
        if self._peeked.kind != "end":
            raise ExpressionSyntaxError(f"expected the end, found {self._peeked.text!r}")

    def sum_or_fraction(self) -> Expression:
        r"""Parse a sum, or plain TeX's fraction (``\over``) or binomial (``\choose``) of two sums."""
        tree = self.sum()
        if self._consume_if_in(r"\over"):
            return divide(tree, self.sum())
        if self._consume_if_in(r"\choose"):
            return FunctionCall("binomial", (tree, self.sum()))
        return tree

    def sum(self) -> Expression:
        terms = [self._term()]
        while self._peeked.text in ("+", "-"):
            minus = self._next_token().text == "-"
            terms.append(_negate_if(self._term(), minus=minus))
        return terms[0] if len(terms) == 1 else FunctionCall("+", tuple(terms))

    def _term(self) -> Expression:
        factors = [self._signed_factors()]
        while True:
            if self._consume_if_in(*_MULTIPLICATION_SIGNS):
                factors.append(self._signed_factors())
            elif self._consume_if_in(*_DIVISION_SIGNS):
                factors.append(FunctionCall("over", (self._signed_factors(),)))
            elif self._consume_if_in(*_MODULO_SIGNS):
                factors = [FunctionCall("mod", (_product_of(factors), self._signed_factors()))]
            else:
                return _product_of(factors)

    def _signed_factors(self) -> Expression:
        minus = self._consume_signs()
        return _negate_if(self._adjacent_factors(), minus=minus)

    def _consume_signs(self) -> bool:
        """Consume the following signs. Returns True if their product is a minus."""
        minus = False
        while self._peeked.text in ("+", "-"):
            minus ^= self._next_token().text == "-"
        return minus

    def _adjacent_factors(self, *, stop_at_functions: bool = False) -> Expression:
        """Parse adjacent factors."""
        factors = [self._factor()]
        while self._starts_a_factor() and not (stop_at_functions and self._peeked.text in _FUNCTIONS):
            if self._peeked.kind == "number":
                raise ExpressionSyntaxError("a number cannot follow a factor")
            start = self._position
            before, factor = factors[-1], self._factor()
            texts = [token.text for token in self._tokens[start : self._position]]
            fraction = texts[0] == r"\frac" or (texts[0] == "{" and r"\over" in texts)
            if (
                fraction
                and len(factors) == 1
                and _is_plain_integer(before)
                and (share := _value_of_fraction(factor)) is not None
            ):
                if share >= 1:
                    raise ExpressionSyntaxError("an improper fraction cannot follow an integer")
                factors = [FunctionCall("+", (before, factor))]
            else:
                factors.append(factor)
        tree = _product_of(factors)
        return FunctionCall("percent", (tree,)) if self._consume_if_in("%") else tree

    def _starts_a_factor(self) -> bool:
        token = self._peeked
        if token.kind in ("number", "name"):
            return True
        if token.kind == "command":
            return token.text not in _NOT_A_FACTOR
        return token.text in ("(", "[", "{") or (token.text == "|" and self._bars == 0)

    def _factor(self) -> Expression:
        """Parse an operand with its powers, factorials and degree signs."""
        tree = self._operand()
        while True:
            if self._consume_if_in("^"):
                tree = self._power(tree)
            elif self._consume_if_in("!"):
                tree = FunctionCall("factorial", (tree,))
            else:
                return tree

    def _power(self, base: Expression) -> Expression:
        if self._skip_exponent_equal_to(r"\circ"):
            return FunctionCall("degree", (base,))
        if self._skip_exponent_equal_to(r"\top"):
            return FunctionCall("transpose", (base,))
        return FunctionCall("^", (base, self._exponent()))

    def _skip_exponent_equal_to(self, command: str) -> bool:
        """Consume the exponent and return True if it is the single command ``command``."""
        ahead = [token.text for token in self._tokens[self._position : self._position + 3]]
        taken = 1 if ahead[:1] == [command] else 3 if ahead == ["{", command, "}"] else 0
        self._position += taken
        return taken > 0

    def _exponent(self) -> Expression:
        minus = self._consume_signs()
        if self._peeked.kind == "name" and len(self._peeked.text) > 1:
            raise ExpressionSyntaxError("an exponent of several letters needs braces")
        tree = self._operand()
        if self._consume_if_in("^"):
            tree = FunctionCall("^", (tree, self._exponent()))
        return _negate_if(tree, minus=minus)

    def _operand(self) -> Expression:
        token = self._next_token()
        match token.kind:
            case "number":
                return self._number(token)
            case "name":
                return self._name(token)
            case "command":
                return self._command(token)
        if token.text in _CLOSING:
            return self._group_until(_CLOSING[token.text])
        if token.text == "|":
            self._bars += 1
            tree = self.sum()
            self._bars -= 1
            self._expect("|")
            return FunctionCall("abs", (tree,))
        raise ExpressionSyntaxError(f"{token.text!r} is not an operand")

    def _number(self, token: _Token) -> Expression:
        if self._peeked.text == "_":
            raise ExpressionSyntaxError("a number with an explicit base is not supported in an expression")
        mantissa, _, exponent = token.text.lower().partition("e")
        if len(exponent) > _MAX_EXPONENT_CHARACTERS:
            raise ExpressionSyntaxError("the exponent has too many digits")
        whole, _, behind = mantissa.partition(".")
        digits = len((whole + behind).lstrip("0")) if behind else 0
        value = Number(Fraction(token.text), digits, digits if exponent else len(behind))
        if self._peeked.text == "j" and not self._peeked.spaced:
            self._next_token()
            return FunctionCall("*", (value, FunctionCall("i", ())))
        return value

    def _name(self, token: _Token) -> Expression:
        name = token.text
        if name in ("e", "i") and name not in self._indices and self._peeked.text not in ("_", "'"):
            return FunctionCall(name, ())
        if name == "I" and "*" in (self._peeked.text, self._text_before_last_token):
            return FunctionCall("i", ())
        return self._symbol_with_marks(name)

    def _symbol_with_marks(self, name: str) -> Expression:
        """Parse the subscript, the primes and the arguments, if any, of a name."""
        function = name in _FUNCTION_NAMES
        while self._peeked.text in ("_", "'"):
            name += f"_{{{self._next_raw_text()}}}" if self._next_token().text == "_" else "'"
        if function and self._peeked.text == "(":
            return FunctionCall(f"call {name}", self._parenthesized_arguments())
        return Symbol(name)

    def _next_raw_text(self) -> str:
        """Return the text of the next token or braced group."""
        token = self._next_token()
        if token.kind == "end":
            raise ExpressionSyntaxError("the text ends too early")
        if token.text != "{":
            return token.text
        depth, texts = 1, []
        while depth:
            token = self._next_token()
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            if token.kind == "end":
                raise ExpressionSyntaxError("a brace is not closed")
            texts.append(token.text)
        return "".join(texts[:-1])

    def _group_until(self, closing: str) -> Expression:
        bars, self._bars = self._bars, 0
        tree = self.sum_or_fraction()
        self._bars = bars
        self._expect(closing)
        return tree

    def _parenthesized_arguments(self) -> tuple[Expression, ...]:
        self._expect("(")
        bars, self._bars = self._bars, 0
        expressions = self._separated(",")
        self._bars = bars
        self._expect(")")
        return expressions

    def _separated(self, separator: str) -> tuple[Expression, ...]:
        expressions = [self.sum()]
        while self._consume_if_in(separator):
            expressions.append(self.sum())
        return tuple(expressions)

    def _argument(self) -> Expression:
        """Parse the argument of a LaTeX command: a braced group, a digit, a letter, or another command."""
        if self._peeked.kind == "number" and len(self._peeked.text) > 1:
            raise ExpressionSyntaxError("an argument of several digits needs braces")
        if self._peeked.kind == "name" and len(self._peeked.text) > 1:
            raise ExpressionSyntaxError("an argument of several letters needs braces")
        if self._peeked.kind == "sign" and self._peeked.text != "{":
            raise ExpressionSyntaxError(f"{self._peeked.text!r} is not an argument")
        return self._operand()

    def _command(self, token: _Token) -> Expression:
        name = token.text
        if name in _COMMAND_PARSERS:
            return _COMMAND_PARSERS[name](self)
        if name in _FUNCTIONS:
            return self._function(name[1:])
        if name in _ARGUMENT_COUNTS:
            return self._function_call(name)
        if name in _GREEK:
            return self._symbol_with_marks(name[1:].removeprefix("var"))
        if name in _GEOMETRY_COMMANDS and (self._peeked.kind in ("name", "number") or self._peeked.text == "{"):
            return Symbol(f"{name[1:]} {self._next_raw_text()}")
        if name in _ACCENTS:
            return self._symbol_with_marks(f"{name[1:]} {self._next_raw_text()}")
        raise ExpressionSyntaxError(name)

    def _function_call(self, name: str) -> Expression:
        arguments = self._parenthesized_arguments()
        if _ARGUMENT_COUNTS[name] not in (0, len(arguments)):
            raise ExpressionSyntaxError(f"{name} does not accept {len(arguments)} arguments")
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
        while self._peeked.text in ("_", "^"):
            if self._next_token().text == "_":
                base = self._operand()
            else:
                power = self._exponent()
        argument = self._function_argument()
        if name in ("log", "lg", "ln"):
            tree = FunctionCall("ln", (argument,))
            if name != "ln":
                tree = divide(tree, FunctionCall("ln", (base or Number(Fraction(10)),)))
        elif base is not None:
            raise ExpressionSyntaxError(f"{name} does not accept a subscript")
        elif power == FunctionCall("neg", (Number(Fraction(1)),)):
            return FunctionCall(f"arc{name}", (argument,))
        else:
            tree = FunctionCall(name, (argument,))
        return tree if power is None else FunctionCall("^", (tree, power))

    def _function_argument(self) -> Expression:
        if self._peeked.text in _CLOSING:
            return self._operand()
        minus = self._consume_if_in("-")
        return _negate_if(self._adjacent_factors(stop_at_functions=True), minus=minus)

    def _fraction(self) -> Expression:
        digits = self._peeked.text
        if len(digits) == 2 and digits.isdecimal():
            self._next_token()
            upper, lower = (Number(Fraction(digit)) for digit in digits)
            return divide(upper, lower)
        return divide(self._argument(), self._argument())

    def _root(self) -> Expression:
        degree = self._group_until("]") if self._consume_if_in("[") else Number(Fraction(2))
        inner = self._operand() if self._peeked.text == "(" else self._argument()
        return FunctionCall("root", (inner, degree))

    def _indexed_sum_or_product(self, name: str) -> Expression:
        r"""Parse ``\sum_{k=1}^{n} a_k``."""
        for sign in ("_", "{"):
            self._expect(sign)
        index = self._next_token()
        if index.kind != "name":
            raise ExpressionSyntaxError("the sum or product has no index")
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
        kind = self._environment_name()
        if kind not in _MATRICES | {"vmatrix"}:
            raise ExpressionSyntaxError(kind)
        if kind == "array":
            self._next_raw_text()
        rows: list[FunctionCall] = []
        while self._peeked.text != r"\end":
            rows.append(FunctionCall("row", self._separated("&")))
            self._consume_if_in("\\\\")
        self._next_token()
        if self._environment_name() != kind or len({len(row.arguments) for row in rows}) != 1:
            raise ExpressionSyntaxError("the matrix is not valid")
        matrix = FunctionCall("matrix", tuple(rows))
        return FunctionCall("det", (matrix,)) if kind == "vmatrix" else matrix

    def _environment_name(self) -> str:
        if self._peeked.text != "{":
            raise ExpressionSyntaxError("the environment has no name")
        return self._next_raw_text()

    @property
    def _peeked(self) -> _Token:
        return self._tokens[self._position] if self._position < len(self._tokens) else _END

    @property
    def _text_before_last_token(self) -> str:
        """Text of the token before the last consumed token, or "" if there is no such token."""
        return self._tokens[self._position - 2].text if self._position >= 2 else ""

    def _next_token(self) -> _Token:
        token = self._peeked
        self._position += 1
        return token

    def _consume_if_in(self, *texts: str) -> bool:
        """Consume the next token and return True if it is in ``texts``."""
        matches = self._peeked.kind != "end" and self._peeked.text in texts
        self._position += matches
        return matches

    def _expect(self, text: str) -> None:
        if not self._consume_if_in(text):
            raise ExpressionSyntaxError(f"expected {text!r}, found {self._peeked.text!r}")


_COMMAND_PARSERS: dict[str, Callable[[_ExpressionParser], Expression]] = {
    r"\pi": lambda _: FunctionCall("pi", ()),
    r"\infty": lambda _: FunctionCall("infinity", ()),
    r"\imath": lambda _: FunctionCall("i", ()),
    r"\frac": _ExpressionParser._fraction,
    r"\sqrt": _ExpressionParser._root,
    r"\binom": lambda parser: FunctionCall("binomial", (parser._argument(), parser._argument())),
    r"\sum": lambda parser: parser._indexed_sum_or_product("sum"),
    r"\prod": lambda parser: parser._indexed_sum_or_product("product"),
    r"\begin": _ExpressionParser._matrix,
    r"\lfloor": lambda parser: FunctionCall("floor", (parser._group_until(r"\rfloor"),)),
    r"\lceil": lambda parser: FunctionCall("ceil", (parser._group_until(r"\rceil"),)),
    r"\lvert": lambda parser: FunctionCall("abs", (parser._group_until(r"\rvert"),)),
}


def _negate_if(tree: Expression, *, minus: bool) -> Expression:
    return FunctionCall("neg", (tree,)) if minus else tree


def _product_of(factors: list[Expression]) -> Expression:
    return factors[0] if len(factors) == 1 else FunctionCall("*", tuple(factors))


def _is_plain_integer(tree: Expression) -> bool:
    return isinstance(tree, Number) and tree.value.denominator == 1 and tree.digits == 0


def _value_of_fraction(tree: Expression) -> Fraction | None:
    """Return the value of a fraction of two plain integers, or None for other expressions."""
    match tree:
        case FunctionCall("*", (Number(over, 0), FunctionCall("over", (Number(under, 0),)))) if over and under:
            return over / under
    return None
