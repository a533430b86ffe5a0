r"""Read numbers with their units, and compare them exactly: plain functions on normalised texts.

    1{,}250 euros ─ normalise ─▶ 1250 euros ─ read_quantity ─▶ Quantity ─ same_quantity ─▶ equal or not

Two decimals are equal only if no digit differs. A decimal equals a fraction or a root whose digits never end
if it gives at least six of them. Units are compared as words and not converted.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

# A decimal stands for a value with other decimals, such as 1/3, if it has this many significant digits.
MIN_DIGITS = 6

DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<currency>[$€£¥₹₽₩]|US\s?\$|USD|EUR|Rs\.?|)\s*(?P<inner>-?)(?:
    (?P<repeating>\d*\.\d*(?:\\overline\s*\{{\d+\}}|\(\d+\)))
    |(?P<whole>\d+)\s*(?:\\frac\s*\{{(?P<num>\d+)\}}\s*\{{(?P<den>\d+)\}}|\s(?P<num2>\d+)\s*/\s*(?P<den2>\d+))
    |\\frac\s*\{{\s*(?P<top>-?{DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>-?{DECIMAL})\s*\}}
    |(?P<over>{DECIMAL})\s*/\s*(?P<under>{DECIMAL})
    |(?:(?P<mantissa>{DECIMAL})\s*\\times\s*)?10\s*\^\s*\{{(?P<power>[-+]?\d{{1,4}})\}}
    |(?P<decimal>[1-9]\d{{0,2}}(?:,\d{{3}})+(?:\.\d+)?|{DECIMAL})
    )(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
# Words behind a number that multiply it, without plural s, and letters that do so behind money.
SCALES = {"hundred": 100, "thousand": 1000, "dozen": 12, "lakh": 10**5, "crore": 10**7}
SCALES |= {name: 10 ** (3 * n) for n, name in enumerate(("million", "billion", "trillion", "quadrillion"), 2)}
MONEY_SCALES = {"k": 1000, "m": 10**6, "mn": 10**6, "b": 10**9, "bn": 10**9, "t": 10**12, "tn": 10**12}
SCRIPT_SCALES = dict.fromkeys("万萬만", 10**4) | dict.fromkeys("亿億억", 10**8) | {"百": 100, "千": 1000}
KILO_UNIT = re.compile("[百千][瓦焦卡帕伏赫牛安]")
# Words that divide it: 3 quarters, 1 half, but not 12 third graders.
PARTS = "half third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
FRACTIONS = {name: Fraction(1, n) for n, name in enumerate(PARTS.split(), 2)}
FRACTIONS |= {"halve": Fraction(1, 2), "quarter": Fraction(1, 4), "sixteenth": Fraction(1, 16)}
FRACTIONS |= {
    f"{name}th": Fraction(1, scale) for name, scale in SCALES.items() if name.endswith(("d", "ion"))
}

# Units, each before its other spellings without plural s.
UNITS = """
mm millimeter millimetre 毫米, cm centimeter centimetre 厘米 公分, dm decimeter decimetre 分米,
m meter metre 米, km kilometer kilometre 千米 公里, in inch inche 英寸, ft foot feet 英尺, yd yard,
mi mile 英里, mg milligram 毫克, g gram gramme gm 克, kg kilogram kilo 千克 公斤, lb pound, oz ounce,
ton tonne 吨, ms millisecond 毫秒, s sec second 秒, min minute 分钟, h hr hour 小时, day 天 日, week 周 星期,
month 月, yr year 年, am, pm, ml milliliter millilitre 毫升, l liter litre L 升, ha hectare, acre, cup,
degree deg 度, rad radian, mi/h mph, km/h kmh kmph kph, N newton 牛, J joule, W watt, V volt, A ampere,
K kelvin, C celsius, F fahrenheit, hz hertz, pa pascal, kw kilowatt, kj kilojoule, ev electronvolt, mol mole,
ohm Ω ω, unit, man men, people person 人, dollar usd us $ 美元, cent ¢, euro eur € 欧元, gbp £,
¥ yuan rmb 元 块 人民币 yen 円, rupee ₹ inr rs, rouble ₽ ruble, won ₩ 원
"""
SPELLINGS = [line.split() for line in UNITS.split(",")]
UNIT_OF = {word: names[0] for names in SPELLINGS for word in names}
# The long word of a short unit: `m` set upright is no variable.
LONG = {
    word: next((name for name in names if len(name) > 3 and name.isascii()), word)
    for names in SPELLINGS
    for word in names
    if len(word) < 3 and word.isascii()
}
# Capitals count in these: C and c, mW and MW, Nm and nm, but not in KG.
SHORT_NAMES = "|".join(word for word in UNIT_OF if re.fullmatch("[a-z]{2}", word))
CASED = re.compile(
    rf"[a-zA-Z]|(?!(?i:{SHORT_NAMES})(?![a-zA-Z]))[a-zA-Z]{{2}}|M(?!in$|an$|en$)[a-zA-Z]{{1,2}}|[kKMGT]i[bB]|pA"
)
# Short words that are products more often than units, and those that are units behind a formula, too.
PRODUCTS, SURE = {"mg", "ms", "rs", "gm", "pa"}, {"cm", "mm", "km", "kg", "ft", "in"}
QUOTIENT = re.compile(
    r"\s*(?:m\s?(?:/\s?[sh](?:\^\{2\})?|s\^\{-[12]\})|J/[sK]|N/m(?:\^\{2\})?|g/[lL]|V/m|W/m\^\{2\})\s*"
)
# Only with a space before it is this a unit: 3m may be a product.
SHORT = re.compile(r"[a-zA-Z]|in|am|pm|pa|ha|ev|rs|us")
UNIT_TOKEN = re.compile(r"[^\W\d_]+|[$€£¥₹₽₩¢]|/|\^\s*\{-?\d\}")
UNIT = re.compile(rf"(?:\s|\\cdot|{UNIT_TOKEN.pattern}|[().-]|(?<=[^\W\d_])')*")
# A fraction of letters behind a number: of units, if what it is compared with has a unit.
UNIT_FRACTION = re.compile(
    r"(.*\S)\s*\\frac\s*\{((?:[^{}]|\^\{\d\})+)\}\s*\{((?:[^{}]|\^\{\d\})+)\}", re.DOTALL
)
POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3}
# The symbols of which units are made that have no name of their own.
SYMBOL = re.compile("[mgslNJWVCKA]|[kcm]m|k[gJNW]|mol|Pa|Hz|rad")
# Words after a number that change its value in other ways, some of them only at the end.
CHANGING = re.compile(
    rf"""(?ix)\b(?:squared|cubed|factorial|over|times|plus|minus|divided|mod|modulo|modulus|base|choose|recurring
    |repeating|doubled|tripled|halved|score|gross|not|or|and|than|to|least|most
    |(?:below|under|beneath)\s+(?:zero|freezing)|point\s+(?:zero|oh|one|two|three|four|five|six|seven|eight|nine)
    |(?<!per\s)(?:{"|".join(SCALES)})s?|(?:{"|".join(FRACTIONS)})s|half)\b
    |\b(?:negative|inverse|inverted|reciprocal|opposite|twice|thrice)\W*$"""
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Languages without spaces write a unit directly behind a number.
UNSPACED = re.compile(
    "[\u0400-\u04ff\u0600-\u06ff\u0900-\u0eff\u1100-\u11ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
)


@dataclass(frozen=True)
class Quantity:
    """A number as it is written: `1.50 kg` is Quantity(Fraction(3, 2), 3, Fraction(1, 100), {"kg1"}, False).

    Attributes:
        value: The number. A percentage keeps its number: 15 of 15 %.
        digits: Significant digits of a decimal; 0 for whole numbers and fractions, which are exact.
        step: Value of a decimal's last digit.
        unit: Words of the unit; empty without one.
        percent: Whether it is a percentage.
        doubtful: Whether the unit may be a product of variables, as in `6 s`.
    """

    value: Fraction
    digits: int = 0
    step: Fraction = Fraction(0)
    unit: frozenset[str] = frozenset()
    percent: bool = False
    doubtful: bool = False


@lru_cache(maxsize=4096)
def read_quantity(text: str) -> Quantity | None:
    """Return a normalised text's number with its unit; None for anything else."""
    match = NUMBER.fullmatch(text.strip())
    if match is None or (number := read_number(match)) is None:
        return None
    rest, value = match["rest"], number.value
    if percent := rest.lstrip().startswith("%"):
        rest = rest.lstrip()[1:]
    scale, rest = read_scale(rest, bool(match["currency"]), value == 1)
    value *= scale
    if (unit := read_unit(match["currency"] + rest, rest[:1].isspace() or bool(match["currency"]))) is None:
        return None
    if (match["sign"] == "-") != (match["inner"] == "-"):
        value = -value
    return replace(number, value=value, unit=unit, percent=percent, doubtful=may_be_variables(rest))


