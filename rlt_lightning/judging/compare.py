r"""Compare an answer with a reference: by their structure first, and the parts by value.

    same_answer ─ normalise ─▶ read_answer ─▶ lists, tuples and intervals of parts, with their names
                                   │
                     parts: numbers with units exactly ─ words as text ─ formulas by math_verify

What math_verify alone gets wrong is settled before it is asked (tests/judging.py has each case): `(4,3)` for
`(3,4)`, `silent` for `listen`, `30 hours` for `30 minutes`, `2` for `2ab`, and all numbers below 1e-6.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlt_lightning.judging.normalise import normalise

# A decimal stands for a value with other decimals, such as 1/3, if it has this many significant digits.
MIN_DIGITS = 6
# Formulas are evaluated to so many digits, and equal up to so many; a larger value is not computed.
PRECISION, AGREEMENT, MAX_DIGITS = 100, 80, 10_000
NUM_POINTS = 4  # at which formulas with variables are compared


# Numbers

DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<currency>[$€£¥₹₽₩]|US\s?\$|USD|EUR|Rs\.?|)\s*(?P<inner>-?)(?:
    (?P<thousands>[1-9]\d{{0,2}}(?:,\d{{3}})+(?:\.\d+)?)
    |(?P<repeating>\d*\.\d*(?:\\overline\s*\{{\d+\}}|\(\d+\)))
    |(?P<whole>\d+)\s*(?:\\frac\s*\{{(?P<num>\d+)\}}\s*\{{(?P<den>\d+)\}}|\s(?P<num2>\d+)\s*/\s*(?P<den2>\d+))
    |\\frac\s*\{{\s*(?P<top>-?{DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>-?{DECIMAL})\s*\}}
    |(?P<over>{DECIMAL})\s*/\s*(?P<under>{DECIMAL})
    |(?:(?P<mantissa>{DECIMAL})\s*\\times\s*)?10\s*\^\s*\{{(?P<power>[-+]?\d{{1,4}})\}}
    |(?P<decimal>{DECIMAL})
    )(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES |= {"dozen": 12, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}

# Units: the word for each, and its other spellings, without plural s. Of `SHORT` ones a space must stand before,
# since `3m` may be a product.
UNITS = {
    "mm": "millimeter millimetre 毫米",
    "cm": "centimeter centimetre 厘米 公分",
    "m": "meter metre 米",
    "km": "kilometer kilometre 千米 公里",
    "in": "inch inche 英寸",
    "ft": "foot feet 英尺",
    "yd": "yard",
    "mi": "mile 英里",
    "mg": "milligram 毫克",
    "g": "gram gramme gm 克",
    "kg": "kilogram kilo 千克 公斤",
    "lb": "pound",
    "oz": "ounce",
    "ton": "tonne 吨",
    "ms": "millisecond 毫秒",
    "s": "sec second 秒",
    "min": "minute 分钟",
    "h": "hr hour 小时",
    "day": "天 日",
    "week": "周 星期",
    "month": "月",
    "yr": "year 年",
    "ml": "milliliter millilitre 毫升",
    "l": "liter litre 升",
    "degree": "deg 度",
    "rad": "radian",
    "dollar": "usd us $ 美元",
    "cent": "¢",
    "euro": "eur € 欧元",
    "gbp": "£",
    "¥": "yuan rmb 元 块 人民币 yen 円",
    "rupee": "₹ inr rs",
    "rouble": "₽ ruble",
    "won": "₩ 원",
    "mi/h": "mph",
    "km/h": "kmh kmph kph",
    "am": "",
    "pm": "",
    "unit": "",
    "people": "person 人",
    "%": "",
    **dict.fromkeys(
        [
            "dm",
            "n",
            "j",
            "w",
            "v",
            "k",
            "c",
            "f",
            "a",
            "hz",
            "pa",
            "kw",
            "kj",
            "ev",
            "mol",
            "ha",
            "acre",
            "ohm",
        ],
        "",
    ),
}
UNIT_OF = {word: unit for unit, words in UNITS.items() for word in (unit, *words.split())}
SHORT = re.compile(r"[a-zA-Z]|in|am|pm|pa|ha|ev|rs|us")
UNIT_TOKEN = re.compile(r"[^\W\d_]+|[$€£¥₹₽₩¢%]|/|\^\s*\{-?\d\}")
UNIT = re.compile(rf"(?:\s|\\cdot|{UNIT_TOKEN.pattern}|[().'-])*")
POWERS = {"square": "2", "sq": "2", "平方": "2", "cubic": "3", "cu": "3"}
# After these a short word is a unit, too.
AHEAD = {*POWERS, "/", "per"}
# Words after a number that change its value.
CHANGING = set(
    [
        "squared",
        "cubed",
        "factorial",
        "over",
        "time",
        "plu",
        "minu",
        "divided",
        "tenth",
        "hundredth",
        "mod",
        "not",
        "or",
        "and",
        "than",
        "to",
        "least",
        "most",
    ]
)
# Languages without spaces write a unit directly behind a number.
UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1100-\u11ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0400-\u04ff\u0600-\u06ff\u0900-\u0dff]"
)


@dataclass(frozen=True)
class Quantity:
    """A number as it is written: `1.50 kg` is Quantity(Fraction(3, 2), 3, Fraction(1, 100), {"kg"}, False).

    Attributes:
        value: The number. A percentage keeps its number: 15 of 15 %.
        digits: Significant digits of a decimal; 0 for whole numbers and fractions, which are exact.
        step: Value of a decimal's last digit.
        unit: Words of the unit; empty without one.
        percent: Whether it is a percentage.
    """

    value: Fraction
    digits: int = 0
    step: Fraction = Fraction(0)
    unit: frozenset[str] = frozenset()
    percent: bool = False


@lru_cache(maxsize=4096)
def read_quantity(text: str) -> Quantity | None:
    """Return a normalised text's number with its unit; None for anything else."""
    found = NUMBER.fullmatch(text.strip())
    if found is None or (number := read_number(found)) is None:
        return None
    rest, value = found["rest"], number.value
    if percent := rest.lstrip().startswith("%"):
        rest = rest.lstrip()[1:]
    words = rest.split()
    if words and (scale := SCALES.get(words[0].lower().removesuffix("s"))):
        value, rest = value * scale, " " + " ".join(words[1:])
    if (unit := read_unit(found["currency"] + rest, rest[:1].isspace() or bool(found["currency"]))) is None:
        return None
    if (found["sign"] == "-") != (found["inner"] == "-"):
        value = -value
    return replace(number, value=value, unit=unit, percent=percent)


