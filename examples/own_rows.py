"""The Python part of examples/own_rows.sh: split the rows before its stages, tabulate the results after them.

python examples/own_rows.py split ROWS FOLDER    train.jsonl, held_out.jsonl, test.jsonl
python examples/own_rows.py table RUN            own_rows.md: accuracies and costs of stages
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from rlt_lightning.datamodules.rows import find_question, require_judgeable, split_turns
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.run.jsonl import format_line, read_json_rows, rewrite
from rlt_lightning.run.metrics_csv import read_metrics
from rlt_lightning.tags import escape_half_pairs
from rlt_lightning.types import BadRowError, InputError

Part = Literal["train", "held_out", "test"]
PARTS: dict[Part, float] = {"test": 0.1, "held_out": 0.1, "train": 0.8}  # shares of the questions
TABLE = "own_rows.md"
# The students of the script, by the end of their folders' names.
STUDENTS = {
    "base": "nothing: the base",
    "solutions": "raw solutions",
    "control": "greedy traces of the warm-up teacher: the control",
    "warmup": "the warm-up teacher's at T 0.7",
    "best_of_4": "the best of 4 of these",
    "rlt": "the RLT teacher's at T 0.7",
    "rlt_t0": "its greedy traces",
}
SAMPLED = {"traces.jsonl", "responses.jsonl"}  # a row has the tokens that were sampled for it


def choose_part(question: str) -> Part:
    """Return the part of a split that a question belongs to, whatever the other rows are.

    Questions that differ only by case or white space belong together. Rows that are added later move none.
    """
    text = escape_half_pairs(" ".join(question.casefold().split()))
    place = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64  # in [0, 1)
    for part, share in PARTS.items():
        if place < share:
            return part
        place -= share
    return "train"


def split_rows(source: str, folder: Path) -> dict[Part, int]:
    """Write a source's rows as `train.jsonl`, `held_out.jsonl` and `test.jsonl`; return their numbers.

    Rows that cannot be read are left out; rows without a question come into `train`, whose run names them. Of
    the test rows those stay that an answer can be compared with.

    Raises:
        InputError: If a part is empty, no test row has an answer, or the folder has other rows.
    """
    parts: dict[Part, list[dict[str, Any]]] = {"train": [], "held_out": [], "test": []}
    for _, columns in read_rows(source):
        if isinstance(columns, dict):
            parts[choose_part(read_row_question(columns))].append(columns)
    judged = [row for row in parts["test"] if has_answer(row)]
    if parts["test"] and not judged:
        raise InputError(
            f"Test rows need an answer, in a column answer or in \\boxed{{}} or after #### of the solution, "
            f"but none of {len(parts['test'])} in '{source}' has one. Add it: the table compares with it."
        )
    if left_out := len(parts["test"]) - len(judged):
        print(
            f"{left_out} of {len(parts['test'])} test rows are left out: they have no answer", file=sys.stderr
        )
    parts["test"] = judged
    for part, rows in parts.items():
        if not rows:
            raise InputError(
                f"Every part of a split needs rows, but {part} of '{source}' has none. Add rows."
            )
        lines, path = [format_line(row) for row in rows], folder / f"{part}.jsonl"
        if path.exists() and path.read_text(encoding="utf-8") != "".join(lines):
            raise InputError(
                f"{path} must hold the rows of '{source}', but holds others. Choose another folder: what its "
                "stages have learned is of those rows."
            )
        folder.mkdir(parents=True, exist_ok=True)
        rewrite(path, lines)
    return {part: len(rows) for part, rows in parts.items()}


def read_row_question(columns: Mapping[str, Any]) -> str:
    """Return a row's question; '' if it has none."""
    question = find_question(columns)
    if question is None and isinstance(columns.get("conversations"), list):
        with suppress(BadRowError):
            question = split_turns(columns["conversations"])[1]
    return question if isinstance(question, str) else json.dumps(question) if question else ""


def has_answer(row: Mapping[str, Any]) -> bool:
    """Return whether an answer to a row can be judged."""
    try:
        require_judgeable(row)
    except BadRowError:
        return False
    return True


# The closing table


def build_page(run: Path, num_cards: int) -> str:
    """Return the accuracies of all students and the costs of all stages as Markdown.

    Cells of stages that have not ended are empty.
    """
    students = [
        "| student learned from | explanations sampled | rows | greedy, % (95 %) | T 0.7, % (95 %) |",
        "|---|---|---|---|---|",
        *(describe_student(run, name, what) for name, what in STUDENTS.items()),
    ]
    costs = ["| stage | tokens sampled | tokens trained | seconds | card-minutes |", "|---|---|---|---|---|"]
    total = [0.0, 0.0, 0.0]
    for name, seconds in read_seconds(run / "seconds.tsv").items():
        figures = (count_sampled(run / name), count_trained(run / name), seconds)
        total = [before + figure for before, figure in zip(total, figures, strict=True)]
        costs.append(describe_costs(name, figures, num_cards))
    costs.append(describe_costs("all", total, num_cards))
    return "\n".join([*students, "", *costs]) + "\n"


