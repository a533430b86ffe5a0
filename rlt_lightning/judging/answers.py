r"""Find the answer in a response and in a row: plain functions on bounded texts, quick in any process.

    response ─ solution_block ─▶ solution ─ find_answer, find_letter ─▶ answer, or None
    row ─ read_reference ─▶ reference, or why no answer can ever be right

The answer is read from the first of these that the solution has:

1. The last box that is not empty, joined with boxes before it if only `and`, `or`, a comma or a name lies
   between. If boxes are opened and none is closed, there is no answer.
2. The last `<answer>…</answer>`.
3. The last line of `####` and a number, as GSM8K's solutions end. Other lines of `#` are headings.
4. What follows the last "answer is", "Answer:", "答案是" and their like, if it begins with a value.
5. The last formula between dollar signs, or the last number, whichever ends later.

The answer to a multiple-choice question is a letter from A to J: in the last box, `<answer>` or `####` line
that holds one; else after the last "answer is"; else one that is called right or chosen; else at the start of
the last line. A box with a formula is passed over. Where several letters stand, there is no answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from importlib import metadata
from typing import Any, Literal

from rlt_lightning.judging.compare import same_answer, same_numbers
from rlt_lightning.judging.normalise import normalise, read_characters
from rlt_lightning.judging.quantities import LONG, read_quantity
from rlt_lightning.run import __version__
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import BadRowError, BadRowReason, InputError

AnswerKind = Literal["math", "choice", "countdown"]
# A row with `answer` or `solution`, `kind` and, for countdown, `numbers` and `target`.
Reference = Mapping[str, Any]
# What figures that depend on judging say of it.
JUDGE_VERSION = f"rlt_lightning {__version__}, math-verify {metadata.version('math-verify')}"

# A boxed answer is searched in this many characters, at the end of a solution or a response.
BLOCK_CHARS = 20_000
# Longest answer; without a box, this many characters at the end are searched.
ANSWER_CHARS = 1_000
# Boxes to try, from the end, since the last ones may never be closed.
MAX_BOXES = 20

BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
# What `\boxed 7` and `\boxed\frac12` hold.
BARE_BOX = re.compile(
    r"-?(?:\\[dt]?frac(?:\s*(?:\d|\{[^{}]*\})){2}|\\sqrt\s*\d|\\[a-zA-Z]+(?:\{[^{}]*\})*"
    r"|\([^()\s]*\)|\d[\d.,/]*|[a-zA-Z]+)"
)
# Between two boxes that are one answer.
BETWEEN_BOXES = re.compile(
    r"[\s,;]*(?:,|;|\band\b|\bor\b|和|或)[\s,;]*(?:(?:and|or)\s*)?(?:[a-zA-Z]\w*\s*=\s*)?", re.I
)
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
HASHES = re.compile(r"^####(?!#) *(.+)$", re.MULTILINE)
FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
# A number in prose with all that belongs to it, as in 1.5 x 10^8, (2, -3), 3:4 or 25 cm^2; and what stands
# around the parts of a formula, of which none is an answer.
NUMERAL = (
    r"(?:(?<![\w).])-\s?)?(?<![A-Za-z\d.])[$€£¥₹]?"
    r"(?:\\frac\{\d+\}\{\d+\}|(?:\d[\d,]*)?\\sqrt\s?\{?\d+\}?|\d(?:,?\d)*(?:\.\d+)?(?:e[+-]?\d+)?|\.\d+)"
    r"(?:\s?\\pi(?![a-z]))?"
)
EXPONENT = r"\s?\^\s?(?:\{-?\d+\}|-?\d+)"
LAST_NUMBER = re.compile(
    rf"[(\[]\s*{NUMERAL}(?:\s*[,;]\s*{NUMERAL})+\s*[)\]]|(?<![\w.])\d+(?:\s?:\s?\d+)+|{NUMERAL}"
    rf"(?:\s?(?:[x*]|\\times|\\cdot)\s*10(?=\s?\^))?(?:{EXPONENT})?(?:/\d+|\s\d+/\d+)?(?:\s?\\?%)?"
    rf"(?:(?:\s?[a-zA-Z]+(?:/[a-zA-Z]+)?{EXPONENT})+)?",
    re.I,
)
FORMULA_BEFORE = re.compile(
    r"(?:[<>^*/+_±]|\\[a-z]+|(?:\w|\))-|(?:[\d)]|\b[a-z])\s*-\s*|\d\s|_\{?\w+\}?\s"
    r"|(?:\bnot|n't|\bnever|\bthan|\bat\s(?:least|most)|\bno\s\w+\sfor(?:\s\w\s=)?|\bunless\s\w\s="
    r"|\d\s+(?:to|in|of|out\sof|by|choose)"
    r"|\b(?:half|thirds?|quarters?|percent|squares?|roots?|cubes?|reciprocal|inverse|negative|opposite)\sof"
    r"|\b(?:negative|twice|thrice|double|triple|half)"
    r"|\b(?:minus|plus|times|over|mod|base|log|ln|sqrt|sin|cos|tan|step|problem|question|part|equation|section"
    r"|case|figure|page|example))\s)\s*$",
    re.I,
)
FORMULA_AFTER = re.compile(
    r"\s*(?:[<>+*^_=]|\\[a-z]+|[-/]\s*\d|-\s*[a-z]\b)|[a-z_({]|!\s*[.,;=)]"
    r"|\s+(?:squared|cubed|factorial|recurring|repeating|doubled|tripled|halved|percent\s+of)\b",
    re.I,
)
NUMBER_DENIED = re.compile(
    r"\s(?:cannot|(?:ca|is|does|wo)n't|(?:does|will)\snot)\b|(?:,?\s(?:which|but\s\w+))?\s(?:is|was|would\sbe)"
    r"\s(?:not|too|impossible|wrong|incorrect|false|invalid|excluded|rejected)\b",
    re.I,
)
# Between numbers that are one answer, from the last one back.
BETWEEN_NUMBERS = re.compile(r"(?:\s*[a-z]*\s*,?\s*(?:and|or)|\s*,)\s+(?:[a-z]\w?\s*=\s*)?", re.I)
EMPHASIS = re.compile(
    r"(?<!\w)\*+(?=[\w$(\\-])|(?<=[\w)%$.:])\*+(?!\w)|\b\d+\s?\\?% (?:sure|certain|confident)\b"
)
# What is only said beside a value at the end of a text.
REMARK = re.compile(
    rf"((?:=|\b(?:is|are|equals?|be)\b)\s*(?:about\s|exactly\s)?(?:{LAST_NUMBER.pattern})(?:\s[a-z]+){{0,2}}?)"
    r",?\s+(?:because|since|as|i\.\s?e\.|that is|which|so that)(?:[^\n.]|\.(?=\d))*\.?\s*$"
    r"|\s\((?=[^()]*[a-z]{2})[^()]*\)\W*$",
    re.I,
)
# Before a box, or a letter, that is not the answer.
DENIED_BEFORE = re.compile(
    r"(?i)(?:\bnot|n't|\bnever|\bcannot|\b(?:incorrect|wrong|mistake|error|mistaken)\sto)"
    r"(?:\s(?:be|equal|to|choose|select|pick|is))*[\s$(\\\[:]*$"
)
# A box is taken back, and another value follows.
TAKEN_BACK = re.compile(
    r"(?i)\b(?:I|we)(?:'ve|\s+have)?\s+made\s+an?\s+(?:\w+\s)?(?:mistake|error)\b"
    r"|\b(?:it|answer|result)\s+should\s+(?:actually\s|instead\s|really\s)?"
    r"(?:be|have been)\s(?!noted|clear|checked)"
    r"|\A\W*(?:(?:wait|no|oops|sorry|actually|hold on)\b\W*)*"
    r"(?:correction\b|(?:that|this|it)(?:'s| is| was) (?:wrong|incorrect|not right|not correct)"
    r"|(?:that|this|it) (?:is|was)n't (?:right|correct))"
)
# What announces an answer, in the languages that models answer in.
ANNOUNCED = re.compile(
    r"\b[Aa]ns\.(?=\s*\(?[A-Ja-j]\b|\s*[$\\\d-])|(?i:\bans(?:wers?)?(?:\s+choice)?(?:\s+(?:to|of|for)\b[^.\n]{0,60}?)?\W{0,4}"
    r"\s*(?:(?:is|are|was|would be|should be|must be|will be)\b|[:=]))"
    r"|(?:答案|答え|正解|결과|정답|답|उत्तर|الجواب|الإجابة)\s*(?:应该是|应为|是|为|は|은|는|이|هي|هو|:|：)+"
    r"|故?选\s*(?:择)?\s*(?:是|为)?[:：]?"
    r"|(?i:\b(?:respuesta|resposta|risposta|réponse|antwort|antwoord|odpowiedź|cevap|đáp án|ответ)(?:\s+\w+)?"
    r"\s*(?:(?:es|é|è|est|ist|lautet)\b|[:=—–-]))"
)
# What is said of an answer, and is none.
SAID = re.compile(
    r"(?i)(?:not|n't|correct|right|wrong|clear|obvious|unique|found|given|obtained|as follows|here|below)\b"
)
MAX_WORDS = 6  # of an answer in words
# What may stand between that and the answer, or the letter.
FILLER = re.compile(
    r"(?:[\s:：*_\"“”]|\bis\b|(?i:\b(?:therefore|thus|then|hence|so|clearly|simply|just|indeed|likely|most|probably"
    r"|definitely|equal to|now|also|about|approximately|given by|option|choice|letter|the|la|el|le|die|one"
    r"|number|value)\b,?))*"
)
LETTER_FILLER = re.compile(rf"(?:{FILLER.pattern}|[${{\[]|\\(?:text\w*|math\w+|bf|\(|\[)(?![a-zA-Z]))*")
SENTENCE_END = re.compile(
    r",?\s(?:i\.\s?e\.|e\.g\.|that is,|namely)"
    r"|[.!?](?=\s|$)|[。！？\n]|,?\s(?:because|since|as|which|so|where|for|with)\s"
    r"|,\s(?:but\s)?not\s|\s\((?=an?\s[a-z]{2}|that is\b|i\.e)|입니다|です"
)

# What makes a letter before it a variable: E = mc^2 is no option.
OPERATION = r"\s+(?:[=<>^]|\\(?:[lg]e|ne|approx|in|cdot|times|cup|cap|pm)(?![a-z]))"
LETTER = rf"(?:\(\s*[A-Ja-j]\s*\)|[A-J](?![A-Za-z0-9_'’+/=^]|\*\w|{OPERATION}))"
ANY_LETTER = re.compile(rf"{LETTER}|[a-j](?=\s*(?:[).,;:*$}}]|$))")
MORE_LETTERS = re.compile(
    r"\W{0,3}\s*(?:,|/|&|\+|and\b|or\b|、|和|或)\s*(?:and|or)?\s*(?:\(?[A-J](?!\w)|\([a-j]\))"
)
# A and I are words, too.
WORD_FOLLOWS = re.compile(r"\s+(?!(?:because|since|as|which|with|for|and|is|so|or|but|not|by)\b)[a-z]+")
CALLED_WRONG = re.compile(
    r"\W{0,3}\s(?:which\s)?(?:(?:is|was)\s(?:not|wrong|incorrect|false)|cannot|can't|isn't|fails)\b"
    r"|\W{1,4}(?i:no|wait|oops|sorry|correction|actually|hold on)\b"
)
ONE_LETTER = re.compile(
    r"(?i:(?:the\s+)?(?:correct\s+|right\s+)?(?:option|choice|answer)\b\W*(?:is\b)?)?\W*([A-Ja-j])(?P<rest>.*)",
    re.DOTALL,
)
SEVERAL = re.compile(r"\W*[A-J](?:\W*(?:and\b|or\b)?\W*[A-J])+\W*")
CALLED_RIGHT = re.compile(
    r"(?i:\b(?:correct|right|best)\s+(?:option|choice|one|letter)\W*(?:is|:)\W*(?:option\s+)?"
    rf"|\b(?:choose|select|pick)\s+(?:option\s+|choice\s+)?)\W{{0,3}}({LETTER})"
    rf"|\b(?:[Oo]ption|[Cc]hoice)?\s*(?<!or )({LETTER})\s*"
    r"(?i:is\s+(?:therefore\s+|thus\s+)?(?:the\s+)?(?:correct|right|best|answer))"
    rf"|({LETTER})\W{{0,3}}\s(?i:(?:fits|works|matches)\s+best|alone\s+\w+|remains\b"
    r"|(?:is|remains)\s+the\s+(?:only|best)\s+(?:\w+\s+)?(?:option|choice|one|answer)\b)"
    rf"|(?i:\b(?:leav(?:es|ing)|must\s+be|go\s+with|only)(?:\s+(?:option|choice))?)\s+({LETTER})(?=\W|$)"
    rf"|(?i:\b(?:so|thus|hence|therefore),?\s+(?:(?:it|this)\s+(?:must\s+be|is)\s+)?)({LETTER})\W*$"
)
OPTION = re.compile(rf"(?i:\b(?:option|choice)\b(?:\s+is)?\W{{0,4}})({LETTER})|\(([A-J])\)\W*$")
DENIED = re.compile(
    r"(?i)\b(?:not|wrong|incorrect|false|eliminate\w*|rule[sd]?|exclude\w*|unlike|than|too)\b|n't"
)

# Texts that stand for a missing answer.
MISSING = {"nan", "null", "n/a", "<na>"}
# As tasks/countdown.py writes its questions.
COUNTDOWN_QUESTION = re.compile(
    r"Make (\d+) from the numbers ([\d, and]+)\. Use each of the numbers exactly once"
)
# Digits, parentheses and + - * /, no power and no call of a name: safe to evaluate.
EXPRESSION = re.compile(r"(?:(?!\*\s*\*|/\s*/)[0-9+\-*/() ]){1,200}")


# Where answers stand


def solution_block(response: str, tags: TagStyle) -> str:
    """Return the text behind the thought, without the solution's tags.

    Returns:
        The whole response without any tag, and nothing of a thought that is never closed.
    """
    _, closed, rest = response.rpartition(tags.thought_close)
    if not closed and tags.thought_open in response and tags.solution_open not in response:
        return ""
    rest = rest if closed and rest.strip() else response
    block = rest.rpartition(tags.solution_open)[2].partition(tags.solution_close)[0]
    return block[-BLOCK_CHARS:]


def find_answer(text: str) -> str | None:
    """Return the answer that a solution gives; see the file's header for where it stands."""
    boxes, is_open = find_boxes(text)
    if is_denied(text, boxes):
        return None
    if (marked := marked_answer(text)) is not None:
        behind = text[boxes[0][1] :] if boxes else ""
        taken_back = TAKEN_BACK.search(behind)
        return find_in_prose(behind[taken_back.end() :]) if taken_back else read_written(marked)
    return None if is_open else find_in_prose(text[-ANSWER_CHARS:])


