"""One reward as text for a terminal: its terms in words, and the tokens on a background by their values."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlt_lightning.console import has_styles
from rlt_lightning.modules.scorer import Students
from rlt_lightning.numerics.rewards import Reduction, Reward, RLTReward, reduce_tokens
from rlt_lightning.run.jsonl import Row
from rlt_lightning.run.metrics import find_metric
from rlt_lightning.tags import CONTROL_CODES
from rlt_lightning.tasks.stepwise import describe_question

# Terminal colours, from a token that the student expects to a token that surprises it most.
SHADES = ("", "\x1b[48;5;230m", "\x1b[48;5;222m", "\x1b[48;5;215m", "\x1b[48;5;209m", "\x1b[48;5;203m")
BLACK, RESET = "\x1b[30m", "\x1b[0m"
BOUNDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # nats at which the shades begin
# Replaces what controls a terminal, and marks of direction, which would reorder the shaded tokens;
MARKS = (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROLS = {code: "\ufffd" for code in (*CONTROL_CODES, *MARKS) if chr(code) != "\n"}


@dataclass(frozen=True)
class Terminal:
    """What a text is written for.

    Args:
        colours: Whether tokens get a background.
        columns: Characters in a line; None: lines are not folded, as in a file.
    """

    colours: bool = False
    columns: int | None = None


def find_terminal() -> Terminal:
    """Return what standard output is."""
    if not sys.stdout.isatty():
        return Terminal()
    return Terminal(has_styles(), shutil.get_terminal_size().columns)


def describe_scorer(teacher: str, students: Students, reward: Reward) -> dict[str, str]:
    """Return what scored an explanation, for the head of a page: models, and weights of the reward."""
    facts = {"teacher": teacher}
    if students.names:
        facts["students" if len(students.names) > 1 else "student"] = ", ".join(students.names)
    if isinstance(reward, RLTReward):
        weights = f"{reward.solution_weight:g} · r_SS − {reward.kl_weight:g} · r_KL ({reward.kl_estimator})"
        facts["reward"] = weights + (", over an empty explanation" if reward.baseline != "none" else "")
    return facts


def describe_problem(row: Row, facts: dict[str, str], terminal: Terminal) -> list[str]:
    """Return the lines above explanations: the models, the question with what it leaves unsaid, the solution.

    Args:
        row: A row of rollouts.jsonl.
        facts: What `describe_scorer` returns.
        terminal: What the lines are for.
    """
    models = ", ".join(f"{name} {text}" for name, text in facts.items() if name != "reward")
    lines = [*fold_after("", models, terminal), ""]
    lines += fold_plain(f"Question: {row['question'].strip()}", terminal)
    if about := describe_question(row["question"]):
        lines += fold_after("  ", about, terminal)
    return lines + fold_plain(f"Solution: {row['solution'].strip()}", terminal)


def describe_change(row: Row, reward: RLTReward, terminal: Terminal) -> list[str]:
    """Return the student's probability of the solution without and with the explanation, and what that is.

    Args:
        row: A scored row with the columns of `measure_probabilities`.
        reward: The reward that scored it.
        terminal: What the lines are for.
    """
    count = len(row["solution_tokens"])
    log_probs = [row[f"student_log_prob_{name}"] for name in ("before", "after")]
    tokens = f"{count} token{'s' * (count > 1)}"
    words = {
        f"product over {tokens}": [format_probability(value) for value in log_probs],
        "its logarithm, nats": [f"{value:.4f}" for value in log_probs],
        "geometric mean of a token": [format_probability(value / count) for value in log_probs],
    }
    lines = ["The student's probability of the whole solution, without and with the explanation:"]
    for name, (before, after) in words.items():
        lines.append(f"  {before:>9} -> {after:<9}  {name}")
    note = f"Without: an empty explanation. At temperature {reward.student_temperature:g}."
    return [*lines, *fold_after("  ", note, terminal)]


def format_probability(log_prob: float) -> str:
    """Return a probability, given in nats: four digits after the point, or a power of ten if it is small."""
    if log_prob >= math.log(1e-3):
        return f"{math.exp(log_prob):.4f}"
    if math.isinf(log_prob):
        return "0"
    exponent = math.floor(log_prob / math.log(10))  # exp would be 0 below -745
    return f"{math.exp(log_prob - exponent * math.log(10)):.1f}e{exponent:03d}"


def describe_terms(
    row: Row, empty: Row, parts: dict[str, float], reward: RLTReward, terminal: Terminal
) -> list[str]:
    """Return the reward and, below it, a line for each term that says what it consists of.

    Args:
        row: A scored completion with its tokens.
        empty: The empty explanation of the same problem.
        parts: The terms that add up to the reward, by name.
        reward: The reward that scored them.
        terminal: What the text is for.
    """
    thought, kl = row["thought_tokens"], row["thought_kl"]
    solution, log_probs = row["solution_tokens"], row["solution_log_probs"]
    gain = row["solution_log_prob_reward"] - empty["solution_log_prob_reward"]
    less = f" - ({row['baseline']:.4f} of an empty explanation)" if "baseline" in row else ""
    of_solution = reduce_row(log_probs, reward.process_log_probs, reward.reduction)
    of_kl = reduce_row(kl or [0.0], reward.process_kl, reward.kl_reduction)
    made_of = {
        "solution": f"{reward.solution_weight:g} x ({reward.reduction} {of_solution:.4f} + "
        f"{reward.min_coef:g} x min {row['solution_log_prob_min']:.4f}{less}); the hardest token is "
        f"{describe_place(min, solution, log_probs)}; {gain:+.4f} against an empty explanation",
        "kl": f"-{reward.kl_weight:g} x ({reward.kl_reduction} {of_kl:.4f} + {reward.max_coef:g} x max "
        f"{row['kl_max']:.4f}); "
        + (f"the least natural token is {describe_place(max, thought, kl)}" if kl else "no token counts"),
        "format": describe_format(row),
    }
    return list_terms(row["reward"], parts, made_of, terminal)


def reduce_row(
    values: list[float], process: Callable[[Tensor, Tensor], Tensor], reduction: Reduction
) -> float:
    """Return what a reward makes of one row's tokens, in place of their mean."""
    mask = torch.ones(1, len(values), dtype=torch.bool)
    return reduce_tokens(process(torch.tensor([values]), mask), mask, reduction).item()


