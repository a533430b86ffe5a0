r"""Bring an answer into one notation, whatever its script and markup: `**２½** °` is `2\frac{1}{2} degree`.

    characters ─▶ signs ─▶ markup ─▶ LaTeX ─▶ numbers ─▶ spaces

Each step is a table or a few substitutions; answers.yaml in tests/unit/judging has cases for each. A value is
never computed here, so equal texts have equal values, and other texts are compared by `judging.compare`.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from rlt_lightning.judging.quantities import LONG

# Signs, each group before the one command or character that stands for all of them.
SIGNS = r"""
−–—‒‐‑﹣ -    ×✕✖ \times    ·⋅∙• \cdot    ÷∕⁄ /    ≤⩽≦ \le    ≥⩾≧ \ge    ≠ \ne    ≡ \equiv    ≈≃ \approx
± \pm    ∞ \infty    √ \sqrt    ∛ \sqrt[3]    ∪ \cup    ∩ \cap    ∈ \in    ∅⌀ \emptyset    ℝ \mathbb{R}
ℤ \mathbb{Z}    °º˚ degree    ⟨〈 \langle    ⟩〉 \rangle    、٬ ,    ٫ .    ∶ :    ’‘′ '    ″ ''    “”„«» "
"""
SIGN_OF = {
    ord(sign): f" {written} " if written.isalpha() else written + " " * written.startswith("\\")
    for signs, written in zip(SIGNS.split()[::2], SIGNS.split()[1::2], strict=True)
    for sign in signs
}
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n", strict=True))
GREEK = "alpha beta gamma delta epsilon zeta eta theta lambda mu nu xi pi rho sigma tau phi chi psi omega"
GREEK_LETTERS = frozenset(GREEK.split())

HTML = re.compile(r"</?(?:b|i|em|strong|u|span|p|br|code|font|div|mark)(?:\s+\w+=[^<>]*)?\s*/?>", re.I)
HTML_RAISED = re.compile(r"<su([pb])>([^<>]*)</su\1>", re.I)
MONEY = "\ue000"  # holds the place of a dollar sign that stands for money
EMPHASIS = re.compile(r"^(\*+|_{2,}|`+)(.*[^\s*_`].*)\1$", re.S)

# Commands whose argument is the answer, and what is only looks.
WORDS = "text|textbf|textrm|textit|textsf|texttt|textnormal|emph|mbox|hbox|mathrm|operatorname|rm|underline"
UNWRAPPED = re.compile(
    rf"\\(?:{WORDS}|mathbf|mathsf|mathit|boldsymbol|bm|bf|boxed|fbox)\s*\{{((?:[^{{}}]|\^\s*\{{[^{{}}]*\}})*)\}}"
)
COLOUR = re.compile(r"\\(?:text|f)?color(?:box)?\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}")
LOOKS = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|boldmath|bf|it|rm|[bB]igg?[lr]?|[lL]arge|LARGE|huge)"
    r"(?![a-zA-Z])|\\(?:left|right)\s*\.|\\(?:left|right)(?![a-zA-Z])|\\!|\\tag\*?\{[^{}]*\}"
)
# Units in upright letters are no variables.
UPRIGHT = re.compile(
    rf"((?:[\d}})/]|\\pi|\\cdot)(?:\s|~|\\[,;: ])*)\\(?:{WORDS})"
    r"\s*\{((?:[a-zA-Z /.,\\-]|\^\s*(?:\d|\{-?\d\}))*)\}"
)
SYSTEM = re.compile(
    r"(?:\\left\s*)?(?:\\\{)?\s*\\begin\s*\{(cases|array|aligned|align|gathered|gather|equation|split)\*?\}"
    r"(?:\{[lcr|]*\})?(.*?)\\end\s*\{\1\*?\}(?:\s*\\right\s*\.)?",
    re.DOTALL,
)
LINES = re.compile(r"\\(?:begin|end)\s*\{(?:aligned|align|gathered|gather|equation|split)\*?\}|(?<!\\)&")
DELIMITERS = re.compile(r"(?<!\\)\\[\[\]()]")
SPACES = re.compile(r"(?<!\\)\\(?:[,;: ]|(?:quad|qquad|thinspace|hspace\*?\{[^{}]*\})(?![a-zA-Z]))|~")
# Other spellings of a command.
COMMANDS = {
    r"\\(?:[dtcs]|nice)frac(?![a-zA-Z])": r"\\frac",
    r"\\(?:leq|leqslant|le)(?![a-zA-Z])|<=|=<": r"\\le ",
    r"\\(?:geq|geqslant|ge)(?![a-zA-Z])|>=": r"\\ge ",
    r"\\lt(?![a-zA-Z])": "<",
    r"\\gt(?![a-zA-Z])": ">",
    r"\\(?:neq|ne|not\s*=)(?![a-zA-Z])|!=": r"\\ne ",
    r"\\div(?![a-zA-Z])": "/",
    r"\\[lc]?dots[cbm]?(?![a-zA-Z])|\.\.\.+": r"\\ldots ",
    r"\\(?:varnothing|O)(?![a-zA-Z])|\\\{\s*\\\}": r"\\emptyset ",
    r"\\l?brace(?![a-zA-Z])": r"\\{",
    r"\\rbrace(?![a-zA-Z])": r"\\}",
    r"\^\s*\{((?:\s*\\prime)+)\s*\}": r"\1",
    r"\s*\^?\s*\\prime(?![a-zA-Z])": "'",
    r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\(?:degree|textdegree)(?![a-zA-Z])": " degree ",
    r"\\(?:mathbb\s*\{R\}|mathbb R|R(?![a-zA-Z])|Reals)": r"(-\\infty,\\infty)",
    r"\b[bpBV]?matrix\}": "pmatrix}",
    r"\\dot\s*(?=\{\d)": r"\\overline",
    r"\\frac\s*\{\\(?:text|mathrm)\{([^{}]*)\}\}\s*\{\\(?:text|mathrm)\{([^{}]*)\}\s*"
    r"(\^\s*\d|\^\s*\{\d\})?\}": r" \1/\2\3",
    r"\((\d+)\)\s*_": r"\1_",
    r"(?i:\bper\s?cent(?:age)?\b|\bpct\b)|\\%|\\text\s*\{\\%\}": "%",
    r"\\(?:lvert|rvert|vert)(?![a-zA-Z])": "|",
    r"\\(?:mid)(?![a-zA-Z])": "|",
    r"\\(?:backslash|smallsetminus)(?![a-zA-Z])|(?<=[)}\]R])\s*[-\\]\s*(?=\\\{)": r"\\setminus ",
    r"\{\s*([^{}]+?)\s*\\choose\s*([^{}]+?)\s*\}|(\w+)\s*\\choose\s*(\w+)": r"\\binom{\1\3}{\2\4}",
    r"(\\equiv.*?)(?:\(\s*\\?mod\b|\\[pb]?mod(?![a-z]))\s*\{?\s*(\w+)\s*(?:\}|\)|$)": r"\1\\pmod{\2}",
    # Outward brackets leave the ends of an interval out.
    r"(^|[\s=,]|\\cup|\\in)\]([^\[\](){},;]+[,;][^\[\](),;]+)([\[\]])": r"\1(\2\3",
    r"([\[(](?:[^\[\](),;]|\\frac\{[^{}]*\}\{[^{}]*\})+[,;][^\[\](),;]+)\[(?=\s*(?:$|\\cup|,))": r"\1)",
    # Of a real variable nothing is said by this.
    r"\b[a-z]\s*\\in\s*(?:\\mathbb\s*\{R\}|\\mathbb R|\(-\\infty,\\infty\))\s*[,;]\s*(?=.*[<>=\\])"
    r"|(?<=[\d}])\s*,\s*[a-z]\s*\\in\s*(?:\\mathbb\s*\{R\}|\\mathbb R|\(-\\infty,\\infty\))$": "",
    r"\\(?:euro)(?![a-zA-Z])": "€",
    r"(?i:(?<=\d)\s*([ap])\.\s?m\.)": r" \1m",
    r"\\pounds(?![a-zA-Z])": "£",
}
# Functions and constants written as words.
NAMES = re.compile(
    r"(?<![\\a-zA-Z])(sqrt|infinity|infty|inf|oo|pi|theta|alpha|beta|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos"
    r"|tan|cot|sec|csc|log|ln|exp)(?=[\s\d(){}/*+^_\-,;.=\]]|$)"
)
NAME_OF = {"infinity": "infty", "inf": "infty", "oo": "infty"}

THOUSANDS_SPACE = re.compile(
    r"(?<![\d.,])([1-9]\d{0,2})((?:(?:\\[,;:! ]| |~|\{,\}|'|\{\\,\}) ?\d{3})+)(?![\d'])"
)
SCIENTIFIC = re.compile(r"(?<![\w.}])([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d+)(?!\w|\.\d)")
TIMES_TEN = re.compile(r"(?<=\d)\s*(?:[xX*]|\\cdot)\s*(?=10\s*\^)")
# In euros, a comma before two digits is a decimal point.
EURO_CENTS = re.compile(r"(?<=€)(\s*\d+),(\d\d)(?![\d,.])|(?<![\d,.])(\d+),(\d\d)(?=\s*(?:€|euros?\b))")
POWER = re.compile(r"([\^_])\s*([+-]?(?:\d+(?:\.\d+)?|\.\d+))")
IN_BRACES = re.compile(r"(?<=[a-zA-Z}\]]\{)\d{1,3}(?:,\d{3})+(?=\})")
# The constant of an integral, whatever its name, behind a formula with one variable.
CONSTANT = re.compile(
    r"((?:[^a-zA-Z]|\\[a-zA-Z]+|(?<![a-zA-Z])([txyzu])(?![a-zA-Z]))*)\+\s*(?:[cCkK]|const(?:ant)?\.?)"
)
NAMED = {
    name: r"(-\infty,\infty)" for name in ("all real numbers", "all reals", "the set of all real numbers")
}
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
ONES += " seventeen eighteen nineteen"
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBER_WORDS = {word: i for i, word in enumerate(ONES.split())}
NUMBER_WORDS |= {word: 10 * i for i, word in enumerate(TENS.split(), 2)}
NUMBER_WORD = re.compile(
    rf"(?i)(?:({TENS.replace(' ', '|')})[\s-]+({ONES.replace(' ', '|')})|({'|'.join(NUMBER_WORDS)}))(?![\w-])"
)


@lru_cache(maxsize=4096)
def normalise(text: str) -> str:
    """Return an answer in one notation: ASCII digits and signs, plain LaTeX, no markup, single spaces."""
    text = read_markup(read_characters(text))
    text = read_latex(text)
    text = read_words(read_numbers(text))
    return tidy_ends(re.sub(r"(\\[a-zA-Z]+) (?=[{\[])", r"\1", " ".join(text.split())))


def read_characters(text: str) -> str:
    """Return a text with every digit, letter and sign of Unicode in its plain form."""
    text = "".join(char for char in unicodedata.normalize("NFC", text) if not is_invisible(char))
    text = re.sub(f"[{''.join(RAISED)}]+", lambda m: f"^{{{''.join(map(RAISED.__getitem__, m[0]))}}}", text)
    text = re.sub(f"[{''.join(LOWERED)}]+", lambda m: f"_{{{''.join(map(LOWERED.__getitem__, m[0]))}}}", text)
    return "".join(map(read_character, text)).translate(SIGN_OF)


def is_invisible(char: str) -> bool:
    """Return whether a character is a control, half a surrogate pair, or only formats other characters."""
    return "\ufe00" <= char <= "\ufe0f" or (
        unicodedata.category(char) in ("Cf", "Cs", "Cc") and char not in "\n\t"
    )


def read_character(char: str) -> str:
    """Return one character as ASCII digits, a command of a Greek letter, or in its plain form."""
    if char.isascii() or ord(char) in SIGN_OF:
        return SIGN_OF.get(ord(char), char)
    plain, name = unicodedata.normalize("NFKC", char), unicodedata.name(char, "")
    if "FRACTION" in name and plain.count("⁄") == 1:
        return r"\frac{{{}}}{{{}}}".format(*plain.split("⁄"))
    letter = name.removeprefix("GREEK SMALL LETTER ").lower().replace("lamda", "lambda")
    if letter in GREEK_LETTERS:
        return rf"\{letter} "
    return "".join(str(unicodedata.decimal(part, part)) for part in plain)


def read_markup(text: str) -> str:
    """Return a text without Markdown's emphasis, HTML's tags and the signs around formulas."""
    text = HTML_RAISED.sub(lambda m: f"{'^' if m[1] in 'pP' else '_'}{{{m[2]}}}", text)
    text = HTML.sub(" ", text).strip()
    while match := EMPHASIS.match(text):
        text = match[2].strip()
    text = re.sub(r"(?<=[\w)])\s*\*\*\s*(?=[\w(-])", "^", text).replace("**", " ")
    text = DELIMITERS.sub(" ", text)
    text = text.replace(r"\$", f" {MONEY} ")
    # A single dollar sign before a number is money; others stand around a formula.
    if text.count("$") == 1:
        text = re.sub(r"\$(?=\s*[\d.])", f" {MONEY} ", text)
    return text.replace("$", " ").replace(MONEY, "$")


def read_latex(text: str) -> str:
    """Return a text with one spelling of every command, and without the commands for its looks."""
    text = UPRIGHT.sub(spell_units, SYSTEM.sub(read_system, text))
    if not re.search(r"matrix|array|cases", text):
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", LINES.sub("", text))
    text = COLOUR.sub("", LOOKS.sub("", text))
    for pattern, written in COMMANDS.items():
        text = re.sub(pattern, written, text)
    while (unwrapped := UNWRAPPED.sub(r" \1 ", text)) != text:
        text = unwrapped
    text = THOUSANDS_SPACE.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), text)
    text = SPACES.sub(" ", text)
    text = NAMES.sub(lambda m: rf"\{NAME_OF.get(m[1], m[1])} ", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = re.sub(r"(\\sqrt\s*(?:\[\d+\])?)\s*(\d+(?:\.\d+)?|[a-zA-Z])", r"\1{\2}", text)
    for command in (r"\\sqrt\s*(?:\[\d+\])?\s*", r"\^\s*"):
        text = brace_arguments(text, re.compile(rf"({command})\("))
    return text


def read_system(match: re.Match[str]) -> str:
    """Return the lines of a system of equations as a list, and any other block as it is."""
    text = re.sub(r"\s*&\s*(?==|<|>|\\[lgn]e)|(?<=[=<>])\s*&", "", match[2])
    # In text that was escaped twice, `\\frac` begins no line.
    lines = re.split(r"\\\\(?:\[[^\]]*\])?(?![dt]?frac|sqrt|text|pi|left|right)", text)
    lines = [line.strip(" ,.;\n") for line in lines if line.strip()]
    if "&" in text or not all(re.search(r"[=<>]|\\[lgn]e", line) for line in lines):
        return match[0]
    return re.sub(r",\s*=", " =", ", ".join(lines))


def spell_units(match: re.Match[str]) -> str:
    """Return the short units of a text outside braces as words, which are no variables."""
    before = match.string[: match.end(1)]
    if before.count("{") != before.count("}"):
        return match[0]
    return f"{match[1]} " + re.sub(r"[a-zA-Z]+", lambda m: LONG.get(m[0], m[0]), match[2])


def read_words(text: str) -> str:
    """Return a text with its number words, constants of integrals and names of sets in one form."""
    text = text.strip()
    if match := NUMBER_WORD.match(text):
        number = sum(NUMBER_WORDS[word.lower()] for word in match.groups() if word)
        text = f"{number}{text[match.end() :]}"
    if (match := CONSTANT.fullmatch(text)) and match[2]:
        text = f"{match[1]}+C"
    return NAMED.get(text.strip(" .").casefold(), text)


def brace_arguments(text: str, opening: re.Pattern[str]) -> str:
    """Replace the parentheses after a command by braces, as in `sqrt(2)`."""
    start = 0
    while match := opening.search(text, start):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        start = match.end()
        if not depth:
            text = f"{text[: match.start()]}{match[1]}{{{text[match.end() : end - 1]}}}{text[end:]}"
    return text


def read_numbers(text: str) -> str:
    """Return a text with one notation of powers of ten, exponents and decimal points."""
    text = SCIENTIFIC.sub(lambda m: rf"{m[1]}\times 10^{{{int(m[2])}}}", text)
    text = EURO_CENTS.sub(lambda m: f"{m[1] or m[3]}.{m[2] or m[4]}", text)
    text = TIMES_TEN.sub(r"\\times ", text)
    text = IN_BRACES.sub(lambda m: m[0].replace(",", ""), text)
    return POWER.sub(r"\1{\2}", text)


def tidy_ends(text: str) -> str:
    """Return a text without the punctuation around it, and without braces around all of it."""
    ends = " \n\t*`;:。,"  # quotes only if they are opened: others are primes
    text = text.strip(ends + "\"'" if text.lstrip(ends)[:1] in ("'", '"') else ends)
    text = text.removeprefix("=").removeprefix(r"\approx").strip()
    if not text.endswith(r"\ldots"):
        text = text.rstrip(".。;,: ")
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:-1] and "}" not in text[1:-1]:
        text = text[1:-1].strip()
    return text