def marked_answer(text: str) -> str | None:
    """Return the answer of a solution that marks it, by a box, by `<answer>` or by `####`; None without."""
    boxes, is_open = find_boxes(text)
    if boxes or is_open:
        return join_boxes(text, boxes) if boxes else None
    marks = [*ANSWER_TAG.findall(text), *(line for line in HASHES.findall(text) if is_final_line(line, text))]
    marks = [mark.strip() for mark in marks if mark.strip()]
    return marks[-1][:ANSWER_CHARS] if marks else None


def find_boxes(text: str) -> tuple[list[tuple[int, int, str]], bool]:
    """Return start, end and content of all boxes with an answer, the last first, and whether one is open."""
    boxes, is_open = [], False
    for box in list(BOX.finditer(text))[: -MAX_BOXES - 1 : -1]:
        if text[box.end() : box.end() + 1] == "{":
            content = read_braces(text, box.end() + 1)
            is_open |= content is None
            end = box.end() + 2 + len(content or "")
        else:
            bare = BARE_BOX.match(text, box.end(), box.end() + ANSWER_CHARS)
            content, end = (bare[0].rstrip(".,"), bare.end()) if bare else (None, 0)
        if content and content.strip():
            boxes.append((box.start(), end, content.strip()))
    return boxes, is_open


