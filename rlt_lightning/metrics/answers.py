"""How often answers are right: pass@1 with its standard error, pass@k and maj@k, as functions and a Metric.

A record is a row of `responses.jsonl`, one judged response: see `judge_responses` in modules/evaluation.py.
The records of a problem have the same id and follow each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby
from operator import add

import torch
from torch import Tensor
from torchmetrics import Metric

from rlt_lightning.run.jsonl import JsonRow

OVERALL = "overall"  # the figures' name for the mean over sets
# Figures of a set, as `eval/SET/NAME`.
SET_FIGURES = (
    *("num_problems", "pass_at_1", "standard_error", "pass_at_k", "maj_at_k", "formatted_frac"),
    *("timed_out_frac", "truncated_frac", "tokens_mean"),
)

# The figures of one set, by the last part of the names under which they are logged.
Figures = dict[str, float]


def add_overall(figures: dict[str, Figures]) -> dict[str, Figures]:
    """Add "overall" to the figures of several sets, the plain mean, as in the paper."""
    if len(figures) > 1:
        parts = list(figures.values())
        overall = {
            name: sum(part[name] for part in parts) / len(parts)
            for name in ("pass_at_1", "pass_at_k", "maj_at_k")
        }
        squares = sum(part["standard_error"] ** 2 for part in parts)
        figures[OVERALL] = overall | {"standard_error": math.sqrt(squares) / len(parts)}
    return figures


def name_figures(figures: dict[str, Figures]) -> Figures:
    """Return the figures by the names under which they are logged."""
    return {
        f"eval/{name}/{figure}": value for name, of_set in figures.items() for figure, value in of_set.items()
    }


def compute_set_figures(records: Sequence[JsonRow]) -> Figures:
    """Return the figures of the records of one set. All problems have equally many responses, k."""
    problems = split_by_problem(records)
    accuracies = [mean([record["correct"] for record in problem]) for problem in problems]
    pass_at = list(compute_pass_at(records).values())
    figures = {
        "num_problems": len(problems),
        "pass_at_1": mean(accuracies),
        "standard_error": standard_error(accuracies),
        "pass_at_k": pass_at[-1] if pass_at else math.nan,
        "maj_at_k": mean([majority_accuracy(problem) for problem in problems]),
        "formatted_frac": single_precision_mean([record["formatted"] for record in records]),
        "timed_out_frac": single_precision_mean([record["timed_out"] for record in records]),
    }
    # Given responses may not say how they were sampled.
    sampled = [record for record in records if record["num_tokens"] is not None]
    if sampled:
        is_truncated = [record["finish_reason"] == "length" for record in sampled]
        figures["truncated_frac"] = single_precision_mean(is_truncated)
        figures["tokens_mean"] = single_precision_mean([record["num_tokens"] for record in sampled])
    return figures


def compute_pass_at(records: Sequence[JsonRow]) -> dict[int, float]:
    """Return pass@k of one set for powers of two and, last, for all responses to a problem."""
    counts = [
        (sum(record["correct"] for record in problem), len(problem)) for problem in split_by_problem(records)
    ]
    if not counts:
        return {}
    num_samples = counts[0][1]
    return {k: mean([pass_at_k(*count, k) for count in counts]) for k in list_reported_k(num_samples)}


# Formulas


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Return the probability that at least one of k responses to a problem is right, without bias.

    1 - C(n - c, k) / C(n, k)          for c right ones of n >= k      (Codex, arXiv:2107.03374, Eq. 1)

    Raises:
        ValueError: If there are fewer than k responses.
    """
    if num_samples < k:
        raise ValueError(f"pass@{k} needs {k} responses per problem, but got {num_samples}.")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def standard_error(accuracies: Sequence[float]) -> float:
    """Return the standard error of pass@1, taking the problems as a sample of many like them.

    pass@1 = mean_i p_i, with p_i the fraction of problem i's k responses that are right

    standard error = sqrt(sum_i (p_i - pass@1)^2 / (n (n - 1)))

    Responses to one problem are not independent, so k enters only through the p_i. NaN for a single problem.
    """
    n = len(accuracies)
    if n < 2:
        return math.nan
    center = mean(accuracies)
    squares = reduce(add, [accuracy**2 for accuracy in accuracies]) - n * (center * center)
    return math.sqrt(max(squares, 0.0) / (n * (n - 1)))