def read_scale(text: str, is_money: bool, is_one: bool) -> tuple[Fraction, str]:
    """Return the product of the number words that a text begins with, and the rest of the text."""
    product = Fraction(1)
    while word := re.match(r"\s*([^\W\d_]+)", text):
        name = word[1].casefold()
        scale: int | Fraction | None = SCALES.get(name.removesuffix("s"))
        if is_money:
            scale = scale or MONEY_SCALES.get(name)
        if name.endswith("s") or (is_one and product == 1):
            scale = scale or FRACTIONS.get(name.removesuffix("s"))
        end = word.end()
        if name[0] in SCRIPT_SCALES and name not in UNIT_OF and not KILO_UNIT.match(name):
            scale, end = SCRIPT_SCALES[name[0]], word.start(1) + 1
        if scale is None:
            break
        product, text = product * scale, text[end:]
    return product, text


def read_number(match: re.Match[str]) -> Quantity | None:
    """Return the number of a match of `NUMBER`, without sign; None if it has no value."""
    try:
        if text := match["repeating"]:
            return Quantity(read_repeating(text))
        if whole := match["whole"]:
            part = Fraction(int(match["num"] or match["num2"]), int(match["den"] or match["den2"]))
            # 2 \frac{3}{2} is a product, if anything.
            return Quantity(int(whole) + part) if part < 1 else None
        if match["top"] or match["over"]:
            top, bottom = match["top"] or match["over"], match["bottom"] or match["under"]
            return Quantity(Fraction(top) / Fraction(bottom))
        if match["power"]:
            number, power = read_decimal(match["mantissa"] or "1"), Fraction(10) ** int(match["power"])
            return replace(number, value=number.value * power, step=number.step * power)
        return read_decimal(match["decimal"].replace(",", ""))
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
    before it. So `7 apples` has one, and `3bc`, `2 ab` and `4 abcd` are products.
    """
    if not UNIT.fullmatch(text) or CHANGING.search(text):
        return None
    text = write_quotients(text)
    tokens = UNIT_TOKEN.findall(text)
    if not tokens:
        return frozenset() if not text.strip(" .'-()") else None
    first = tokens[0]
    names = [read_unit_word(token, before) for before, token in zip(["", *tokens], tokens, strict=False)]
    if first[0] in "/^" or (SHORT.fullmatch(first) and not spaced):
        return None
    is_known = names[0] != "" or first.lower() in POWERS
    is_whole = all(name or token[0] in "/^" for name, token in zip(names, tokens, strict=True))
    has_word = any(len(token) >= 4 and token.isalpha() and token not in LETTERS for token in tokens)
    if any(re.fullmatch("[a-zA-Z]", token) and not name for token, name in zip(tokens, names, strict=True)):
        return None  # a variable
    if UNSPACED.search(first) or (is_known and (spaced or is_whole)) or (spaced and has_word):
        return merge_unit(names, tokens)
    return None


def may_be_variables(unit: str, behind_formula: bool = False) -> bool:
    """Return whether a unit may be a product of variables: it is none beside an answer without one."""
    words = re.findall(r"[^\W\d_]+", unit)
    is_short = all(
        word.isascii()
        and (len(word) == 1 or word in PRODUCTS or (behind_formula and len(word) == 2 and word not in SURE))
        for word in words
    )
    return bool(words) and is_short and not QUOTIENT.fullmatch(unit)


def read_unit_word(word: str, before: str) -> str:
    """Return the unit that a word stands for, empty without one.

    A short one stands first, after `per`, or as a symbol behind another symbol: m of `N m`.
    """
    is_first = not before or before.lower() in (*POWERS, "/", "per", "degree")
    is_symbol = SYMBOL.fullmatch(word) and (before[:1] == "^" or SYMBOL.fullmatch(before))
    is_other = SHORT.fullmatch(word) and not is_first and not is_symbol
    return "" if is_other else UNIT_OF.get(singular(word), "")


def write_quotients(text: str) -> str:
    r"""Return a unit with a slash before each divisor: `J/kg/K` of `J/(kg K)` and `J kg^{-1} K^{-1}`."""
    text = re.sub(r"/\s*\(([^()/]*)\)", lambda m: "/" + "/".join(m[1].replace(r"\cdot", " ").split()), text)
    text = re.sub(r"([^\W\d_]+)\s*\^\s*\{-(\d)\}", r" /\1^{\2}", text)
    return text.replace(r"\cdot", " ")


def write_unit(text: str) -> str:
    r"""Return a number with a fraction of units, or in one, as `5 m/s`; any other text as it is."""
    moved = re.sub(r"^\\frac\s*\{\s*(\d+(?:\.\d+)?)\s*(?=[a-zA-Z])", r"\1\\frac{", text)
    if (match := UNIT_FRACTION.fullmatch(moved)) is None:
        return text
    number, top, bottom = match.groups()
    unit = write_quotients(f" {top}/({bottom})")
    return number + unit if read_unit(unit, spaced=True) else text


def merge_unit(names: list[str], tokens: list[str]) -> frozenset[str]:
    """Return a unit as powers: `cm2` of `square cm`, `m1` and `/s1` of `m/s`; ` apple1` is a word."""
    power, sign = 1, 1
    powers: Counter[str] = Counter()
    for name, token, following in zip(names, tokens, [*tokens[1:], ""], strict=True):
        if token.lower() in POWERS and following:
            power = POWERS[token.lower()]
        elif token in ("/", "per"):
            sign = -1
        elif not token.startswith("^"):
            raised = int(re.sub(r"[^\d-]", "", following)) if following.startswith("^") else power
            top, *bottom = name.split("/") if name else [f" {singular(token)}"]
            powers[top] = raised if sign > 0 else powers[top] - raised  # 60 ° degrees are degrees
            powers.subtract(bottom)
            power, sign = 1, 1
    return frozenset(f"{'/' * (number < 0)}{name}{abs(number)}" for name, number in powers.items())


def singular(word: str) -> str:
    """Return a word in lower case, without its plural s."""
    word = word if CASED.fullmatch(word) else word.casefold()
    return word.removesuffix("s") if len(word) > 2 else word


def same_quantity(a: Quantity, b: Quantity) -> bool:
    """Return whether two numbers are equal. A unit or percent sign that one of them lacks does not count."""
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
    """Return whether two numbers are equal, or one is the other's decimal of at least `MIN_DIGITS` digits."""
    if a.value == b.value:
        return True
    decimal, exact = (a, b) if a.digits else (b, a)
    return not exact.digits and not is_terminating(exact.value) and keeps_digits(decimal, exact.value)


def keeps_digits(decimal: Quantity, value: Fraction) -> bool:
    """Return whether a decimal has enough digits of a value."""
    return decimal.digits >= MIN_DIGITS and is_rounded(decimal, value)


def is_rounded(decimal: Quantity, value: Fraction) -> bool:
    """Return whether a decimal is a value whose last digit is rounded, or whose other digits are cut off."""
    missing = abs(value) - abs(decimal.value)
    return -decimal.step / 2 <= missing < decimal.step and value * decimal.value > 0


def is_terminating(value: Fraction) -> bool:
    """Return whether a number has finitely many decimals."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0