def is_denied(text: str, boxes: list[tuple[int, int, str]]) -> bool:
    """Return whether the last box is said not to be the answer."""
    before = text[max(0, boxes[0][0] - 60) : boxes[0][0]] if boxes else ""
    return DENIED_BEFORE.search(read_characters(before)) is not None


def join_boxes(text: str, boxes: list[tuple[int, int, str]]) -> str:
    """Return the last box's content, with those of the boxes before it that belong to the same list."""
    start, _, content = boxes[0]
    contents = [content]
    for before, end, content in boxes[1:]:
        if end > start or not BETWEEN_BOXES.fullmatch(re.sub(r"\\text|[{}$\\()]", " ", text[end:start])):
            break
        # The same value may be boxed in two forms.
        if not any(same_numbers(normalise(content), normalise(earlier)) for earlier in contents):
            contents.append(content)
        start = before
    return ", ".join(reversed(contents))


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


def is_final_line(line: str, text: str) -> bool:
    """Return whether what follows `####` is an answer: a number, with words only in a text's last line."""
    has_words = re.search(r"[^\W\d_]{2}", re.sub(r"\\[a-zA-Z]+", "", line)) is not None
    is_item = re.match(r"\W*\d+[.)]\s", line) is not None
    if read_quantity(normalise(line)) is None:
        return not has_words and not is_item
    return not has_words or text.rstrip().endswith(line.rstrip())


