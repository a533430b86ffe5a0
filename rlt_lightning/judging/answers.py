"""Find the answer in a response and decide whether it is right: plain functions on bounded texts.

Functions that may hang or crash run in the processes of `rlt_lightning.judging.judge`.
"""

from __future__ import annotations

import ast
import logging
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from rlt_lightning.tags import R1, STRATOS
from rlt_lightning.types import InputError

AnswerKind = Literal["math", "choice", "countdown"]
# A row with `answer` or `solution`, `kind` and, for countdown, `numbers` and `target`.
Reference = Mapping[str, Any]

# A boxed answer is searched in this many characters, at the end of a solution or a response.
BLOCK_CHARS = 20_000
# Longest answer; without a box, this many characters at the end are searched.
ANSWER_CHARS = 1_000
# Boxes to try, from the end, since the last ones may never be closed.
MAX_BOXES = 20
# Longest expression of Countdown.
EXPRESSION_CHARS = 200
LETTERS = "ABCD"

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
FINAL_LINE = re.compile(r"^#### *(.+)$", re.MULTILINE)  # as GSM8K's solutions end
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textrm|textit|mathbf|mathrm|boldsymbol)\s*\{([^{}]*)\}")
PLAIN_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+")
SINGLE_LETTER = re.compile(rf"\W*([{LETTERS}])(?:\W*$|[).:,\]}}].*$)", re.DOTALL)
NAMED_LETTER = re.compile(
    rf"(?i:answer|option|choice)(?i:\s+is|\s+must\s+be)?[\s:*(${{\\]*(?:\\\w+\{{)?\(?([{LETTERS}])\b"
)
# As tasks/countdown.py writes its questions.
COUNTDOWN_QUESTION = re.compile(
    r"Make (\d+) from the numbers ([\d, and]+)\. Use each of the numbers exactly once"
)
EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
SIGNS: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def solution_block(response: str, solution_open: str, solution_close: str) -> str:
    """Return the end of the text after the last opening tag, or of the whole response without such a tag."""
    _, opened, block = response.rpartition(solution_open)
    if opened:
        block = block.partition(solution_close)[0]
    return block[-BLOCK_CHARS:]


def marked_answer(text: str) -> str | None:
    """Return the last boxed answer or, without one, the last one after `####`; None without either."""
    for box in list(BOX.finditer(text))[: -MAX_BOXES - 1 : -1]:
        if (answer := read_braces(text, box.end())) is not None:
            return answer.strip()
    lines = FINAL_LINE.findall(text)
    return lines[-1].strip()[:ANSWER_CHARS] if lines else None


def read_braces(text: str, start: int) -> str | None:
    """Return the text from `start`, just after an opening brace, to the brace that closes it.

    Returns:
        None if no brace closes it within `ANSWER_CHARS`.
    """
    depth, escaped = 1, False
    for end in range(start, min(len(text), start + ANSWER_CHARS)):
        depth += 0 if escaped else {"{": 1, "}": -1}.get(text[end], 0)
        # The second backslash of a matrix's line break escapes nothing.
        escaped = text[end] == "\\" and not escaped
        if depth == 0:
            return text[start:end]
    return None


def chosen_letter(text: str) -> str | None:
    """Return the chosen option: a boxed letter, else one called the answer, else the last line's first."""
    marked = marked_answer(text)
    if marked is not None:
        single = SINGLE_LETTER.match(TEXT_COMMAND.sub(r"\1", marked))
        return single.group(1) if single else None
    end = text[-ANSWER_CHARS:].rstrip()
    named = NAMED_LETTER.findall(end)
    if named:
        return str(named[-1])
    single = SINGLE_LETTER.match(end.rpartition("\n")[2])
    return single.group(1) if single else None


def arithmetic_expression(text: str) -> str | None:
    """Return the arithmetic expression at the end of a response, in Python's operators; None without one.

    The expression is safe to evaluate: it is short, and holds only digits, parentheses and + - * /, no power.
    """
    marked = marked_answer(text)
    lines = text[-ANSWER_CHARS:].strip().splitlines() or [""]
    words = lines[-1].rpartition(":")[2] if marked is None else marked
    for sign, plain in ((r"\times", "*"), (r"\cdot", "*"), ("×", "*"), (r"\div", "/"), ("÷", "/")):
        words = words.replace(sign, plain)
    words = words.replace("−", "-").replace(r"\left", "").replace(r"\right", "").replace("$", "")
    expression = words.partition("=")[0].strip().removesuffix(".").strip()
    usable = EXPRESSION.fullmatch(expression) and len(expression) <= EXPRESSION_CHARS
    usable = usable and not re.search(r"\*\s*\*|/\s*/", expression)
    return expression if usable else None


def reference_answer(row: Mapping[str, Any]) -> str | None:
    """Return the right answer of a row: its `answer` or, without one, the marked answer of its `solution`.

    An `answer` may be a whole worked solution, such as GSM8K's, which ends in `#### 18`. A number loses the
    decimals that only its storage added: 27.0 becomes 27.
    """
    answer = row.get("answer")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    text = "" if answer is None else str(answer).strip()
    if "####" in text or BOX.search(text):
        return marked_answer(text[-BLOCK_CHARS:])
    return text or marked_answer(str(row.get("solution") or "")[-BLOCK_CHARS:])