def read_number(found: re.Match[str]) -> Quantity | None:
    """Return the number of a match of `NUMBER`, without sign; None if it has no value."""
    try:
        if text := found["thousands"]:
            return read_decimal(text.replace(",", ""))
        if text := found["repeating"]:
            return Quantity(read_repeating(text))
        if whole := found["whole"]:
            part = Fraction(int(found["num"] or found["num2"]), int(found["den"] or found["den2"]))
            # 2 \frac{3}{2} is a product, if anything.
            return Quantity(int(whole) + part) if part < 1 else None
        if found["top"] or found["over"]:
            top, bottom = found["top"] or found["over"], found["bottom"] or found["under"]
            return Quantity(Fraction(top) / Fraction(bottom))
        if found["power"]:
            number, power = read_decimal(found["mantissa"] or "1"), Fraction(10) ** int(found["power"])
            return replace(number, value=number.value * power, step=number.step * power)
        return read_decimal(found["decimal"])
    except (ZeroDivisionError, ValueError):
        return None


def read_decimal(text: str) -> Quantity:
    """Return the value of digits with or without a point."""
    decimals = len(text.partition(".")[2])
    digits = len(text.replace(".", "").lstrip("0")) if decimals else 0
    return Quantity(Fraction(text.rstrip(".") or "0"), digits, Fraction(1, 10**decimals))