def find_in_prose(text: str) -> str | None:
    """Return the answer at the end of a text without marks."""
    for match in reversed(list(ANNOUNCED.finditer(text))):
        if (value := read_announced(text[match.end() :])) is not None:
            return value
    formulas = [match for match in FORMULA.finditer(text) if re.search(r"\w", match[0])]
    # Behind an answer some text may name a variable again.
    formulas = [match for match in formulas if re.search(r"\d", match[0])] or formulas
    text_of_numbers = REMARK.sub(r"\1", EMPHASIS.sub("", read_characters(text)))
    numbers = list(LAST_NUMBER.finditer(text_of_numbers))
    whole = text.strip()
    if re.fullmatch(r"[!-~]*\w[!-~]*", whole) and not formulas:
        return whole
    after_number = len(text_of_numbers) - numbers[-1].end() if numbers else len(text) + 1
    if formulas and len(text) - formulas[-1].end() <= after_number:
        return next(filter(None, formulas[-1].groups())).strip()
    return read_numbers(text_of_numbers, numbers) if numbers else None


def read_numbers(text: str, numbers: list[re.Match[str]]) -> str | None:
    """Return the last number of a text with its unit, or the list that it ends; None in a formula."""
    first = last = numbers[-1]
    for number in numbers[-2::-1]:
        between = BETWEEN_NUMBERS.fullmatch(text, number.end(), first.start())
        if between is None or (
            first is last and between[0].lstrip().startswith(",") and not re.search("and|or", between[0])
        ):
            break
        first = number
    written = add_unit(text, last)
    following = text[last.start() + len(written) :] if text.startswith(written, last.start()) else ""
    start = first.start() + first[0].startswith("-")
    if (
        NUMBER_DENIED.match(text, last.end())
        or FORMULA_BEFORE.search(text, 0, start)
        or FORMULA_AFTER.match(following)
    ):
        return None
    return written if first is last else text[first.start() : last.start()] + written


