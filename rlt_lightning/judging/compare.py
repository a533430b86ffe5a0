r"""Compare an answer with a reference: first their structure, then part by part their values.

    same_answer ─ normalise ─▶ read_answer ─▶ lists, tuples and intervals of parts, with their names
                                   │
                     parts: numbers with units exactly ─ words as text ─ formulas by math_verify

What math_verify would get wrong is decided before it is asked; answers.yaml of the tests has each case:
`(4,3)` for `(3,4)`, `silent` for `listen`, `30 hours` for `30 minutes`, `2` for `2ab`, numbers below 1e-6.
"""

from __future__ import annotations

import logging
import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from random import Random
from typing import Any

from rlt_lightning.judging.normalise import normalise
from rlt_lightning.judging.quantities import (
    CASED,
    UNSPACED,
    Quantity,
    is_rounded,
    is_terminating,
    keeps_digits,
    may_be_variables,
    read_quantity,
    read_unit,
    same_quantity,
    same_unit,
    write_unit,
)

# Irrational values agree in so many digits, and in twice as many more as the largest number in them has. No
# larger numbers than these are computed: of rational values, which are compared exactly, and of others.
AGREEMENT, MAX_DIGITS, MAX_IRRATIONAL = 350, 100_000, 2_000
# Where formulas with variables are compared: near 2, near 20 and beyond their largest number, so that
# |x-50| is not 50-x. All variables are positive at the points of `POSITIVE`.
NUM_NEAR, NUM_POINTS, POSITIVE = 4, 8, {0, 1, 4, 6}
MAX_SCALE = 10**6
MAX_TERMS = 1_000  # of a sum or a product
NO_VALUE = (ArithmeticError, NotImplementedError, TypeError, ValueError)  # of sympy


# Of numbers side by side math_verify takes the sum, of 1011_2 the digits, and A for A^T, 1 for gcd(n,2).
# Binomials are computed by parsing.
NOT_PARSED = re.compile(
    r"\d\s+\d|\d\s*_|\d\s*\\ldots|\\binom\{?[^{}]*(?:\d{6}|\d\^)"
    r"|[A-Z]\)?\s*\^\s*\{?\s*(?:T(?![a-zA-Z])|\\top)|(?:gcd|lcm)\s*\([^()]*[a-zA-Z]"
)

# Structure

# Sets that sympy simplifies: differences, intersections and unions with listed elements.
SET_OPERATION = re.compile(r"\\(?:setminus|cap)(?![a-zA-Z])|\\\{.*\\cup|\\cup.*\\\{")
# A point by its name: A(1,2).
POINT = re.compile(r"([A-Z])\s*(\(.*,.*\))")
INDIAN_COMMAS = re.compile(r"[+-]?[1-9]\d?(?:,\d\d)+,\d{3}")
PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle", "{": "}"}
BRACKET = re.compile(r"\\[{}]|\\[lr]angle|[()\[\]{}]")
THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,])")
SEPARATOR = re.compile(
    r",\s*(?:and|or)\b|[,;]|\\(?:cup|lor|vee)(?![a-zA-Z])|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|[和或与及]"
)
# Words of `SEPARATOR` that mean "and"; commas mean neither, and the rest mean "or".
AND = {"and", "和", "与", "及"}
# Dates, addresses and telephone numbers are no differences, quotients or decimals.
CODE = re.compile(
    r"\+?(?:\(\d+\)\s*)?\d+(?:(?:-\d+){2,}|(?:/\d+){2,}|(?:\.\d+){2,})|0\d+-\d+|\d+-0\d+"
    r"|\(\d{3}\)\s*\d+-\d+|\d{3}-\d{4}"
)
RELATION = re.compile(r"\\(?:le|ge|ne|approx|in)(?![a-zA-Z])|[<>=]")
WORD, GENES = re.compile(r"[^\W\d_]+"), re.compile(r"(?i)(?:([a-z])\1)+")
SHORT_WORDS = {"at", "be", "by", "if", "in", "is", "it", "no", "of", "on", "or", "so", "to", "up", "we"}
# A variable, function or measure, as it stands left of an equals sign.
NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|widehat)\s*)?\\?[a-zA-Z]+'*(?:_\{[^{}]*\})?(?:\^\{-1\})?"
    r"(?:\s*\([^()=<>]*\))?(?:\s*\{?[A-Z]+\}?)?"
)
TUPLE_NAME = re.compile(r"\(\s*\w+(?:\s*,\s*\w+)+\s*\)")
SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\(-\\infty,\\infty\))?\s*[|:]\s*(.*[<>=\\].*)\\\}")
VARIABLE = re.compile(r"\\?[a-zA-Z]+(?:_\{[^{}]*\})?(?:\([a-z]\))?")


