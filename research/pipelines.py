"""RLT against the usual pipelines, in miniature: each student learns from equally many rows of one kind.

    python research/pipelines.py --output_dir DIR               # three seeds

The stages and settings are the finding's, with these arms besides:

    unjudged    the base's first answer to each problem, right or wrong
    rejection   the base's first right answer of eight to each problem
    shortest    its shortest right answer
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import driver
from arms import Arms, Setting, read
from finding import Finding
from stages import StageError

SELECT = {"unjudged": "first", "rejection": "first", "shortest": "shortest"}
POOL = 2  # problems that are answered for each row, so that enough of them have a right answer


class Pipelines(Finding):
    """The finding's stages of one seed, with the usual pipeline's traces beside those of teachers."""

    SETTINGS: ClassVar[dict[str, Setting]] = {"main": Setting("main")}
    ARMS = ("raw", *SELECT, "warmup", "rlt")
    prepare = Arms.prepare  # no gates

    def make_traces(self, arm: str) -> Path:
        """Return the file that an arm's students learn from: as many rows as every student has.

        Raises:
            StageError: If there are fewer.
        """
        if arm not in SELECT:
            return super().make_traces(arm)
        number = self.setting.num_traces
        options = {"data__max_rows": POOL * number, "distillation__select": SELECT[arm]}
        name = "shortest" if arm == "shortest" else "rejection"
        answers = self.answer(f"{name}/answers", self.base, "pool", **options)
        rows = read(answers / ("traces.jsonl" if arm == "unjudged" else "distillation.jsonl"))
        if arm == "unjudged":
            rows = [row for row in rows if row["trace"] == 0 and row["solution"]]
        if len(rows) < number:
            raise StageError(f"{arm} must have {number} rows, but has {len(rows)}.")
        return self.write_rows(arm, rows[:number])


if __name__ == "__main__":
    sys.exit(driver.main("pipelines", __doc__, Pipelines, "main"))
