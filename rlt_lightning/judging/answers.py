"""Where the answer of a response is, and whether it is right: plain functions, bounded in what they look at.

Light to import, since those that may hang or crash run in the processes of `rlt_lightning.judging.judge`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

from rlt_lightning.types import InputError

Kind = Literal["math", "choice", "countdown"]
Reference = Mapping[str, Any]  # a row: `answer` or `solution`; `kind`; for countdown `numbers` and `target`

BLOCK_CHARS = 20_000  # of a solution, or of the end of a response: a boxed answer is looked for in these
ANSWER_CHARS = 1_000  # of an answer; and of the end that is searched where nothing is boxed
MAX_BOXES = 20  # tried from the end, since the last ones may never be closed
EXPRESSION_CHARS = 200  # of a Countdown answer
LETTERS = "ABCD"

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
FINAL_LINE = re.compile(r"^#### *(.+)$", re.MULTILINE)  # as GSM8K's solutions end
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textrm|textit|mathbf|mathrm|boldsymbol)\s*\{([^{}]*)\}")
PLAIN_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+")
LETTER_ALONE = re.compile(rf"\W*([{LETTERS}])(?:\W*$|[).:,\]}}].*$)", re.DOTALL)
LETTER_NAMED = re.compile(
    rf"(?i:answer|option|choice)(?i:\s+is|\s+must\s+be)?[\s:*(${{\\]*(?:\\\w+\{{)?\(?([{LETTERS}])\b"
)
ARITHMETIC = re.compile(r"[0-9+\-*/() ]+")


def solution_block(response: str, solution_open: str, solution_close: str) -> str:
    """The text between the last solution tags, closed or not; without any, the whole response; its end."""
    _, opened, block = response.rpartition(solution_open)
    if opened:
        block = block.partition(solution_close)[0]
    return block[-BLOCK_CHARS:]


def marked_answer(text: str) -> str | None:
    """The last answer that is boxed or, without one, that stands after `####`; None without either."""
    for box in list(BOX.finditer(text))[: -MAX_BOXES - 1 : -1]:
        if (answer := braced(text, box.end())) is not None:
            return answer.strip()
    lines = FINAL_LINE.findall(text)
    return lines[-1].strip()[:ANSWER_CHARS] if lines else None


def braced(text: str, start: int) -> str | None:
    """The text from `start` to the brace that closes what was opened before; None without, or too far off."""
    depth, escaped = 1, False
    for end in range(start, min(len(text), start + ANSWER_CHARS)):
        depth += 0 if escaped else {"{": 1, "}": -1}.get(text[end], 0)
        escaped = text[end] == "\\" and not escaped  # a line break of a matrix escapes nothing
        if depth == 0:
            return text[start:end]
    return None


def chosen_letter(text: str) -> str | None:
    """The letter that a response ends up with: boxed, else called the answer, else alone in the last line."""
    marked = marked_answer(text)
    if marked is not None:
        alone = LETTER_ALONE.match(TEXT_COMMAND.sub(r"\1", marked))
        return alone.group(1) if alone else None
    end = text[-ANSWER_CHARS:].rstrip()
    named = LETTER_NAMED.findall(end)
    if named:
        return str(named[-1])
    alone = LETTER_ALONE.match(end.rpartition("\n")[2])
    return alone.group(1) if alone else None


def arithmetic_expression(text: str) -> str | None:
    """The arithmetic expression that a response ends up with, in Python's operators; None if it has none.

    What is returned may be evaluated: digits, parentheses and + - * / alone, neither powers nor long.
    """
    marked = marked_answer(text)
    lines = text[-ANSWER_CHARS:].strip().splitlines() or [""]
    words = lines[-1].rpartition(":")[2] if marked is None else marked
    for sign, operator in ((r"\times", "*"), (r"\cdot", "*"), ("×", "*"), (r"\div", "/"), ("÷", "/")):
        words = words.replace(sign, operator)
    words = words.replace("−", "-").replace(r"\left", "").replace(r"\right", "").replace("$", "")
    expression = words.partition("=")[0].strip().removesuffix(".").strip()
    usable = ARITHMETIC.fullmatch(expression) and len(expression) <= EXPRESSION_CHARS
    usable = usable and not re.search(r"\*\s*\*|/\s*/", expression)
    return expression if usable else None


def reference_answer(row: Mapping[str, Any]) -> str | None:
    """The right answer of a row: its `answer` or, without one, the marked answer of its `solution`.

    An `answer` may be a whole worked solution, such as GSM8K's, which ends in `#### 18`. Numbers lose what
    only their storage has added: 27.0 is 27.
    """
    answer = row.get("answer")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    text = "" if answer is None else str(answer).strip()
    if "####" in text or BOX.search(text):
        return marked_answer(text[-BLOCK_CHARS:])
    return text or marked_answer(str(row.get("solution") or "")[-BLOCK_CHARS:])


def tidy(answer: str) -> str:
    """An answer without the marks around it: a full stop, or `\\textbf{(073)}` around a number."""
    answer = answer.strip().rstrip(".,; ")
    bare = TEXT_COMMAND.sub(r"\1", answer).strip(" ()")
    return bare if PLAIN_NUMBER.fullmatch(bare) else answer


def require_answer(reference: Reference) -> str:
    """The answer of a reference.

    Raises:
        InputError: If it has none.
    """
    answer = reference_answer(reference)
    if answer is None:
        raise InputError(
            "A response can be judged by a reference with an `answer`, or a `solution` with a \\boxed{} one, "
            f"but this has only the columns {', '.join(map(str, reference)) or 'of an empty row'}. Add it."
        )
    return answer


def require_reasoning_gym() -> None:
    """Say how to install the checker of Countdown, if it is not."""
    if find_spec("reasoning_gym") is None:
        raise InputError(
            "Countdown needs the package reasoning-gym, but it is not installed. Run pip install -e "
            "'.[countdown]' (it needs a C compiler)."
        )


def equals_reference(reference: str, answer: str, marked: bool) -> tuple[bool, str | None]:
    """Whether an answer is mathematically the reference, and the answer that was found.

    Args:
        reference: The right answer.
        answer: What was marked as the answer or, without a mark, the text that it is looked for in.
        marked: Which of the two.
    """
    from math_verify import verify

    parsed = parse_answer(answer) if marked else parse_text(answer)
    found = answer if marked else next((part for part in parsed if isinstance(part, str)), None)
    return bool(verify(parse_answer(reference), parsed, timeout_seconds=None)), found


def equivalence_classes(answers: list[str]) -> list[int]:
    """Number answers so that equivalent ones have the same number: that of the first that they equal."""
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
    """Whether reasoning-gym's checker gives an expression of `arithmetic_expression` the full score."""
    from sympy import parse_expr

    score = countdown_checker().score_answer(expression, {"metadata": {"numbers": numbers, "target": target}})
    return bool(score == 1.0 and parse_expr(expression) == target)  # it takes 999999 for 1000001


@lru_cache(maxsize=1)
def countdown_checker() -> Any:
    """The data set whose method is the checker; it makes no problems until it is asked for one."""
    from reasoning_gym.games.countdown import CountdownConfig, CountdownDataset

    return CountdownDataset(CountdownConfig(size=1, seed=0))


@lru_cache(maxsize=4096)
def parse_answer(answer: str) -> list[Any]:
    """math_verify's reading of an answer: an expression where it can be read, and its normalised text."""
    return parse_text(f"\\boxed{{{tidy(answer)}}}")


def parse_text(text: str) -> list[Any]:
    """Likewise of the answer in a text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we, not it, keep the time
    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return list(parse(text, kinds, parsing_timeout=None))