def read_announced(text: str) -> str | None:
    """Return the answer that a text begins with; None if it is none, as after "the answer is not"."""
    filler = FILLER.match(text)
    rest = text[filler.end() if filler else 0 :]
    if (formula := FORMULA.match(rest)) is not None:
        return next(filter(None, formula.groups())).strip()
    end = SENTENCE_END.search(rest)
    sentence = (rest[: end.start()] if end else rest).strip(' *_"”$`')
    words = re.findall(r"[^\W\d_]{2,}", sentence)
    if not sentence or SAID.match(sentence) or (len(words) > MAX_WORDS and not sentence[0].isdigit()):
        return None
    begins_with_word = re.match(r"[^\W\d_]{2,}", sentence) and not re.match(r"[a-zA-Z]\w{0,2}\s*=", sentence)
    return None if begins_with_word and LAST_NUMBER.search(read_characters(sentence)) else sentence


def add_unit(text: str, number: re.Match[str]) -> str:
    """Return a number in a text with the unit that follows it."""
    following = re.match(r"\s?[a-zA-Z°€£$%/]+(?:\^?\{?\d\}?)?", text[number.end() :])
    written = number[0].strip() + (following[0] if following else "")
    quantity = read_quantity(normalise(written))
    if quantity and quantity.doubtful:  # in prose a letter behind a number is a unit
        return re.sub(r"[a-zA-Z]+", lambda m: LONG.get(m[0], m[0]), written)
    plain = read_quantity(normalise(number[0]))
    is_scaled = quantity and plain and quantity.value != plain.value  # 5 million
    return written if quantity and (quantity.unit or is_scaled) else number[0].strip().rstrip(",")


# Choices


def find_letter(text: str) -> str | None:
    """Return the chosen option of a solution, from A to J; see the file's header for where it stands."""
    boxes, _ = find_boxes(text)
    if is_denied(text, boxes):
        return None
    marks = [join_boxes(text, boxes)] if boxes else []
    marks += [content for _, _, content in boxes]
    marks += [*ANSWER_TAG.findall(text)[::-1], *HASHES.findall(text)[::-1]]
    letters = (read_letter(mark) for mark in marks)
    letter = next((letter for letter in letters if letter is not None), None)
    return (find_letter_in_prose(text[-ANSWER_CHARS:]) if letter is None else letter) or None