def tidy(answer: str) -> str:
    """Remove a full stop after an answer, and commands such as `\\textbf{(073)}` around a number."""
    answer = answer.strip().rstrip(".,; ")
    bare = TEXT_COMMAND.sub(r"\1", answer).strip(" ()")
    return bare if PLAIN_NUMBER.fullmatch(bare) else answer


def ends_with_answer(text: str, reference: Reference) -> bool | None:
    """Return whether a text ends with the right answer; None if no quick rule can say.

    Of a number, the text's last number, or its boxed one, must be equal; of a Countdown problem, known by
    its columns or by its `question`, the expression at the end must solve it. It starts no process, so that
    every run can count the right explanations among thousands. `Judge` also compares expressions.
    """
    for tags in (STRATOS, R1):
        text = solution_block(text, tags.solution_open, tags.solution_close)
    if (problem := read_countdown(reference)) is not None:
        expression = arithmetic_expression(text)
        return expression is not None and solves_countdown(expression, *problem)
    answer = reference_answer(reference) if reference.get("kind", "math") == "math" else None
    if answer is None or not PLAIN_NUMBER.fullmatch(wanted := tidy(answer)):
        return None
    marked = marked_answer(text)
    found = PLAIN_NUMBER.findall(text[-ANSWER_CHARS:]) if marked is None else [tidy(marked)]
    last = found[-1] if found else ""
    if not PLAIN_NUMBER.fullmatch(last):
        return False
    return Fraction(last.replace(",", "")) == Fraction(wanted.replace(",", ""))


def read_countdown(reference: Reference) -> tuple[list[int], int] | None:
    """Return numbers and target of a Countdown problem, by its columns or question; None if it is none."""
    if reference.get("kind") == "countdown" and {"numbers", "target"} <= reference.keys():
        return [int(number) for number in reference["numbers"]], int(reference["target"])
    found = COUNTDOWN_QUESTION.match(str(reference.get("question") or ""))
    return ([int(number) for number in re.findall(r"\d+", found[2])], int(found[1])) if found else None


def require_answer(reference: Reference) -> str:
    """Return the answer of a reference.

    Raises:
        InputError: If the reference has none.
    """
    answer = reference_answer(reference)
    if answer is None:
        raise InputError(
            "A reference must have an `answer`, or a `solution` with a \\boxed{} one, but this has "
            f"only the columns {', '.join(map(str, reference)) or 'of an empty row'}. Add an answer."
        )
    return answer


def equals_reference(reference: str, answer: str, marked: bool) -> tuple[bool, str | None]:
    """Return whether an answer is mathematically equal to the reference, and the answer that was found.

    Args:
        reference: The right answer.
        answer: The marked answer, or a text to find the answer in.
        marked: Whether `answer` is a marked one.
    """
    from math_verify import verify

    parsed = parse_answer(answer) if marked else parse_text(answer)
    found = answer if marked else next((part for part in parsed if isinstance(part, str)), None)
    return bool(verify(parse_answer(reference), parsed, timeout_seconds=None)), found


def equivalence_classes(answers: list[str]) -> list[int]:
    """Number answers so that equivalent ones share a number: the index of the first of them."""
    from math_verify import verify

    firsts: list[int] = []
    numbers = []
    for i, answer in enumerate(answers):
        parsed = parse_answer(answer)
        same = (j for j in firsts if verify(parse_answer(answers[j]), parsed, timeout_seconds=None))
        number = next(same, i)
        firsts += [i] if number == i else []
        numbers.append(number)
    return numbers


def solves_countdown(expression: str, numbers: list[int], target: int) -> bool:
    """Return whether an `arithmetic_expression` has the target as its value and uses each number once."""
    try:
        value, used = exact_value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return False
    return value == target and sorted(used) == sorted(numbers)


def exact_value(node: ast.AST) -> tuple[Fraction, list[int]]:
    """Return the value of parsed arithmetic with + - * /, and the numbers that it uses.

    Raises:
        SyntaxError: If there is anything else in it, such as the call `(95)(21)`.
        ZeroDivisionError: If it divides by 0.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value), [node.value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        value, used = exact_value(node.operand)
        return SIGNS[type(node.op)](value), used
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        (left, some), (right, others) = exact_value(node.left), exact_value(node.right)
        return OPERATORS[type(node.op)](left, right), some + others
    raise SyntaxError(f"no arithmetic: {ast.unparse(node)}")


@lru_cache(maxsize=4096)
def parse_answer(answer: str) -> list[Any]:
    """Parse an answer with math_verify: into an expression, if possible, and its normalised text."""
    return parse_text(f"\\boxed{{{tidy(answer)}}}")


def parse_text(text: str) -> list[Any]:
    """Find and parse an answer in a text with math_verify."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # It warns that it has no time limit; the judge has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return list(parse(text, kinds, parsing_timeout=None))