def read_repeating(text: str) -> Fraction:
    """Return the value of a decimal whose last digits repeat: 1/3 of `0.\\overline{3}`."""
    whole, fixed, cycle = re.fullmatch(r"(\d*)\.(\d*)\D+(\d+)\D", text).groups()  # type: ignore[union-attr]
    repeated = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
    return Fraction(f"{whole or 0}.{fixed or 0}") + repeated


def read_unit(text: str, spaced: bool) -> frozenset[str] | None:
    """Return the words of a unit, each in one spelling; None if the text is no unit.

    A word is a unit if the table has it, if another script writes it, or if it has four letters and a space
    before it. So `7 apples` has one, and `3bc` and `2 ab` are products.
    """
    if not UNIT.fullmatch(text):
        return None
    tokens = UNIT_TOKEN.findall(text)
    if not tokens:
        return frozenset() if not text.strip(" .'-()") else None
    names = [UNIT_OF.get(singular(token), "") for token in tokens]
    names = [
        "" if SHORT.fullmatch(tokens[i]) and i and tokens[i - 1].lower() not in AHEAD else names[i]
        for i in range(len(tokens))
    ]
    first = tokens[0]
    if (
        {singular(token) for token in tokens} & CHANGING
        or first in "/^"
        or (SHORT.fullmatch(first) and not spaced)
    ):
        return None
    is_unit = names[0] or first.lower() in POWERS
    is_written = spaced or all(
        name or token in "/^" or token.startswith("^") for name, token in zip(names, tokens, strict=True)
    )
    if not UNSPACED.search(first) and not (is_unit and is_written):
        if not (spaced and any(len(token) >= 4 and token.isalpha() for token in tokens)):
            return None
    return frozenset(merge_unit(names, tokens))


def merge_unit(names: list[str], tokens: list[str]) -> Iterator[str]:
    """Yield the known units, each with its power and `/`, and the other words: `cm2` of `square cm`, `/h` of `per hour`.

    Other words begin with a space.
    """
    power = over = ""
    for i, (name, token) in enumerate(zip(names, tokens, strict=True)):
        if token.lower() in POWERS and i + 1 < len(tokens):
            power = POWERS[token.lower()]
        elif token in ("/", "per"):
            over = "/"
        elif not token.startswith("^"):
            following = tokens[i + 1] if i + 1 < len(tokens) else ""
            raised = re.sub(r"[^\d-]", "", following) if following.startswith("^") else power
            first, *others = name.split("/") if name else [f" {singular(token)}"]
            yield over + first + raised
            yield from (f"/{other}" for other in others)
            power = over = ""


def singular(word: str) -> str:
    """Return a word in lower case, without its plural s."""
    word = word.casefold()
    return word.removesuffix("s") if len(word) > 2 else word


def same_quantity(a: Quantity, b: Quantity) -> bool:
    """Return whether two numbers are equal. A unit or a percent sign that one of them lacks does not count."""
    if not same_unit(a.unit, b.unit):
        return False
    if a.percent == b.percent:
        return same_number(a, b)
    if any(not name.startswith(" ") for name in a.unit | b.unit):
        return False  # 45 degrees are not 45 %
    percentage, number = (a, b) if a.percent else (b, a)
    hundredth = replace(percentage, value=percentage.value / 100, step=percentage.step / 100)
    return same_number(percentage, number) or same_number(hundredth, number)


def same_unit(a: frozenset[str], b: frozenset[str]) -> bool:
    """Return whether two units agree; one may have more words, such as `apples in total`, or be missing."""
    if not a or not b:
        return True
    known, others = ({name for name in unit if name[0] != " "} for unit in (a, b))
    words, other_words = a - known, b - others
    return known == others and (words <= other_words or other_words <= words)


def same_number(a: Quantity, b: Quantity) -> bool:
    """Return whether two numbers are equal, or one is the other as a decimal of at least `MIN_DIGITS` digits."""
    if a.value == b.value:
        return True
    return ((not b.step or not b.digits) and is_rounded(a, b.value)) or (
        not a.digits and is_rounded(b, a.value)
    )


def is_rounded(decimal: Quantity, value: Fraction) -> bool:
    """Return whether a decimal is a value of which later digits were left out."""
    return not is_terminating(value) and keeps_digits(decimal, value)