def read_letter(text: str) -> str | None:
    """Return the letter of a text that names one option: `B`, `(B)`, `b.`, `B: 12`, `Option B`.

    Returns:
        An empty text if it names several, None if it names none.
    """
    text = normalise(text)
    if SEVERAL.fullmatch(text):
        return ""
    if (match := ONE_LETTER.fullmatch(text)) is None:
        return None
    letter, rest = match[1], match["rest"]
    if MORE_LETTERS.match(rest) or CALLED_WRONG.match(rest):
        return ""
    is_alone = not re.search(r"\w", rest)
    if letter.islower():
        return letter.upper() if is_alone or re.match(r"[).:\]]", rest) else None
    is_followed = is_alone or re.match(rf"\s*[).:\]}}]|(?!{OPERATION})\s+[^a-zA-Z\s+*/]|\s+-\s|,\s", rest)
    return letter if is_followed else None


def find_letter_in_prose(text: str) -> str | None:
    """Return the option that a text calls the answer, or right, or begins its last line with."""
    text = read_characters(text).strip()
    several = -1
    for match in reversed(list(ANNOUNCED.finditer(text))):
        filler = LETTER_FILLER.match(text, match.end())
        if letter := letter_at(text, filler.end() if filler else match.end()):
            return letter
        if letter == "":
            several = match.end()
            break
    called = [match for match in CALLED_RIGHT.finditer(text) if match.start() > several]
    called = [match for match in called if not DENIED_BEFORE.search(text, 0, match.start())]
    called = [match for match in called if not MORE_LETTERS.match(text, match.end(match.lastindex or 0))]
    called += [
        match
        for match in OPTION.finditer(text, max(several, 0))
        if not DENIED.search(sentence_around(text, match))
    ]
    if several >= 0 and not called:
        return ""
    if called:
        last = max(called, key=lambda match: match.start())
        return re.sub(r"\W", "", next(filter(None, last.groups()))).upper()
    first_line = text.partition("\n")[0]
    return read_letter(text.rpartition("\n")[2]) or (read_letter(first_line) if len(first_line) < 9 else None)


def letter_at(text: str, start: int) -> str | None:
    """Return the letter at an index of a text; an empty one if several stand there, None for another word."""
    if (match := ANY_LETTER.match(text, start)) is None:
        return None
    if MORE_LETTERS.match(text, match.end()):
        return ""
    letter = re.sub(r"\W", "", match[0])
    is_word = letter in "AI" and match[0] == letter and WORD_FOLLOWS.match(text, match.end())
    return None if is_word or CALLED_WRONG.match(text, match.end()) else letter.upper()


def sentence_around(text: str, match: re.Match[str]) -> str:
    """Return the sentence that a match stands in."""
    start = max(text.rfind(mark, 0, match.start()) for mark in ".!?\n") + 1
    end = re.compile(r"[.!?\n]").search(text, match.end())
    return text[start : end.start() if end else len(text)]


# References


def reference_answer(row: Reference) -> str | None:
    """Return the right answer of a row: its `answer` or, without one, the answer that its `solution` marks.

    An `answer` may be a whole worked solution, such as GSM8K's, which ends in `#### 18`. A number loses what
    only its storage added: 27.0 becomes 27. The answers in a list are all wanted.
    """
    text = write_value(row.get("answer"))
    if text is None or text:
        return read_written(text) if text else None
    return marked_answer(str(row.get("solution") or "")[-BLOCK_CHARS:])


def write_value(value: Any) -> str | None:
    """Return a row's value as text, empty if it is missing; None if it is no text, number or list of them."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.15g}"
    if isinstance(value, list | tuple):
        parts = [write_value(part) for part in value]
        return (
            None if None in parts or len(parts) > ANSWER_CHARS else ", ".join(part for part in parts if part)
        )
    if value is None:
        return ""
    if isinstance(value, int) and value.bit_length() > 10 * ANSWER_CHARS:  # Python refuses to write it
        return None
    return str(value).strip() if isinstance(value, str | int) else None


def read_written(text: str) -> str | None:
    """Return the answer that a row's text gives; the text itself if it marks and announces none."""
    if "####" in text:
        return text.rpartition("####")[2].strip() or None
    if BOX.search(text):
        return marked_answer(text[-BLOCK_CHARS:])
    return (ANNOUNCED.search(text) and find_in_prose(normalise(text[-ANSWER_CHARS:]))) or text