def describe_student(run: Path, name: str, what: str) -> str:
    """Return a student's line of the table."""
    traces = run / f"traces_{name}"
    rows = run / "rows/train.jsonl" if name == "solutions" else traces / "distillation.jsonl"
    trained = count_rows(run / "rlt/rollouts.jsonl") if name.startswith("rlt") else 0
    sampled = count_rows(traces / "traces.jsonl") + trained
    cells = [str(number) if number else "" for number in (sampled, count_rows(rows))]
    cells += [read_accuracy(run / f"evaluate_{name}_{how}") for how in ("greedy", "sampled")]
    return f"| {what} | {' | '.join(cells)} |"


def count_rows(path: Path) -> int:
    """Return the number of rows of a file; 0 without a file."""
    return sum(1 for _ in read_json_rows(path)) if path.exists() else 0


def read_accuracy(folder: Path) -> str:
    """Return the accuracy that `rlt test` found, in percent, with its 95 % interval; '' before its end."""
    if not (folder / "evaluation.json").exists():
        return ""
    figures = json.loads((folder / "evaluation.json").read_text())["sets"]["test"]
    low, high = wilson_interval(figures["pass_at_1"], int(figures["num_problems"]))
    return f"{100 * figures['pass_at_1']:.1f} ({100 * low:.0f} to {100 * high:.0f})"


def wilson_interval(rate: float, number: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a rate of so many problems (Wilson 1927): it is right near 0 and 1 too.

    Several samples of a problem count once, which makes the interval rather too wide.
    """
    middle = (rate + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(rate * (1 - rate) / number + (z / (2 * number)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def read_seconds(path: Path) -> dict[str, float]:
    """Return the seconds of each stage, all its attempts together, in the order in which they began."""
    seconds: dict[str, float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, value = line.partition("\t")
        seconds[name] = seconds.get(name, 0.0) + float(value)
    return seconds


def count_sampled(folder: Path) -> float:
    """Return the tokens that a stage has sampled: those of its rows, or of its optimizer steps."""
    rows = (row for name in SAMPLED if (folder / name).exists() for row in read_json_rows(folder / name))
    return sum(row["num_tokens"] or 0 for row in rows) + sum_tokens(folder, "generate")


def count_trained(folder: Path) -> float:
    """Return the tokens that a stage has trained on, prompts included."""
    return sum_tokens(folder, "train")


def sum_tokens(folder: Path, phase: str) -> float:
    """Return the tokens of a phase of all optimizer steps, by metrics.csv; 0 for a run without such steps."""
    if not (folder / "metrics.csv").exists():
        return 0.0
    curves = read_metrics(folder / "metrics.csv")
    rates, times = (dict(zip(*curves.get(f"perf/{phase}_{what}", ((), ())), strict=True)) for what in UNITS)
    return sum((rates[step] or 0.0) * (times.get(step) or 0.0) for step in rates)


UNITS = ("tokens_per_s", "s")


def describe_costs(name: str, figures: Sequence[float], num_cards: int) -> str:
    """Return a stage's line of the table of costs."""
    sampled, trained, seconds = figures
    cards = f"{num_cards * seconds / 60:.1f}" if num_cards else "none"
    return f"| {name} | {sampled:,.0f} | {trained:,.0f} | {seconds:,.0f} | {cards} |"


def main(words: Iterable[str] | None = None) -> int:
    """Run `split` or `table`, and return the exit status."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    split = verbs.add_parser("split", help="write train.jsonl, held_out.jsonl and test.jsonl")
    split.add_argument("rows", help="a file, a folder or a hub id, as data.source takes it")
    split.add_argument("folder", type=Path)
    table = verbs.add_parser("table", help="write own_rows.md, and print it")
    table.add_argument("run", type=Path, help="the folder of all stages")
    options = parser.parse_args(None if words is None else [*words])
    try:
        if options.verb == "split":
            counts = split_rows(options.rows, options.folder)
            print(
                f"{', '.join(f'{number} {part}' for part, number in counts.items())} rows in {options.folder}"
            )
            return 0
        import torch

        page = build_page(options.run, torch.cuda.device_count())
        rewrite(options.run / TABLE, [page])
        print(f"\n{page}\n{options.run / TABLE}")
    except InputError as error:
        print(f"rlt: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