@dataclass(frozen=True)
class Parsed:
    """The structure of an answer: `x = (1, 2]` is Parsed("(1, 2]", "x", "(]", (Parsed("1"), Parsed("2"))).

    Attributes:
        text: The normalised text, without the name.
        name: What the answer is said to be equal to, such as `x` or `f(x)`; empty without one.
        brackets: "," for a list in any order, brackets for an ordered one, empty for a single part.
        parts: The parts of a list.
        connectives: Which of "and" and "or" stand between them.
    """

    text: str
    name: str = ""
    brackets: str = ""
    parts: tuple[Parsed, ...] = ()
    connectives: frozenset[str] = frozenset()

    @property
    def whole(self) -> str:
        """Return the text with the name."""
        return f"{self.name}={self.text}" if self.name else self.text


@lru_cache(maxsize=4096)
def read_answer(text: str) -> Parsed:
    """Return the structure of a normalised text."""
    text = text.strip()
    if SET_OPERATION.search(text) and (combined := read_set(text)) is not None:
        return replace(combined, text=text)
    parts = split_parts(text)
    if len(parts) > 1:
        connectives = read_connectives(text)
        return Parsed(text, brackets=",", parts=tuple(map(read_answer, parts)), connectives=connectives)
    if builder := SET_BUILDER.fullmatch(text):
        return read_answer(builder[1])
    if (point := POINT.fullmatch(text)) and read_brackets(point[2]):
        return replace(read_answer(point[2]), name=point[1])
    members, relations = split_relations(text)
    is_equation = relations == [r"\in"] or (relations and {"=", r"\approx"} >= set(relations))
    if is_equation and (name := read_name(members)):
        value = members[0] if name == members[-1] else members[-1]
        return replace(read_answer(value), name=name)
    if relations and {"<", ">", r"\le", r"\ge", r"\ne"} >= set(relations):
        plain = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
        plain = re.sub(r"([\d.]+)%", r"\\frac{\1}{100}", plain)
        if "%" not in plain and (interval := read_set(plain)) is not None:
            return replace(interval, text=text)
    if text.count(r"\pm") == 1 and not relations:
        both = (text.replace(r"\pm", sign).strip().removeprefix("+").strip() for sign in "+-")
        return Parsed(text, brackets=",", parts=tuple(map(read_answer, both)))
    if inside := read_brackets(text):
        opening, content, closing = inside
        parts = split_parts(content, joins_thousands=False)
        if opening == r"\{" and parts != [r"\emptyset"]:
            return Parsed(text, brackets=",", parts=tuple(map(read_answer, parts)))
        if len(parts) > 1 and opening != "{":
            brackets = "()" if opening == r"\langle" else opening + closing
            return Parsed(text, brackets=brackets, parts=tuple(map(read_answer, parts)))
        if PAIRS[opening] == closing and opening != r"\{":
            return read_answer(content)
    return Parsed(text)


def read_set(text: str) -> Parsed | None:
    """Return the intervals and elements of a set, or of the solutions of inequalities; None for others."""
    from sympy import FiniteSet, Interval, Set, Union, latex
    from sympy.logic.boolalg import Boolean

    def read(value: Any) -> list[Parsed] | None:
        if isinstance(value, FiniteSet):
            return [read_answer(normalise(latex(element))) for element in value]
        if isinstance(value, Interval):
            brackets = ("(" if value.left_open else "[") + (")" if value.right_open else "]")
            ends = (read_answer(normalise(latex(end))) for end in (value.start, value.end))
            return [Parsed("", "", brackets, tuple(ends))]
        parts = [read(part) for part in value.args] if isinstance(value, Union) else [None]
        return None if None in parts else [member for part in parts for member in part or ()]

    with suppress(*NO_VALUE):
        value = parse_formula(text)
        if not isinstance(value, Set | Boolean) or is_huge(value):
            return None
        if isinstance(value, Boolean):
            value = solve(value) if is_quickly_solved(value) else None
        members = read(value.doit()) if isinstance(value, Set) else None
        if members is None or len(members) == 1:
            return members[0] if members else None
        return Parsed(text, brackets=",", parts=tuple(members), connectives=frozenset({"or"}))
    return None


