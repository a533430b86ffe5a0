"""The Python part of examples/own_rows.sh: split the rows, choose those of a stage, tabulate the results.

python examples/own_rows.py split ROWS FOLDER             train.jsonl, validation.jsonl, test.jsonl
python examples/own_rows.py choose WAY FILE OUTPUT LIKE   the rows that a stage learns from
python examples/own_rows.py table RUN                     own_rows.md: accuracies and costs of the rungs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rlt_lightning.datamodules.rows import (
    TRACE_COLUMN,
    find_question,
    has_text,
    require_judgeable,
    split_turns,
)
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.run.jsonl import JsonRow, format_line, read_json_rows, rewrite
from rlt_lightning.run.metrics_csv import read_metrics
from rlt_lightning.tags import escape_half_pairs
from rlt_lightning.types import BadRowError, InputError

Part = Literal["train", "validation", "test"]
PARTS: dict[Part, float] = {"test": 0.1, "validation": 0.1, "train": 0.8}  # shares of the questions
TABLE = "own_rows.md"
WARMUP = "explain warmup"
# The rungs of the script, by the end of their folders' names: what a student learned from, and the stages
# that made it.
RUNGS = {
    "base": ("nothing: the base", ""),
    "own": ("its own right answers, of 4", "own"),
    "solutions": ("raw solutions", ""),
    "raw": ("raw traces", ""),
    "eighth": (
        "greedy traces of a teacher of the best eighth of these",
        "warmup scores warmup_eighth traces_eighth",
    ),
    "control": ("greedy traces of the warm-up teacher", f"{WARMUP} traces_control"),
    "warmup": ("its traces at T 0.7", f"{WARMUP} traces"),
    "best_of_4": ("the best of 4 of these", f"{WARMUP} traces"),
    "quarter": ("the best quarter of those", f"{WARMUP} traces"),
    "expert": ("expert iteration: greedy traces", f"{WARMUP} traces expert traces_expert"),
    "rlt": ("the RLT teacher's traces at T 0.7", f"{WARMUP} rlt traces_rlt"),
    "rlt_t0": ("the RLT teacher's greedy traces", f"{WARMUP} rlt traces_rlt_t0"),
}
ANSWERS = {"greedy": "Greedily", "sampled": "At T 0.7"}
SAMPLED = ("traces.jsonl", "responses.jsonl")  # a row has the tokens that were sampled for it
GAP = 0.05  # nats: narrower ones lie between traces of one kind, in five tasks of research/
MOST_REPEATS = 16  # of a few chosen rows, so that all stages take as many steps
ALPHA = 0.05


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
    """Write a source's rows as `train.jsonl`, `validation.jsonl` and `test.jsonl`; return their numbers.

    Rows that cannot be read are left out; rows without a question come into `train`, whose run names them. Of
    the test rows those stay that an answer can be compared with.

    Raises:
        InputError: If a part is empty, no test row has an answer, or the folder has other rows.
    """
    parts: dict[Part, list[dict[str, Any]]] = {"train": [], "validation": [], "test": []}
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


def count_traces(folder: Path) -> int:
    """Return how many of the train rows have a trace."""
    rows = read_json_rows(folder / "train.jsonl")
    return sum(has_text(row.get(TRACE_COLUMN)) for row in rows)


def require_stage(name: str | None) -> None:
    """Check, before hours of training, that the script has a stage.

    Raises:
        InputError: If it has none of this name.
    """
    stages = {stage for _, made_by in RUNGS.values() for stage in made_by.split()}
    stages |= {f"student_{rung}" for rung in RUNGS if rung != "base"}
    stages |= {f"evaluate_{rung}_{how}" for rung in RUNGS for how in ANSWERS}
    if name is not None and name not in stages:
        raise InputError(
            f"UNTIL must be the folder of a stage, such as evaluate_expert_sampled, but is {name}. Correct "
            "it."
        )


# What a stage learns from


def choose_rows(way: str, rows: Iterable[JsonRow], num_rows: int) -> list[JsonRow]:
    """Return the rows of a file that a stage learns from.

    Args:
        way: `all`; of traces that fit a student the `first` of each row, the `best` by the reward, or the
            best `quarter` of these over all rows; the best `eighth` of scored rows; or those above a `gap`.
        rows: The rows of traces.jsonl, distillation.jsonl or scores.jsonl.
        num_rows: The number of all train rows.
    """
    if way == "all":
        return list(rows)
    if way == "eighth":
        return rank_rows(rows, 8)
    if way == "gap":
        return above_gap(rank_rows(rows)[: max(1, num_rows // 2)])
    fitting = [row for row in rows if row["fits"]]
    if way == "first":
        return [row for row in fitting if row["trace"] == 0]
    groups = (group for _, group in groupby(fitting, key=lambda row: row["row"]))
    best = [max(group, key=lambda row: row["reward"]) for group in groups]
    return best if way == "best" else rank_rows(best, 4)


def rank_rows(rows: Iterable[JsonRow], part: int = 1) -> list[JsonRow]:
    """Return the best one of `part` of rows by their reward, the best first; at least one of any."""
    ranked = sorted(rows, key=lambda row: -find_reward(row))
    return ranked[: max(1, len(ranked) // part)]


def find_reward(row: JsonRow) -> float:
    """Return the reward without the baseline of its row: by that, rows could not be compared."""
    return float(row["reward"] + row.get("baseline", 0))


def above_gap(ranked: Sequence[JsonRow]) -> list[JsonRow]:
    """Return the traces above the widest gap in their rewards; all if none is wide or leaves enough."""
    rewards = [find_reward(row) for row in ranked]
    gaps = [(rewards[i - 1] - rewards[i], i) for i in range(max(8, len(ranked) // 32), len(ranked))]
    widest, number = max(gaps, default=(0.0, 0))
    return list(ranked[:number] if widest >= GAP else ranked)


def repeat_rows(rows: Sequence[JsonRow], number: int) -> list[JsonRow]:
    """Repeat few rows, up to about so many: a stage then takes as many steps as with all."""
    times = round(number / len(rows)) if rows else 0
    return list(rows) * min(max(1, times), MOST_REPEATS)


# The closing table

Costs = tuple[float, ...]  # samples, tokens sampled, tokens trained, hours, GiB


def build_page(run: Path) -> str:
    """Return the rungs by their costs, what is told apart, and the costs of all stages, as Markdown."""
    seconds = read_seconds(run / "seconds.tsv")
    stages = {name: measure_costs(run / name, value / 3600) for name, value in seconds.items()}
    right = {how: {name: read_right(run / f"evaluate_{name}_{how}") for name in RUNGS} for how in ANSWERS}
    costs = {name: add_costs(stages, [*RUNGS[name][1].split(), f"student_{name}"]) for name in RUNGS}
    answered = [name for name in RUNGS if any(right[how][name] for how in ANSWERS)]
    answered.sort(key=lambda name: costs[name][1] + costs[name][2])
    titles = ["student learned from", "rows", *COSTS, "greedy, % (95 %)", "T 0.7, % (95 %)"]
    rungs = [
        [
            RUNGS[name][0],
            show_rows(run / f"chosen/student_{name}.jsonl"),
            *show_costs(costs[name]),
            *(show_accuracy(right[how][name]) for how in ANSWERS),
        ]
        for name in answered
    ]
    lines = [[name, *show_costs(values)] for name, values in stages.items()]
    lines.append(["all", *show_costs(add_costs(stages, stages))])
    empty = [name for name in RUNGS if is_empty(run / f"chosen/student_{name}.jsonl")]
    if is_empty(run / "chosen/expert.jsonl"):
        empty.append("expert")
    notes = [f"Left out, for want of a row to learn from: {join(empty)}."] if empty else []
    notes += [sentence for how in ANSWERS if (sentence := compare_rungs(how, right[how], answered))]
    tables = (format_table(["stage", *COSTS], lines), format_table(titles, rungs))
    return "\n".join([*tables, *notes])


COSTS = ("samples", "tokens sampled", "tokens trained", "hours", "GiB")


def format_table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    ruled = [titles, ["---"] * len(titles), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in ruled)


def join(names: Iterable[str]) -> str:
    """Return what rungs learned from, as a list."""
    return "; ".join(RUNGS[name][0] for name in names)


def compare_rungs(how: str, right: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> str:
    """Return a sentence that names the cheapest rung that is not told from the best.

    Args:
        how: `greedy` or `sampled`.
        right: The part of right answers to each test row, by rung.
        names: The rungs, the cheapest first.
    """
    names = [name for name in names if right[name]]
    if not names:
        return ""
    best = max(names, key=lambda name: fmean(right[name].values()))
    alike = [name for name in names if not is_told_apart(right[best], right[name])]
    rates = {name: f"{RUNGS[name][0]} ({100 * fmean(right[name].values()):.1f} %)" for name in names}
    others = "; ".join(rates[name] for name in alike if name not in (best, alike[0])) or "no other"
    return (
        f"{ANSWERS[how]} the cheapest way within the interval of the best is **{rates[alike[0]]}**. "
        f"The best is {rates[best]}; also not told from it by {len(right[best])} test rows: {others}.\n"
    )


def is_told_apart(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Return whether two students differ by more than chance: the exact sign test, McNemar's.

    It counts the test rows on which one of them is right more often, and asks how often as many fair coins
    would fall at least so unevenly: 6 to 0 tells them apart, 5 to 0 does not.
    """
    signs = [first[row] > second[row] for row in first if first[row] != second[row]]
    fewer = min(sum(signs), len(signs) - sum(signs))
    chance = 2 * sum(math.comb(len(signs), k) for k in range(fewer + 1)) / 2 ** len(signs)
    return chance < ALPHA