def keeps_digits(decimal: Quantity, value: Fraction) -> bool:
    """Return whether a decimal has enough digits of a value, the last one rounded or cut off."""
    missing = abs(value) - abs(decimal.value)
    is_near = -decimal.step / 2 <= missing < decimal.step and value * decimal.value > 0
    return is_near and decimal.digits >= MIN_DIGITS


def is_terminating(value: Fraction) -> bool:
    """Return whether a number has finitely many decimals."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


# Structure

PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle", "{": "}"}
BRACKET = re.compile(r"\\[{}]|\\[lr]angle|[()\[\]{}]")
THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,])")
SEPARATOR = re.compile(
    r",\s*(?:and|or)\b|[,;，；]|\\cup(?![a-zA-Z])|\\(?:lor|vee)(?![a-zA-Z])|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|[和或与及]"
)
RELATION = re.compile(
    r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|\\ne(?![a-zA-Z])|\\approx(?![a-zA-Z])|\\in(?![a-zA-Z])|[<>=]"
)
# A variable, function or measure, as it stands left of an equals sign.
NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|widehat)\s*)?\\?[a-zA-Z]+'*(?:_\{[^{}]*\})?(?:\^\{-1\})?(?:\s*\([^()=<>]*\))?(?:\s*\{?[A-Z]+\}?)?"
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
    """

    text: str
    name: str = ""
    brackets: str = ""
    parts: tuple[Parsed, ...] = ()

    @property
    def whole(self) -> str:
        """Return the text with the name."""
        return f"{self.name}={self.text}" if self.name else self.text


@lru_cache(maxsize=4096)
def read_answer(text: str) -> Parsed:
    """Return the structure of a normalised text."""
    text = text.strip()
    parts = split_parts(text)
    if len(parts) > 1:
        return Parsed(text, brackets=",", parts=tuple(map(read_answer, parts)))
    if builder := SET_BUILDER.fullmatch(text):
        return read_answer(builder[1])
    members, relations = split_relations(text)
    if {"=", r"\approx"} >= set(relations) != set() or relations == [r"\in"]:
        if name := read_name(members):
            return replace(read_answer(members[0] if name == members[-1] else members[-1]), name=name)
    if interval := read_interval(members, relations):
        return interval
    if text.count(r"\pm") == 1 and not relations:
        both = (text.replace(r"\pm", sign).strip().removeprefix("+").strip() for sign in "+-")
        return Parsed(text, brackets=",", parts=tuple(map(read_answer, both)))
    if inside := read_brackets(text):
        opening, content, closing = inside
        parts = split_parts(content, joins_thousands=False)
        if opening == r"\{":
            return Parsed(text, brackets=",", parts=tuple(map(read_answer, parts)))
        if len(parts) > 1 and opening != "{":
            brackets = "()" if opening == r"\langle" else opening + closing
            return Parsed(text, brackets=brackets, parts=tuple(map(read_answer, parts)))
        if PAIRS[opening] == closing:
            return read_answer(content)
    return Parsed(text)


def split_parts(text: str, joins_thousands: bool = True) -> list[str]:
    """Split a text at commas, `and`, `or` and unions outside brackets; not at those of 1,250."""
    numbers = [found.span() for found in THOUSANDS.finditer(text)] if joins_thousands else []
    ends, start = [], 0
    for separator in SEPARATOR.finditer(text):
        place = separator.start()
        if bracket_depth(text[:place]) == 0 and not any(a < place < b for a, b in numbers):
            ends.append((start, place))
            start = separator.end()
    pieces = [text[a:b].strip() for a, b in (*ends, (start, len(text)))]
    return [piece for piece in pieces if piece] if len(pieces) > 1 else [text]


def bracket_depth(text: str) -> int:
    """Return how many brackets of a text are open at its end."""
    return sum(1 if bracket in PAIRS else -1 for bracket in BRACKET.findall(text))


