"""RLT against every cheaper way with SmolLM2, many problems, three seeds; every stage is an `rlt` command.

Every arm trains the same student in the same way, on other explanations of the same problems:

    rlt_t07, rlt_t0    the warm-up teacher after RLT (24 iterations of 8 x 16, half the learning rate), by T
    warm_t07, warm_t0  the warm-up teacher itself
    best_of_4          the same, the best of four by the reward: more samples than RLT has
    own                greedy answers of a student that knows the form, from uneven traces
    own_right          the right ones of these
    oracle             right steps throughout

Finished stages are passed over, so a run that was cut short goes on where it was.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from common import ON_CPU, OUT, TINY, Finding, attempt, note
from stages import Stages
from trace_kinds import word_sum_kind

from rlt_lightning.tasks.stepwise import word_sum_rows

ARMS = ("rlt_t07", "rlt_t0", "warm_t07", "warm_t0", "best_of_4", "own", "own_right", "oracle")
SEEDS, ROWS, WARM_ROWS, TESTS = ((0,), 16, 16, 4) if TINY else ((0, 1, 2), 2048, 256, 512)
BASE = os.environ.get("BASE", "smollm2-135m")
CONFIG = "laptop/smollm2_"
Options = dict[str, Any]
CARD: Options = {"trainer__accelerator": "cpu" if ON_CPU else "gpu"}
SAMPLE = CARD | {"rollouts__engine": "rlt_lightning.engines.HFEngine"}
SAMPLE |= {"rollouts__engine__init_args__max_sequences": 1024}
# Compiling a head takes longer than these runs save by it.
TRAIN = CARD | {"model__head__compiled": "false", "checkpoint__save_top_k": 0}
TRAIN |= {"trainer__precision": "32-true" if ON_CPU else "bf16-mixed"}
STEPS, PROMPTS, GROUP = (1, 2, 2) if TINY else (24, 8, 16)
RLT: Options = {"trainer__max_steps": STEPS, "data__prompts_per_step": PROMPTS, "model__group_size": GROUP}
RLT |= {"model__optimizer__lr": 1e-5}
PER_STEP: Options = {"data__prompts_per_step": 8 if TINY else 1024}  # of what is only sampled


class Comparison:
    """The stages of all arms, and the sources that these share."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.stages = Stages(folder)
        problems = word_sum_rows(ROWS, 2)
        rows = {"raw": word_sum_rows(WARM_ROWS, 1), "oracle": word_sum_rows(ROWS, 2, mixture=None)}
        rows["bare"] = [{key: row[key] for key in ("question", "solution")} for row in problems]
        self.files = {name: folder / f"{name}.jsonl" for name in rows}
        for name, file in self.files.items():
            file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))

    def warm_up(self) -> Path:
        options = TRAIN | {"model__pretrained": BASE, "data__num_embedded_rows": WARM_ROWS}
        return self.stages("warmup", "fit", f"{CONFIG}warmup", **options) / "model"

    def train_teacher(self, seed: int) -> Path:
        seeds = {"model__seed": seed, "rollouts__seed": seed, "data__seed": 10 + seed}
        models = {"model__teacher": self.warm_up(), "model__student": BASE}
        options = TRAIN | SAMPLE | RLT | models | seeds
        options["data__num_embedded_rows"] = ROWS
        return self.stages(f"rlt-{seed}", "fit", f"{CONFIG}rlt", **options) / "model"

    def explain(self, name: str, teacher: Path, temperature: float, **options: Any) -> Path:
        options |= SAMPLE | PER_STEP | {"model__teacher": teacher, "model__student": BASE}
        options |= {"rollouts__sampling__temperature": temperature, "rollouts__seed": 100}
        options["data__num_embedded_rows"] = ROWS
        return self.stages(name, "predict", f"{CONFIG}generate", **options) / "distillation.jsonl"

    def answer(self) -> Path:
        """Let the student of raw traces answer the bare problems greedily; return the folder."""
        student = self.train_student("raw", 0, self.files["raw"])
        options = SAMPLE | PER_STEP | {"model__teacher": student, "data__source": self.files["bare"]}
        options |= {"data__student_system_prompt": "Think, then write the solution."}
        options |= {"rollouts__num_traces": 1, "rollouts__sampling__temperature": 0}
        options |= {"rollouts__sampling__max_completion_length": 80}
        return self.stages("own", "predict", "laptop/rejection", **options)

    def write_source(self, arm: str, seed: int) -> Path:
        """Return the explanations that the students of an arm learn from."""
        if arm in self.files:
            return self.files[arm]
        if arm.startswith("own"):
            return self.answer() / ("traces.jsonl" if arm == "own" else "distillation.jsonl")
        if arm == "best_of_4":
            best = {"rollouts__num_traces": 4, "distillation__select": "best_reward"}
            return self.explain("best_of_4-traces", self.warm_up(), 0.7, **best)
        teacher = self.train_teacher(seed) if arm.startswith("rlt") else self.warm_up()
        name = f"{arm}-{seed}-traces" if arm.startswith("rlt") else f"{arm}-traces"
        return self.explain(name, teacher, 0.7 if arm.endswith("t07") else 0)

    def train_student(self, arm: str, seed: int, source: Path) -> Path:
        options = TRAIN | {"model__pretrained": BASE, "data__source": source, "data__max_bad_frac": 0.9}
        options |= {"data__seed": seed, "model__seed": seed} | ({"trainer__max_steps": 2} if TINY else {})
        return self.stages(f"{arm}-{seed}", "fit", f"{CONFIG}sft", **options) / "model"

    def test(self, name: str, model: Path, seed: int, temperature: float) -> float:
        """Return how many of the unseen problems a student solves, in percent."""
        options = SAMPLE | {"model__pretrained": model, "data__max_rows": TESTS, "data__batch_size": TESTS}
        options |= {"rollouts__sampling__temperature": temperature, "rollouts__seed": 200 + seed}
        folder = self.stages(name, "test", f"{CONFIG}evaluate", **options)
        result = json.loads((folder / "evaluation.json").read_text())["sets"]["word_sums"]
        return round(100 * result["pass_at_1"], 1)

    def run(self, arm: str, seed: int) -> Finding:
        source = self.write_source(arm, seed)
        if seed == SEEDS[0]:
            rows = [json.loads(line) for line in source.open()]
            kinds = Counter(word_sum_kind(row["question"], row["reasoning_trace"])[0] for row in rows)
            note(f"traces, {arm}", None, number=len(rows), **{str(kind): n for kind, n in kinds.items()})
        model = self.train_student(arm, seed, source)
        scores = {"t07": 0.7, "greedy": 0.0}
        return None, {how: self.test(f"{arm}-{seed}-{how}", model, seed, t) for how, t in scores.items()}


def main() -> None:
    comparison = Comparison(OUT / "runs" / "smollm2")
    comparison.stages.start()
    arms = ("rlt_t07", "best_of_4") if TINY else ARMS  # a tiny model's own answers have no form
    with ThreadPoolExecutor(2 if ON_CPU else 10) as pool:
        jobs = [
            pool.submit(attempt, f"smollm2, {arm}, seed {seed}", partial(comparison.run, arm, seed))
            for arm in arms
            for seed in SEEDS
        ]
    sys.exit(not all(job.result() for job in jobs))


if __name__ == "__main__":
    main()