def majority_accuracy(records: Sequence[JsonRow]) -> float:
    """Return the fraction of the most frequent answers to a problem that is right (maj@k).

    It is 0 or 1 or, in a tie, between. `same_answer` is equal for equivalent answers; None, for a response
    without an answer, is no vote.
    """
    votes = Counter(record["same_answer"] for record in records if record["same_answer"] is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = {record["same_answer"] for record in records if record["correct"]}
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(answer in right for answer in winners) / len(winners)


def list_reported_k(num_samples: int) -> list[int]:
    """Return the k for which pass@k is reported: powers of two, and the number of samples."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]


def mean(values: Sequence[float]) -> float:
    """Return the mean, NaN without values. Not by sum(), whose rounding depends on Python's version."""
    return reduce(add, values) / len(values) if values else math.nan


def single_precision_mean(values: Sequence[float]) -> float:
    """Return the mean in single precision, in which metrics are logged; NaN without values."""
    return float(torch.tensor(values, dtype=torch.float32).mean())


# Helpers


def split_by_problem(records: Iterable[JsonRow]) -> list[list[JsonRow]]:
    """Return the records of each problem."""
    return [list(same) for _, same in groupby(records, key=lambda record: record["id"])]


# Over batches and ranks


COLUMNS = ("id", "correct", "formatted", "timed_out", "same_answer", "num_tokens", "truncated")


class AnswerFigures(Metric):
    """pass@1 with its standard error, pass@k, maj@k and more of each set and over sets, of batches and ranks.

    Its state is a row for each response, since a standard error and a vote need all responses to a problem.

    Args:
        set_of: The set of each problem, by the problem's id, set after set.
        sync_on_compute: Whether all ranks have records, and compute together.
    """

    full_state_update = False
    rows: list[Tensor] | Tensor

    def __init__(self, set_of: dict[str, str], sync_on_compute: bool = True) -> None:
        super().__init__(sync_on_compute=sync_on_compute)
        self.set_of = set_of
        self.number_of = {name: number for number, name in enumerate(set_of)}
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, records: Iterable[JsonRow]) -> None:
        """Add judged responses, rows of `responses.jsonl`."""
        rows = [self._to_row(record) for record in records]
        assert isinstance(self.rows, list)
        self.rows.append(torch.tensor(rows, dtype=torch.float64, device=self.device).view(-1, len(COLUMNS)))

    def compute(self) -> tuple[dict[str, Figures], dict[str, dict[int, float]]]:
        """Return the figures by set and those of `add_overall`, and by set pass@k by k."""
        rows = self.rows if isinstance(self.rows, Tensor) else torch.cat(self.rows)
        records: dict[str, list[JsonRow]] = {name: [] for name in self.set_of.values()}
        sets = list(self.set_of.values())
        for record in read_records(rows.tolist()):
            records[sets[record["id"]]].append(record)
        figures = {name: compute_set_figures(part) for name, part in records.items()}
        return add_overall(figures), {name: compute_pass_at(part) for name, part in records.items()}

    def _to_row(self, record: JsonRow) -> list[float]:
        """Return a record's numbers, NaN for None."""
        number = self.number_of[record["id"]]
        values = record | {"id": number, "truncated": record["finish_reason"] == "length"}
        return [math.nan if values[name] is None else float(values[name]) for name in COLUMNS]


def read_records(rows: Iterable[list[float]]) -> Iterable[JsonRow]:
    """Yield the records of rows, in the order of the problems."""
    for row in sorted(rows, key=lambda row: row[0]):
        record: JsonRow = {n: None if math.isnan(v) else int(v) for n, v in zip(COLUMNS, row, strict=True)}
        yield record | {"finish_reason": "length" if record["truncated"] else None}