def read_brackets(text: str) -> tuple[str, str, str] | None:
    """Return the brackets around a whole text, and what they hold; None without such."""
    found = list(BRACKET.finditer(text))
    if len(found) < 2 or found[0].start() != 0 or found[-1].end() != len(text) or found[0][0] not in PAIRS:
        return None
    depth = 0
    for bracket in found:
        depth += 1 if bracket[0] in PAIRS else -1
        if depth == 0 and bracket is not found[-1]:
            return None
    return (found[0][0], text[found[0].end() : found[-1].start()], found[-1][0]) if depth == 0 else None


def split_relations(text: str) -> tuple[list[str], list[str]]:
    """Return the sides of equations and inequalities outside brackets, and the signs between them."""
    members, relations, start = [], [], 0
    for relation in RELATION.finditer(text):
        if bracket_depth(text[: relation.start()]) == 0:
            members.append(text[start : relation.start()].strip())
            relations.append(relation[0])
            start = relation.end()
    return [*members, text[start:].strip()], relations


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


def read_interval(members: list[str], relations: list[str]) -> Parsed | None:
    """Return the interval that inequalities describe: `(2,5]` of 2<x<=5; None for others."""
    if not relations or not {"<", ">", r"\le", r"\ge"} >= set(relations):
        return None
    if relations[0] in (">", r"\ge"):
        turned = {">": "<", r"\ge": r"\le", "<": ">", r"\le": r"\ge"}
        return read_interval(members[::-1], [turned[relation] for relation in relations[::-1]])
    if len(members) == 2:
        if VARIABLE.fullmatch(members[0]):
            members, relations = [r"-\infty", *members], ["<", *relations]
        else:
            members, relations = [*members, r"\infty"], [*relations, "<"]
    if len(members) != 3 or not VARIABLE.fullmatch(members[1]) or not {"<", r"\le"} >= set(relations):
        return None
    if any(re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", side)) for side in (members[0], members[2])):
        return None
    brackets = ("(" if relations[0] == "<" else "[") + (")" if relations[1] == "<" else "]")
    return Parsed("", "", brackets, (read_answer(members[0]), read_answer(members[2])))


# Comparison


def same_numbers(reference: str, answer: str) -> bool | None:
    """Return whether two texts are equal as they are written or as numbers; None if more must be known."""
    a, b = normalise(reference), normalise(answer)
    if a == b:
        return bool(a)
    first, second = read_quantity(a), read_quantity(b)
    return None if first is None or second is None else same_quantity(first, second)


def same_answer(reference: str, answer: str) -> bool:
    """Return whether an answer is equal to the reference."""
    quick = same_numbers(reference, answer)
    return (
        same_parsed(read_answer(normalise(reference)), read_answer(normalise(answer)))
        if quick is None
        else quick
    )


def same_parsed(a: Parsed, b: Parsed) -> bool:
    """Return whether two answers have equal parts: a list's in any order, others in theirs."""
    if (a.name and b.name and squeeze(a.name) != squeeze(b.name)) or is_equation(a) != is_equation(b):
        return same_equation(a, b)
    if a.name and not b.name and re.search(r"[-+*/]|\\times|\\cdot", a.name):
        return False  # 0 is no answer for x-y=0
    a, b = order_named(a, b.brackets), order_named(b, a.brackets)
    if a.brackets == "," and not b.brackets:
        b = Parsed(b.text, brackets=",", parts=(b,))
    if b.brackets == "," and not a.brackets:
        a = Parsed(a.text, brackets=",", parts=(a,))
    if a.brackets != b.brackets or len(a.parts) != len(b.parts):
        return False
    if not a.brackets:
        return same_leaf(a.text, b.text)
    if a.brackets != ",":
        return all(map(same_parsed, a.parts, b.parts))
    if len({part.name for part in a.parts}) > 1 or len({part.name for part in b.parts}) > 1:
        if not all(part.name for part in (*a.parts, *b.parts)):
            return all(map(same_parsed, a.parts, b.parts))
    left = list(b.parts)
    for part in a.parts:
        match = next((other for other in left if same_parsed(part, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def order_named(parsed: Parsed, brackets: str) -> Parsed:
    """Return `x=3, y=4` as the pair (3,4) where it is compared with a pair."""
    names = {part.name for part in parsed.parts}
    if brackets != "()" or parsed.brackets != "," or "" in names or len(names) < len(parsed.parts):
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
    first, second = read_quantity(a), read_quantity(b)
    if first and second:
        return same_quantity(first, second)
    if is_words(a) or is_words(b):
        return False
    if ":" in a or ":" in b:
        ratios = a.split(":"), b.split(":")
        return len(ratios[0]) == len(ratios[1]) and all(map(same_leaf, *ratios))
    (a, unit), (b, other) = split_unit(a), split_unit(b)
    return same_unit(unit, other) and same_formula(a, b)


def squeeze(text: str) -> str:
    """Return a text without what does not tell answers apart: case of words, spaces outside numbers, quotes."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text.replace('"', "").replace("'", ""))
    return text.casefold() if re.search(r"[^\W\d_]{2}", re.sub(r"\\[a-zA-Z]+", "", text)) else text


def is_words(text: str) -> bool:
    """Return whether a part is text rather than a formula: it has a word, or letters alone, or no Latin letter."""
    if UNSPACED.search(text):
        return True
    if re.fullmatch(r"[a-zA-Z]{2,}", text):
        return True
    return any(re.fullmatch(r"[^\W\d_]{3,}[.,;:!?]?", token) for token in text.split())


def split_unit(text: str) -> tuple[str, frozenset[str]]:
    """Return a formula and the unit behind it: `2\\sqrt{3}` and cm."""
    found = re.fullmatch(r"(.*(?:[\d)}]|\\pi))(\s*)((?:\s?[a-zA-Z°/]+(?:\s*\^\{-?\d\})?)+)", text)
    if found is None:
        return text, frozenset()
    unit = read_unit(found[3], spaced=bool(found[2]))
    return (found[1], unit) if unit else (text, frozenset())


# Formulas


def same_formula(a: str, b: str) -> bool:
    """Return whether two formulas are equal, by their values at some points, else by math_verify."""
    try:
        first, second = parse_formula(a), parse_formula(b)
        if first is None or second is None or is_huge(first) or is_huge(second):
            return False
        return same_expression(first, second, read_quantity(a), read_quantity(b))
    except (MemoryError, RecursionError):  # of these the judge says that the limit was reached
        raise
    except Exception:  # sympy has many errors for formulas without a value
        return False


def same_expression(a: Any, b: Any, first: Quantity | None = None, second: Quantity | None = None) -> bool:
    """Return whether two parsed formulas are equal; `first` and `second` are their numbers, if they are such."""
    from math_verify import verify
    from sympy import Expr, MatrixBase
    from sympy.core.relational import Relational

    if isinstance(a, MatrixBase) and isinstance(b, MatrixBase):
        return a.shape == b.shape and all(map(same_expression, a.flat(), b.flat()))
    if isinstance(a, Relational) and isinstance(b, Relational):
        return same_relation(a, b)
    if not isinstance(a, Expr) or not isinstance(b, Expr):
        return type(a) is type(b) and bool(verify(a, b, float_rounding=AGREEMENT, timeout_seconds=None))
    pairs = [
        (evaluate(a, i), evaluate(b, i)) for i in range(NUM_POINTS if a.free_symbols | b.free_symbols else 1)
    ]
    if any(x is None or y is None for x, y in pairs):
        return bool(verify(a, b, float_rounding=AGREEMENT, numeric_precision=PRECISION, timeout_seconds=None))
    # Laws such as ln ab = ln a + ln b hold where both sides are real.
    if all(agree(x, y) for x, y in [(x, y) for x, y in pairs if x.is_real and y.is_real] or pairs):
        return True
    if len(pairs) > 1 or not all(value.is_real for value in pairs[0]):
        return False
    value_a, value_b = (Fraction(str(value.evalf(PRECISION))) for value in pairs[0])
    return bool((first and keeps_digits(first, value_b)) or (second and keeps_digits(second, value_a)))


def same_relation(a: Any, b: Any) -> bool:
    """Return whether two equations or inequalities say the same: one is the other times a constant."""
    signs = {"<": -1, "<=": -1, ">": 1, ">=": 1}
    if (a.rel_op in signs) != (b.rel_op in signs) or ("=" in a.rel_op) != ("=" in b.rel_op):
        return False
    values = [(evaluate(a.lhs - a.rhs, i), evaluate(b.lhs - b.rhs, i)) for i in range(NUM_POINTS)]
    if any(x is None or y is None or not y or not x for x, y in values):
        return False
    ratios = [x / y for x, y in values]
    factor = signs.get(a.rel_op, 1) * signs.get(b.rel_op, 1)
    one_way = a.rel_op not in signs or bool(ratios[0].is_real and ratios[0] * factor > 0)
    return one_way and all(agree(ratio, ratios[0]) for ratio in ratios)


@lru_cache(maxsize=4096)
def parse_formula(text: str) -> Any:
    """Return a formula as math_verify parses it, with exact decimals; None if it cannot."""
    # Of numbers side by side math_verify takes the sum, of 1011_2 the digits.
    if re.search(r"\d\s+\d|\d\s*_", text) or not re.search(r"[^\W_]", text):
        return None
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Float, I, Rational, Symbol

    # It warns that it has no time limit; the judge has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Text is normalised already: it must neither lose units, as 2ab would, nor be searched for a box.
    rules = NormalizationConfig(units=False, malformed_operators=True, nits=False, boxed="none")
    kinds = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=rules)]
    found = parse(f"${text}$", kinds, fallback_mode="no_fallback", parsing_timeout=None)
    if not found or isinstance(found[0], str):
        return None
    parsed = found[0]
    if not is_huge(parsed) and hasattr(parsed, "atoms"):
        exact: dict[Any, Any] = {number: Rational(str(number)) for number in parsed.atoms(Float)}
        exact |= {symbol: I for symbol in parsed.atoms(Symbol) if symbol.name == "i"}
        parsed = parsed.xreplace(exact) if exact else parsed
    return parsed


def is_huge(expression: Any) -> bool:
    """Return whether a formula's value has so many digits that it is not computed, as a power tower has."""
    return log_size(expression) > MAX_DIGITS


def log_size(expression: Any) -> float:
    """Return about the number of digits of the largest value in a formula; infinity for towers."""
    from sympy import Pow, Rational, factorial

    if isinstance(expression, Rational):
        return math.log10(2) * max(abs(int(expression.p)).bit_length(), int(expression.q).bit_length())
    parts = [log_size(part) for part in getattr(expression, "args", ())]
    if math.inf in parts:
        return math.inf
    if isinstance(expression, Pow | factorial):
        exponent = 10 ** min(parts[-1], 300.0)
        return exponent * max(1.0, parts[0]) if exponent < 1e9 and parts[-1] < 300 else math.inf
    return sum(parts)


def evaluate(expression: Any, point: int) -> Any:
    """Return the value of a formula where its variables have fixed values; None if it has none there."""
    from sympy import Rational

    values = {}
    for place, name in enumerate(sorted(expression.free_symbols, key=str)):
        number = 1009 + sum((i + 1) * 7919 * byte for i, byte in enumerate(f"{name}{point}".encode())) % 2003
        # Half of the variables are negative at half of the points: |x| is not x, but the root of xy that of x times y.
        sign = -1 if point >= NUM_POINTS // 2 and (place + point) % 2 else 1
        values[name] = Rational(sign * number, 1009)
    try:
        value = expression.evalf(PRECISION, subs=values)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None
    if (
        getattr(value, "_prec", PRECISION) == 1
    ):  # nothing is left of it but rounding, as of \sqrt{8}-2\sqrt{2}
        value *= 0
    return value if value.is_number and value.is_finite else None


def agree(a: Any, b: Any) -> bool:
    """Return whether two values agree in `AGREEMENT` digits."""
    from sympy import Float

    size = max(abs(a), abs(b))
    difference = abs(a - b)
    return bool(difference == 0 or difference < size * Float(10) ** -AGREEMENT)