def list_terms(
    reward: float, parts: dict[str, float], made_of: dict[str, str], terminal: Terminal
) -> list[str]:
    """Return a line for the reward and one for each term; a term without words gets its catalogue entry."""
    width = max(map(len, parts), default=4) + 2
    lines = [f"{'reward':<{width + 2}}{reward:+.4f}"]
    for name, value in parts.items():
        words = made_of.get(name) or find_metric(f"reward/{name}").meaning
        lines += fold_after(f"  {name:<{width}}{value:+.4f}  ", words, terminal)
    return lines


def describe_students(row: Row, students: Students, terminal: Terminal) -> list[str]:
    """Return a line for the reward of several students, and one for that of each.

    Args:
        row: A scored completion, with the columns of each student.
        students: The students.
        terminal: What the lines are for.
    """
    labels = students.labels
    width = max(map(len, labels)) + 2
    how = "the smallest of" if students.reduction == "min" else "the weighted mean of"
    lines = [f"{'reward':<{width + 2}}{row['reward']:+.4f}  {how} {len(labels)} students"]
    for label, name, weight in zip(labels, students.names, students.weights, strict=True):
        words = name if students.reduction == "min" else f"weight {weight:g}, {name}"
        lines += fold_after(f"  {label:<{width}}{row[f'reward/{label}']:+.4f}  ", words, terminal)
    return lines


def tabulate_kl(row: Row, top: int) -> list[str]:
    """Return the table of the explanation's tokens, the largest KL first; all of them if top is 0."""
    kl = row["thought_kl"]
    return tabulate(
        row["thought_tokens"], {"KL": kl}, sorted(range(len(kl)), key=lambda i: -kl[i])[: top or None]
    )


def show_solution(row: Row, empty: Row, terminal: Terminal) -> list[str]:
    """Return the solution, shaded by how it surprises the student, and the table of its tokens."""
    solution, log_probs = row["solution_tokens"], row["solution_log_probs"]
    return [
        *fold_after(
            "Solution: ",
            "the student's log-prob after the explanation, and after an empty one, nats",
            terminal,
        ),
        shade_tokens(solution, [-value for value in log_probs], terminal),
        *build_legend("-log-prob", terminal),
        "",
        *tabulate(
            solution, {"log-prob": log_probs, "empty": empty["solution_log_probs"]}, range(len(solution))
        ),
    ]


