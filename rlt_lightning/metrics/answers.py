"""How often the answers to a set of problems are right."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torchmetrics import Metric

from rlt_lightning.evaluation.metrics import Figures, compute_pass_at, compute_set_figures
from rlt_lightning.run.jsonl import Row

COLUMNS = ("id", "correct", "formatted", "timed_out", "same_answer", "num_tokens", "truncated")


class AnswerFigures(Metric):
    """pass@1 with its standard error, pass@k, maj@k and more of one set, over batches and ranks.

    Its state is a row for each response, since a standard error and a vote need all responses to a problem.
    """

    full_state_update = False
    rows: list[Tensor] | Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, number: int, record: Row) -> None:
        """Add a judged response to a problem.

        Args:
            number: The problem's place in its set.
            record: A row of `responses.jsonl`.
        """
        values = record | {"id": number, "truncated": record["finish_reason"] == "length"}
        row = [math.nan if values[name] is None else float(values[name]) for name in COLUMNS]
        assert isinstance(self.rows, list)
        self.rows.append(torch.tensor([row], dtype=torch.float64, device=self.device))

    def compute(self) -> tuple[Figures, dict[int, float]]:
        """Return the figures by name, and pass@k by k."""
        rows = self.rows if isinstance(self.rows, Tensor) else torch.cat([*self.rows, torch.zeros(0, 7)])
        records = [*read_records(rows.tolist())]
        return compute_set_figures(records), compute_pass_at(records)


def read_records(rows: Iterable[list[float]]) -> Iterable[Row]:
    """Yield the records of rows, in the order of the problems."""
    for row in sorted(rows, key=lambda row: row[0]):
        record: Row = {n: None if math.isnan(v) else int(v) for n, v in zip(COLUMNS, row, strict=True)}
        yield record | {"finish_reason": "length" if record["truncated"] else None}