def read_reference(row: Reference) -> str:
    """Return the right answer of a row, as a judge compares with it.

    Raises:
        BadRowError: If the row has none, or one that no response can equal: a mapping, `nan`, `???`, an open
            brace, or an option that is not a single letter.
    """
    answer = reference_answer(row)
    if answer is None:
        reason, detail = BadRowReason.BAD_ANSWER, "answer has a box or #### without an answer"
        if (written := write_value(row.get("answer"))) is None:
            detail = (
                f"answer must be text, a number or a list of these, but is {type(row['answer']).__name__}"
            )
        elif not written:
            reason = BadRowReason.NO_ANSWER
            detail = "the row has no answer, and its solution has none in \\boxed{} or after ####"
        raise BadRowError(reason, detail)
    if row.get("kind") == "choice":
        if not (letter := read_letter(answer) or find_letter_in_prose(answer)):
            raise BadRowError(
                BadRowReason.BAD_ANSWER, "the answer to a choice must be one letter from A to J"
            )
        return letter
    if (fault := find_fault(answer)) is not None:
        raise BadRowError(BadRowReason.BAD_ANSWER, f"no response can equal the answer, which {fault}")
    return answer


def find_fault(answer: str) -> str | None:
    """Return why no answer can equal this one; None if one can."""
    text = normalise(answer)
    if len(answer) > ANSWER_CHARS:
        return f"has more than {ANSWER_CHARS} characters"
    if text.casefold() in MISSING:
        return f"is {text}"
    if not re.search(r"[^\W_]", text):
        return "has no letter or digit"
    opened = text.replace(r"\{", "").replace(r"\}", "")
    return "has braces that do not match" if opened.count("{") != opened.count("}") else None


def require_answer(reference: Reference) -> str | None:
    """Return the answer of a reference; None if no response can be right.

    Raises:
        InputError: If the reference has none.
    """
    try:
        return read_reference(reference)
    except BadRowError as error:
        if error.reason != BadRowReason.NO_ANSWER:
            return None
    raise InputError(
        "A reference must have an `answer`, or a `solution` with a \\boxed{} one, but this has "
        f"only the columns {', '.join(map(str, reference)) or 'of an empty row'}. Add an answer."
    )


def equivalence_classes(answers: list[str]) -> list[int]:
    """Number answers so that equivalent ones share a number: the index of the first of them."""
    firsts: list[int] = []
    numbers = []
    for i, answer in enumerate(answers):
        number = next((j for j in firsts if same_answer(answers[j], answer)), i)
        firsts += [i] if number == i else []
        numbers.append(number)
    return numbers


# Countdown


def arithmetic_expression(text: str) -> str | None:
    """Return the arithmetic expression at the end of a response, in Python's operators; None without one."""
    marked = marked_answer(text)
    lines = text[-ANSWER_CHARS:].strip().splitlines() or [""]
    words = lines[-1].rpartition(":")[2] if marked is None else marked
    signs = ((r"\\times|\\cdot|×", "*"), (r"\\div|÷", "/"), ("−", "-"), (r"\\left|\\right|\$", ""))
    for sign, plain in signs:
        words = re.sub(sign, plain, words)
    expression = words.partition("=")[0].strip().removesuffix(".").strip()
    return expression if EXPRESSION.fullmatch(expression) else None


def read_countdown(reference: Reference) -> tuple[list[int], int] | None:
    """Return numbers and target of a Countdown problem, by its columns or question; None if it is none."""
    if reference.get("kind") == "countdown" and {"numbers", "target"} <= reference.keys():
        return [int(number) for number in reference["numbers"]], int(reference["target"])
    match = COUNTDOWN_QUESTION.match(str(reference.get("question") or ""))
    return ([int(number) for number in re.findall(r"\d+", match[2])], int(match[1])) if match else None


def solves_countdown(expression: str, numbers: list[int], target: int) -> bool:
    """Return whether an arithmetic expression has the target as its value and uses each number once."""
    used = [int(number) for number in re.findall(r"\d+", expression)]
    if not EXPRESSION.fullmatch(expression) or sorted(used) != sorted(numbers):
        return False
    try:
        return bool(eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction}) == target)
    except (SyntaxError, TypeError, ZeroDivisionError):  # (95)(21) calls a number
        return False