def list_caveats(reward: RLTReward, any_text: bool = False) -> list[str]:
    """Return what to know about the figures of tokens, for terminal and page.

    Args:
        reward: The reward that has them.
        any_text: Whether the text need not be the teacher's.
    """
    found = []
    if any_text and reward.kl_estimator != "exact":
        words = f"{reward.kl_estimator} estimates a KL only on average over texts that this teacher sampled. "
        found.append(words + "For a text from elsewhere, add --model.reward.kl_estimator exact.")
    normalised = (reward.normalise_log_probs, reward.normalise_kl) != ("none", "none")
    if (reward.clip_log_probs, reward.clip_kl) != (None, None) or normalised:
        found.append("Values of tokens are before clipping and normalisation, the terms' after.")
    return found


def fold_caveats(caveats: list[str], terminal: Terminal) -> list[str]:
    """Return the lines of caveats, each after an empty one."""
    return [line for words in caveats for line in ("", *fold_after("", words, terminal))]


def describe_format(row: Row) -> str:
    """Return whether a completion is closed and not empty, in words."""
    if row["finish_reason"] != "stop":
        return "not closed"
    return "closed and not empty" if row["explanation"] else "empty"


def describe_place(choose: Callable[..., int], tokens: list[str], values: list[float]) -> str:
    """Return the token with the smallest or largest value, and its place from 1."""
    place = choose(range(len(values)), key=values.__getitem__)
    return f"{quote_token(tokens[place])} (token {place + 1})"


def quote_token(token: str) -> str:
    """Return a token between quotes, its white space written out."""
    return json.dumps(token, ensure_ascii=False).translate(CONTROLS)


def shade_tokens(tokens: list[str], surprise: list[float], terminal: Terminal) -> str:
    """Return the text with each token's background by its value in nats; without colours just the text."""
    texts = fold_texts([token.translate(CONTROLS) for token in tokens], terminal)
    if not terminal.colours:
        return "".join(texts).strip("\n")
    shades = [SHADES[bisect_right(BOUNDS, value)] for value in surprise]
    # A shade ends with its line: terminals would fill the rest of the row with it.
    marked = [
        f"{BLACK}{shade}{text}{RESET}".replace("\n", f"{RESET}\n{BLACK}{shade}") if shade else text
        for text, shade in zip(texts, shades, strict=True)
    ]
    return "".join(marked).strip("\n")


def build_legend(what: str, terminal: Terminal) -> list[str]:
    """Return the line that says which background stands for which value, in nats; no line without colours."""
    steps = zip(SHADES[1:], BOUNDS, strict=True)
    marks = "".join(f"{BLACK}{shade} {bound:g} {RESET}" for shade, bound in steps)
    return [f"{what} from {marks} nats"] if terminal.colours else []


def fold_texts(texts: list[str], terminal: Terminal) -> list[str]:
    """Return texts that follow each other, with line ends for spaces where a line would be too long."""
    characters = list("".join(texts))
    start, space = 0, None
    for i, character in enumerate(characters):
        if character == "\n":
            start, space = i + 1, None
        elif character == " ":
            space = i
        if terminal.columns is not None and i - start >= terminal.columns and space is not None:
            characters[space], start, space = "\n", space + 1, None
    rest = iter(characters)
    return ["".join(next(rest) for _ in text) for text in texts]


def fold_after(label: str, words: str, terminal: Terminal) -> list[str]:
    """Return words after a label; where lines are folded, the next ones begin below the words."""
    if terminal.columns is None:
        return [(label + words).rstrip()]
    indent = " " * (len(label) if len(label) <= terminal.columns // 2 else 4)
    width = max(terminal.columns, 20)
    return textwrap.wrap(
        words, width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False
    ) or [label.rstrip()]


def tabulate(tokens: list[str], columns: dict[str, list[float]], places: Iterable[int]) -> list[str]:
    """Return a line for each token at these places: its place from 1, its values and its text."""
    lines = [f"{'token':>7}" + "".join(f"{name:>10}" for name in columns)]
    for i in places:
        numbers = "".join(f"{values[i]:>10.4f}" for values in columns.values())
        lines.append(f"{i + 1:>7}{numbers}  {quote_token(tokens[i])}")
    return lines


def fold_plain(text: str, terminal: Terminal) -> list[str]:
    """Return a text without characters that control a terminal, folded at its width."""
    return fold_texts([text.translate(CONTROLS)], terminal)