def read_right(folder: Path) -> dict[str, float]:
    """Return the part of right answers to each test row, by `rlt test`; nothing before its end."""
    if not (folder / "evaluation.json").exists():
        return {}
    verdicts: dict[str, list[float]] = {}
    for row in read_json_rows(folder / "responses.jsonl"):
        verdicts.setdefault(row["id"], []).append(row["correct"])
    return {name: fmean(values) for name, values in verdicts.items()}


def show_accuracy(right: Mapping[str, float]) -> str:
    """Return an accuracy in percent with its 95 % interval."""
    if not right:
        return ""
    low, high = wilson_interval(fmean(right.values()), len(right))
    return f"{100 * fmean(right.values()):.1f} ({100 * low:.0f} to {100 * high:.0f})"


def is_empty(path: Path) -> bool:
    """Return whether a file of chosen rows has none."""
    return path.exists() and not path.stat().st_size


def show_rows(path: Path) -> str:
    """Return the number of different rows that a student learned from."""
    if not path.exists():
        return ""
    with path.open(encoding="utf-8") as lines:
        return str(len(set(lines)))


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


def measure_costs(folder: Path, hours: float) -> Costs:
    """Return what a stage has cost."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    gib = sum(path.stat().st_size for path in files) / 2**30
    samples = sum(count_rows(folder / name) for name in (*SAMPLED, "rollouts.jsonl"))
    return samples, count_sampled(folder), sum_tokens(folder, "train"), hours, gib


def add_costs(stages: Mapping[str, Costs], names: Iterable[str]) -> Costs:
    """Return the sum of the costs of stages; one that has not begun costs nothing."""
    chosen = [stages[name] for name in names if name in stages]
    return tuple(map(sum, zip((0.0,) * len(COSTS), *chosen, strict=True)))


def show_costs(costs: Costs) -> list[str]:
    """Return costs as cells."""
    *counts, hours, gib = costs
    return [*(f"{count:,.0f}" for count in counts), f"{hours:.2f}", f"{gib:.2f}"]


def count_rows(path: Path) -> int:
    """Return the number of rows of a file; 0 without a file."""
    return sum(1 for _ in read_json_rows(path)) if path.exists() else 0


def count_sampled(folder: Path) -> float:
    """Return the tokens that a stage has sampled: those of its rows, or of its optimizer steps."""
    rows = (row for name in SAMPLED if (folder / name).exists() for row in read_json_rows(folder / name))
    return sum(row["num_tokens"] or 0 for row in rows) + sum_tokens(folder, "generate")


def sum_tokens(folder: Path, phase: str) -> float:
    """Return the tokens of a phase of all optimizer steps, by metrics.csv; 0 for a run without such steps."""
    if not (folder / "metrics.csv").exists():
        return 0.0
    curves = read_metrics(folder / "metrics.csv")
    rates, times = (dict(zip(*curves.get(f"perf/{phase}_{what}", ((), ())), strict=True)) for what in UNITS)
    return sum((rates[step] or 0.0) * (times.get(step) or 0.0) for step in rates)


UNITS = ("tokens_per_s", "s")


def main(words: Iterable[str] | None = None) -> int:
    """Run `split`, `choose` or `table`, and return the exit status."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    split = verbs.add_parser("split", help="write train.jsonl, validation.jsonl and test.jsonl")
    split.add_argument("rows", help="a file, a folder or a hub id, as data.source takes it")
    split.add_argument("folder", type=Path)
    split.add_argument("--until", help="the stage that the script ends after")
    choose = verbs.add_parser("choose", help="write the rows that a stage learns from")
    choose.add_argument("way", choices=("all", "first", "best", "quarter", "eighth", "gap"))
    choose.add_argument("source", type=Path)
    choose.add_argument("output", type=Path)
    choose.add_argument("like", type=Path, help="few rows are repeated up to the number of rows of this file")
    table = verbs.add_parser("table", help="write own_rows.md, and print it")
    table.add_argument("run", type=Path, help="the folder of all stages")
    options = parser.parse_args(None if words is None else [*words])
    try:
        if options.verb == "split":
            require_stage(options.until)
            counts = split_rows(options.rows, options.folder)
            # Rows with a trace here and there are rows without: a warm-up on traces needs one in each row.
            traces = "with" if 2 * count_traces(options.folder) > counts["train"] else "without"
            shown = ", ".join(f"{number} {part}" for part, number in counts.items())
            print(f"{shown} rows in {options.folder}, {traces} traces")
        elif options.verb == "choose":
            options.output.parent.mkdir(parents=True, exist_ok=True)
            number = count_rows(options.like)
            rows = choose_rows(options.way, read_json_rows(options.source), number)
            rewrite(options.output, map(format_line, repeat_rows(rows, number)))
        else:
            page = build_page(options.run)
            rewrite(options.run / TABLE, [page])
            print(f"\n{page}\n{options.run / TABLE}")
    except InputError as error:
        print(f"rlt: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