def solve(claim: Any) -> Any:
    """Return the real solutions of inequalities; those of rational polynomials 50 times as fast as sympy."""
    from sympy import Abs, And, Intersection, Or, Poly, Union
    from sympy.core.relational import Relational
    from sympy.solvers.inequalities import solve_poly_inequality

    if isinstance(claim, And | Or):
        return (Intersection if isinstance(claim, And) else Union)(*map(solve, claim.args))
    for size in claim.atoms(Abs):
        sides = (size.args[0], -size.args[0])
        return Union(*(Intersection(solve(claim.xreplace({size: x})), solve(x >= 0)) for x in sides))
    if isinstance(claim, Relational):
        difference = Poly(claim.lhs - claim.rhs, *claim.free_symbols)
        if difference.domain.is_ZZ or difference.domain.is_QQ:
            return Union(*solve_poly_inequality(difference, claim.rel_op))
    return claim.as_set()


def is_quickly_solved(inequality: Any) -> bool:
    """Return whether it has one real variable, of degree 1 or 2, and only absolute values of it."""
    from sympy import Abs, degree
    from sympy.core.relational import Relational

    if len(inequality.free_symbols) != 1:
        return False
    [name] = inequality.free_symbols
    may_be_complex = inequality.has(Abs) and str(name) in ("w", "z")
    sides = [part.lhs - part.rhs for part in inequality.atoms(Relational)]
    sides = [side.replace(Abs, lambda inside: inside) for side in sides]
    return not may_be_complex and all(side.is_polynomial(name) and degree(side, name) <= 2 for side in sides)


def split_parts(text: str, joins_thousands: bool = True) -> list[str]:
    """Split a text at commas, `and`, `or` and unions outside brackets; not at those of 1,250."""
    numbers = [match.span() for match in THOUSANDS.finditer(text)] if joins_thousands else []
    separators = [
        sign for sign in find_outside(SEPARATOR, text) if not any(a < sign.start() < b for a, b in numbers)
    ]
    return [piece for piece in cut(text, separators) if piece] if separators else [text]


def split_relations(text: str) -> tuple[list[str], list[str]]:
    """Return the sides of equations and inequalities outside brackets, and the signs between them."""
    signs = find_outside(RELATION, text)
    return cut(text, signs), [sign[0] for sign in signs]


def read_connectives(text: str) -> frozenset[str]:
    """Return which of "and" and "or" stand between the parts of a text; a union is an "or"."""
    words = [word[0] for sign in find_outside(SEPARATOR, text) if (word := re.search(r"\w+", sign[0]))]
    return frozenset("and" if word in AND else "or" for word in words)


def find_outside(sign: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return the signs of a text that stand outside its brackets."""
    return [match for match in sign.finditer(text) if bracket_depth(text[: match.start()]) == 0]


def cut(text: str, signs: list[re.Match[str]]) -> list[str]:
    """Return what stands before, between and behind signs."""
    starts, ends = [0, *(sign.end() for sign in signs)], [*(sign.start() for sign in signs), len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def bracket_depth(text: str) -> int:
    """Return how many brackets of a text are open at its end."""
    return sum(1 if bracket in PAIRS else -1 for bracket in BRACKET.findall(text))


def read_brackets(text: str) -> tuple[str, str, str] | None:
    """Return the brackets around a whole text, and the text inside; None without brackets."""
    match = list(BRACKET.finditer(text))
    if len(match) < 2 or match[0].start() != 0 or match[-1].end() != len(text) or match[0][0] not in PAIRS:
        return None
    depth = 0
    for bracket in match:
        depth += 1 if bracket[0] in PAIRS else -1
        if depth == 0 and bracket is not match[-1]:
            return None
    return (match[0][0], text[match[0].end() : match[-1].start()], match[-1][0]) if depth == 0 else None


def read_name(members: list[str]) -> str:
    """Return the side of an equation that is not its value: `x` of x=7 and 7=x, `14/2` of 14/2=7.

    Returns:
        An empty text if both sides are formulas, as in 2x+3y=7. Of a chain a=b=c, c is the value.
    """
    first, last = members[0], members[-1]
    if not first or not last:
        return ""
    if len(members) > 2:
        return first
    plain = re.sub(r"_\{[^{}]*\}|\^\{-1\}", "", first)
    if NAME.fullmatch(first) or TUPLE_NAME.fullmatch(first) or not re.search(r"\d", plain):
        return first
    if VARIABLE.fullmatch(last) and not re.search(r"(?<!\\)(?<![\\a-zA-Z])[a-zA-Z]", first):
        return last
    is_arithmetic = not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", first))
    return first if is_arithmetic else ""


def is_constant(text: str) -> bool:
    """Return whether a side of a relation has no variable."""
    return re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)) is None


# Comparison


def same_numbers(a: str, b: str) -> bool | None:
    """Return whether two normalised texts are equal, as texts or as numbers; None if that is open."""
    if a == b:
        return bool(a)
    first, second = read_quantity(a), read_quantity(b)
    is_doubtful = bool(first and second and (first.doubtful or second.doubtful))
    if first is None or second is None or needs_formula(first.unit, second.unit, is_doubtful):
        return None
    return same_quantity(first, second)


def needs_formula(unit: frozenset[str], other_unit: frozenset[str], is_doubtful: bool) -> bool:
    """Return whether a unit on one side only, or another one there, may be variables: `6 s` beside `6`."""
    return is_doubtful and not (unit and other_unit and same_unit(unit, other_unit))


def same_answer(reference: str, answer: str) -> bool:
    """Return whether an answer is equal to the reference."""
    a, b = normalise(reference), normalise(answer)
    if (is_same := same_numbers(a, b)) is not None:
        return is_same
    if is_words(a) and squeeze(a) == squeeze(b):
        return True
    a, b = (read_number(x) if read_quantity(y) else x for x, y in ((a, b), (b, a)))
    return any(same_parsed(x, y) for x in read_approximation(a, True) for y in read_approximation(b))


def read_number(text: str) -> str:
    """Return `1,23,456` and `2 and 1/2` as the number that they are beside another number."""
    if INDIAN_COMMAS.fullmatch(text):
        return text.replace(",", "")
    mixed = re.fullmatch(r"(\d+)\s*and\s*(?:a\s+)?(\\frac\{\d+\}\{\d+\}|\d+/\d+)", text)
    return f"{mixed[1]} {mixed[2]}" if mixed else text


def read_approximation(text: str, is_reference: bool = False) -> list[Parsed]:
    r"""Return what `\sqrt{5}\approx 2.236` is equal to; nothing if the value and its decimal differ.

    The decimal is an answer, too, in a reference, or if no decimal would be exact: 2.236 here, but not 5 of
    `5.2\approx 5`.
    """
    members, relations = split_relations(text)
    if r"\approx" not in relations or not {"=", r"\approx"} >= set(relations) or len(split_parts(text)) > 1:
        return [read_answer(text)]
    index = relations.index(r"\approx")
    (exact, unit, _), decimal = split_unit(members[index]), read_quantity(members[-1])
    formula = parse_formula(exact) if is_constant(exact) else None
    if formula is None or is_huge(formula) or formula.free_symbols:
        return [read_answer(text)]
    name = "=".join([*members[:index], ""])
    answers = [read_answer(name + members[index])]
    if decimal is None:
        return answers
    try:
        [total] = expand_sums(formula)
        number = Fraction(str(evaluate(total, {}, 30)))
    except NO_VALUE:
        return []
    is_exact = is_terminating(number.limit_denominator(10**12))
    has_lost_unit = is_exact and bool(unit) != bool(decimal.unit)  # 5 m/s is not about 5
    if has_lost_unit or not is_rounded(decimal, number * 100 if decimal.percent else number):
        return []
    is_only = decimal.digits > 0 and not is_exact
    return [*answers, read_answer(name + members[-1])] if is_only or is_reference else answers


def same_parsed(a: Parsed, b: Parsed) -> bool:
    """Return whether two answers have equal parts: a list's in any order, others in theirs."""
    if "|" in a.text and "|" in b.text and same_formula(a.text, b.text):
        return True
    if (a.name and b.name and squeeze(a.name) != squeeze(b.name)) or is_equation(a) != is_equation(b):
        return same_equation(a, b)
    if a.name and not b.name and re.search(r"[-+*/]|\\times|\\cdot", a.name):
        return False  # 0 is no answer for x-y=0
    a, b = arrange(a, b.brackets), arrange(b, a.brackets)
    if a.brackets != b.brackets or len(a.parts) != len(b.parts):
        return False
    if not a.brackets:
        return same_leaf(a.text, b.text)
    if a.brackets != ",":
        return all(map(same_parsed, a.parts, b.parts))
    names, others = ({part.name for part in parsed.parts} for parsed in (a, b))
    # Between values of two names a comma means "and".
    words, other_words = (
        parsed.connectives or frozenset({"and"} if len(known - {""}) > 1 else ())
        for parsed, known in ((a, names), (b, others))
    )
    if words and other_words and words != other_words and (has_claims(a) or has_claims(b)):
        return False
    if max(len(names), len(others)) > 1 and "" in names | others:
        return all(map(same_parsed, a.parts, b.parts))  # the parts of `x=1, y=2` have an order in `1, 2`
    left = list(b.parts)
    for part in a.parts:
        is_set = part.text.startswith(r"\{")
        same = (x for x in left if x.text.startswith(r"\{") == is_set and same_parsed(part, x))
        match = next(same, None)
        if match is None:
            return False
        left.remove(match)
    return True


def has_claims(parsed: Parsed) -> bool:
    """Return whether `and` and `or` between the parts make a difference, as they do not in `4 or -9`."""
    texts = [part.text for part in parsed.parts if read_quantity(part.text) is None]
    are_claims = any(not text or RELATION.search(text) or is_words(text) for text in texts)
    return are_claims or len({part.name for part in parsed.parts if part.name}) > 1


def arrange(parsed: Parsed, brackets: str) -> Parsed:
    """Return an answer as another in these brackets is: `x=3, y=4` as the pair (3,4), a part as a list."""
    if brackets == "," and not parsed.brackets:
        return Parsed(parsed.text, brackets=",", parts=(parsed,))
    names = {part.name for part in parsed.parts}
    is_system = parsed.brackets == "," and "or" not in parsed.connectives
    if brackets != "()" or not is_system or "" in names or len(names) < len(parsed.parts):
        return parsed
    return replace(parsed, brackets="()", parts=tuple(sorted(parsed.parts, key=lambda part: part.name)))


def is_equation(parsed: Parsed) -> bool:
    """Return whether an answer is an equation without a name, such as 2x+3y=7."""
    return not parsed.brackets and not parsed.name and "=" in split_relations(parsed.text)[1]


def same_equation(a: Parsed, b: Parsed) -> bool:
    """Return whether two equations with different left sides say the same, such as y=2x and x=y/2."""
    return not a.brackets and not b.brackets and same_formula(a.whole, b.whole)


def same_leaf(a: str, b: str) -> bool:
    """Return whether two parts are equal: as text, as numbers, or as formulas."""
    if squeeze(a) == squeeze(b):
        return True
    if CODE.fullmatch(a) or CODE.fullmatch(b):
        return False
    if has_unit(a) != has_unit(b):
        # 5 \frac{m}{s} is a formula, unless it is compared with 5 m/s.
        a, b = write_unit(a), write_unit(b)
    if (is_same := same_numbers(a, b)) is not None:
        return is_same
    (formula, unit, doubtful), (other_formula, other_unit, other_doubtful) = split_unit(a), split_unit(b)
    if not needs_formula(unit, other_unit, doubtful or other_doubtful):
        a, b = formula, other_formula
    else:
        unit = other_unit = frozenset()
    if is_words(a) or is_words(b) or not same_unit(unit, other_unit):
        return squeeze(a) == squeeze(b) and same_unit(unit, other_unit)
    if ":" in a or ":" in b:
        ratios = a.split(":"), b.split(":")
        return len(ratios[0]) == len(ratios[1]) and all(map(same_leaf, *ratios))
    return same_formula(a, b)


def has_unit(text: str) -> bool:
    """Return whether a part ends in a unit."""
    quantity = read_quantity(text)
    return bool(quantity.unit if quantity else split_unit(text)[1])


def squeeze(text: str) -> str:
    r"""Return a text without case of words, spaces outside numbers, and quotes, which make no difference.

    The primes of f'(x) and the case of commands such as \Gamma do.
    """
    text = re.sub(r"(?<![\w)}\]'])(['\"])([^'\"]*)\1", r"\2", text)
    if re.search(r"[^\W\d_]{2}", re.sub(r"\\[a-zA-Z]+", "", text)):
        parts = re.split(rf"(\\[a-zA-Z]+|(?<=[\d}})])\s*(?:{CASED.pattern})(?![a-zA-Z]))", text)
        text = "".join(part if i % 2 else WORD.sub(fold_word, part) for i, part in enumerate(parts))
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def fold_word(word: re.Match[str]) -> str:
    """Return a word in lower case, but genes, elements and products as they are: AaBB, CO, mv."""
    text = word[0]
    is_word = text.islower() or text.isupper() or text.istitle() or not text.isascii()
    is_symbol = (len(text) == 2 and text.casefold() not in SHORT_WORDS) or GENES.fullmatch(text)
    return text.casefold() if is_word and not is_symbol else text


def is_words(text: str) -> bool:
    """Return whether a part is no formula: it has a word, or is only letters, or is in another script."""
    words = (re.fullmatch(r"[^\W\d_]{3,}[.,;:!?]?", token) for token in text.split())
    return any(words) or UNSPACED.search(text) is not None or re.fullmatch(r"[a-zA-Z]{2,}", text) is not None


def split_unit(text: str) -> tuple[str, frozenset[str], bool]:
    """Return a formula, the unit behind it, and whether that is doubtful: `2\\sqrt{3}`, cm and False.

    Degrees become radians in `\\sin 30 degree`, and are dropped in `90 degree - x`.
    """
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return re.sub(r"\s*degree\b", lambda _: r"\cdot\frac{\pi}{180}", text), frozenset(), False
    match = re.fullmatch(r"(.*(?:[\d)}]|\\pi))(\s*)((?:\s?(?:[^\W\d_]+|/)(?:\s*\^\s*\{-?\d\})?)+)", text)
    unit = read_unit(match[3], spaced=bool(match[2])) if match else None
    if match is None or not unit:
        return re.sub(r"\s*degree\b", "", text), frozenset(), False
    doubtful = may_be_variables(match[3], behind_formula=not re.fullmatch(r"[\d.,]+", match[1]))
    return re.sub(r"\s*degree\b", "", match[1]), unit, doubtful


# Formulas


def same_formula(a: str, b: str) -> bool:
    """Return whether two formulas are equal, by their values at some points, else by math_verify."""
    try:
        first, second = parse_formula(a), parse_formula(b)
        if first is None or second is None or is_huge(first) or is_huge(second):
            return False
        return same_case(a, b) and same_expression(first, second, read_quantity(a), read_quantity(b))
    except NO_VALUE:
        return False


def same_case(a: str, b: str) -> bool:
    """Return whether letters have the same case and primes in two formulas, which math_verify mixes up."""
    letters, others = (set(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", text)) for text in (a, b))
    folded, others_folded = ({name.casefold() for name in names} for names in (letters, others))
    is_mixed = any(name.casefold() in folded & others_folded for name in letters ^ others)
    primes, other_primes = (sorted(re.findall(r"[^\s']\s*'+", text)) for text in (a, b))
    return not is_mixed and primes == other_primes


def same_expression(a: Any, b: Any, first: Quantity | None = None, second: Quantity | None = None) -> bool:
    """Return whether two parsed formulas are equal; `first` and `second` are their numbers, if any."""
    from sympy import Expr, MatrixBase, nan, zoo
    from sympy.core.relational import Relational

    if getattr(a, "is_Matrix", False) or getattr(b, "is_Matrix", False):
        a, b = a.doit(), b.doit()  # sums and products of matrices
        are_matrices = isinstance(a, MatrixBase) and isinstance(b, MatrixBase) and a.shape == b.shape
        return are_matrices and all(map(same_expression, a.flat(), b.flat()))
    if isinstance(a, Relational) and isinstance(b, Relational):
        return same_relation(a, b)
    if not isinstance(a, Expr) or not isinstance(b, Expr):
        return bool(a == b)
    a, b = expand_sums(a, b)
    if a == b:
        return not a.has(nan, zoo)
    values = [a, b]
    if not (a.is_Rational and b.is_Rational):
        digits = count_digits(a, b)
        num_points = NUM_POINTS if a.free_symbols | b.free_symbols else 1
        for precision in (15, digits):  # most unequal formulas differ in the first digits
            points = evaluate_both(a, b, num_points, precision)
            pairs = list(points.values())
            # Laws such as ln ab = ln a + ln b hold where both sides are real, but ln(5-x) is not ln|x-5|.
            real = {point: sum(bool(value.is_real) for value in pair) for point, pair in points.items()}
            kept = [point for point, number in real.items() if number == 2 or (number and point in POSITIVE)]
            compared = [points[point] for point in kept] if 2 in real.values() else pairs
            if not all(agree(x, y, precision) for x, y in compared):
                break
        else:
            return True
        if len(pairs) > 1 or not all(value.is_real for value in pairs[0]):
            return False
        values = [value.evalf(precision + 50) for value in pairs[0]]
    value_a, value_b = (Fraction(str(value)) for value in values)
    return bool((first and keeps_digits(first, value_b)) or (second and keeps_digits(second, value_a)))


def expand_sums(*formulas: Any) -> list[Any]:
    """Return formulas with sums and products written out, and their numbers computed.

    Raises:
        ValueError: If a sum has symbolic or too many terms, or there is an integral or a limit.
    """
    from sympy import Add, Integral, Limit, Mul, Product, Sum

    def expand(total: Any) -> Any:
        [(name, low, high)] = total.limits
        if not (low.is_Integer and high.is_Integer and high - low < MAX_TERMS):
            raise ValueError(f"not written out: {total}")
        terms = [total.function.xreplace({name: low + i}) for i in range(int(high - low) + 1)]
        return (Add if isinstance(total, Sum) else Mul)(*terms)

    if any(formula.has(Integral, Limit) for formula in formulas):
        raise ValueError("integrals and limits are not computed")
    sums = [formula.replace(lambda part: isinstance(part, Sum | Product), expand) for formula in formulas]
    return [formula.doit() for formula in sums]


def same_relation(a: Any, b: Any) -> bool:
    """Return whether two equations or inequalities say the same: one is the other times a constant."""
    mirrored = {"<": ">", "<=": ">="}
    if mirrored.get(a.rel_op, a.rel_op) != mirrored.get(b.rel_op, b.rel_op):
        return False
    sides = [relation.lhs - relation.rhs for relation in (a, b)]
    has_order = a.rel_op not in ("==", "!=")
    first, second = sides if has_order else map(clear_denominator, sides)
    digits = count_digits(first, second)
    values = list(evaluate_both(first, second, NUM_POINTS, digits).values())
    if not all(x and y for x, y in values):
        return False
    ratios = [x / y for x, y in values]
    is_turned = a.rel_op != b.rel_op
    if has_order and (not ratios[0].is_real or (ratios[0] < 0) != is_turned):
        return False
    return all(agree(ratio, ratios[0], digits) for ratio in ratios)


def clear_denominator(side: Any) -> Any:
    """Return a side of `side = 0` times its denominator, unless that adds solutions: `xy-6` of `y-6/x`."""
    from sympy import groebner, together

    top, bottom = together(side).as_numer_denom()
    names = side.free_symbols
    is_small = bottom.is_polynomial(*names) and top.is_polynomial(*names) and side.count_ops() < 30
    if not bottom.free_symbols or not is_small:
        return side
    return top if groebner([top, bottom], *names).exprs == [1] else side


@lru_cache(maxsize=4096)
def parse_formula(text: str) -> Any:
    """Return a formula as math_verify parses it, with exact decimals; None if it cannot."""
    if NOT_PARSED.search(text) or not re.search(r"[^\W_]", text):
        return None
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Abs, Float, I, Pow, Rational, Symbol, sign

    # It warns that it has no time limit; the judge has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Text is normalised already: it must neither lose units, as 2ab would, nor be searched for a box.
    rules = NormalizationConfig(units=False, malformed_operators=True, nits=False, boxed="none")
    kinds = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=rules)]
    match = parse(f"${text}$", kinds, fallback_mode="no_fallback", parsing_timeout=None)
    if not match or isinstance(match[0], str):
        return None
    parsed = match[0]
    if not is_huge(parsed) and hasattr(parsed, "atoms"):
        exact: dict[Any, Any] = {number: Rational(str(number)) for number in parsed.atoms(Float)}
        exact |= {symbol: I for symbol in parsed.atoms(Symbol) if symbol.name == "i"}
        parsed = parsed.xreplace(exact) if exact else parsed
        if not parsed.has(I):  # odd roots of negative numbers are real
            roots = [power for power in parsed.atoms(Pow) if is_odd_root(power)]
            parsed = parsed.xreplace({x: sign(x.base) ** x.exp.p * Abs(x.base) ** x.exp for x in roots})
    return parsed


def is_odd_root(power: Any) -> bool:
    """Return whether a power is an odd root of what may be negative."""
    exponent = power.exp
    return bool(exponent.is_Rational and exponent.q > 1 and exponent.q % 2 and not power.base.is_nonnegative)


def is_huge(expression: Any) -> bool:
    """Return whether a formula's value has so many digits that it is not computed, as a power tower has."""
    return log_size(expression) > MAX_DIGITS


def log_size(expression: Any) -> float:
    """Return about the number of digits of the largest value in a formula; infinity for towers."""
    from sympy import MatrixBase, Pow, Rational, exp, factorial

    if isinstance(expression, Rational):
        return max(math.log10(max(abs(int(part)), 1)) for part in (expression.p, expression.q))
    members = expression.flat() if isinstance(expression, MatrixBase) else getattr(expression, "args", ())
    parts = [log_size(part) for part in members]
    if math.inf in parts:
        return math.inf
    if isinstance(expression, Pow | exp | factorial):
        exponent = 10 ** min(parts[-1], 300.0)
        return exponent * max(0.5, parts[0]) if exponent < 1e9 and parts[-1] < 300 else math.inf
    return sum(parts)


def count_digits(a: Any, b: Any) -> int:
    """Return in how many digits two values must agree.

    Raises:
        ValueError: If they are too large to be computed.
    """
    if (size := log_size(a) + log_size(b)) > MAX_IRRATIONAL:
        raise ValueError(f"{size:.0f} digits")
    return AGREEMENT + 2 * int(size)


def evaluate_both(a: Any, b: Any, num_points: int, digits: int) -> dict[int, tuple[Any, Any]]:
    """Return the values of two formulas at some points; far ones are left out where neither has a value.

    Raises:
        ValueError: If one has none at a point, or both have none at a near one. Or another of `NO_VALUE`.
    """
    values: dict[int, tuple[Any, Any]] = {}
    for point in range(min(num_points, NUM_NEAR) if is_tower(a) or is_tower(b) else num_points):
        at = choose_point(a, b, point)
        try:
            first = evaluate(a, at, digits)
        except NO_VALUE:
            if point < NUM_NEAR or has_value(b, at, digits):
                raise
            continue
        pair = first, evaluate(b, at, digits)
        # What is left of e^{200} - e^{200} + 1 says nothing.
        is_rest = any(getattr(value, "_prec", 4 * digits) < 3.4 * digits for value in pair)
        if point < NUM_NEAR or not is_rest:
            values[point] = pair
    return values


def has_value(formula: Any, values: dict[Any, Any], digits: int) -> bool:
    """Return whether a formula has a value where its variables have these values."""
    with suppress(*NO_VALUE):
        evaluate(formula, values, digits)
        return True
    return False


def is_tower(formula: Any) -> bool:
    """Return whether a function of what grows fast stands in a formula, as in e^{e^x}: no far points."""
    from sympy import Abs, Function, Max, Min, Pow, log, sign

    slow = (log, Abs, sign, Max, Min)
    fast = [
        part
        for part in formula.atoms(Pow, Function)
        if part.args[-1].free_symbols and not isinstance(part, slow)
    ]
    return any(part.args[-1].has(*fast) for part in fast)


def choose_point(a: Any, b: Any, point: int) -> dict[Any, Any]:
    """Return the values of the variables of two formulas at a point."""
    from sympy import Rational

    largest = max((abs(number) for number in a.atoms(Rational) | b.atoms(Rational)), default=0)
    scale = [1, 10, min(max(40, 2 * int(largest)), MAX_SCALE)][max(0, point // 2 - 1)]
    values = {}
    for index, name in enumerate(sorted(a.free_symbols | b.free_symbols, key=str)):
        # At other points half of the variables are negative: |x| is not x there.
        sign = -1 if point not in POSITIVE and (index + point) % 2 else 1
        values[name] = Rational(sign * scale * Random(f"{name}{point}").randrange(1010, 3000), 1009)
    return values


def evaluate(expression: Any, values: dict[Any, Any], digits: int) -> Any:
    """Return the value of a formula where its variables have these values.

    Raises:
        ValueError: If it has none there. Or another of `NO_VALUE`.
    """
    try:
        value = expression.evalf(digits + 50, subs=values)
    except AttributeError as error:  # sympy's, of what is no number
        raise ValueError(f"no value: {expression}") from error
    # Of \sqrt{8}-2\sqrt{2} nothing but rounding is left.
    if getattr(value, "_prec", digits) == 1:
        value *= 0
    if not (value.is_number and value.is_finite):
        raise ValueError(f"no value: {expression}")
    return value


def agree(a: Any, b: Any, digits: int) -> bool:
    """Return whether two values agree in so many digits."""
    from sympy import Float

    size = max(abs(a), abs(b))
    difference = abs(a - b)
    return bool(difference == 0 or difference < size * Float(10) ** -digits)
