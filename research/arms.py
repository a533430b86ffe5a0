"""The stages of one setting and one seed, and what is measured of an arm: what all comparisons share.

A model of 184,000 parameters is teacher, frozen student and student. For each seed the teacher is warmed up
on traces of uneven quality. Each arm then makes traces in its own way, and a student learns from them. Arms
of every comparison:

    base      no traces: the student before training
    raw       traces like those of the warm-up
    oracle    traces with all steps right
    warmup    written by the warm-up teacher, at temperature 0.7

All stages are `rlt` commands, with one setting for all arms. A stage that has ended is passed over, so every
method may ask for a model or a file of traces without making it twice.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from stages import Stages
from trace_kinds import TRACE_KINDS, chain_kind

from rlt_lightning.run.jsonl import format_line, read_json_rows, rewrite
from rlt_lightning.tags import R1
from rlt_lightning.tasks.draw import find_split
from rlt_lightning.tasks.stepwise import CHAIN_SPLITS, OPERATIONS, Mixture, Operation, TraceKind, chain_rows
from rlt_lightning.types import InputError

Row = dict[str, Any]
Table = dict[str, dict[str, Any]]  # rows of named cells
FOLDER = Path(__file__).parent / "miniatures"
MINIATURES = {name: str(FOLDER / f"miniature-{name}") for name in ("seed1", "qwen2", "pieces")}
SHUFFLED = "rlt_lightning.numerics.advantages.ShuffledAdvantages"
PROMPTS_PER_STEP = 8  # of laptop/rlt and laptop/grpo
TERMS = {"reward": "reward", "r_SS": "solution_reward", "−λ r_KL": "kl_reward"}  # columns of traces


@dataclass(frozen=True)
class Setting:
    """What all arms of a comparison share.

    Args:
        name: Name of its folder.
        base: Teacher before its warm-up.
        pretraining: Options of make_miniature.py that make the base instead; all seeds share it.
        student: Frozen student, and student before its training; None: the base.
        length: Steps of a problem.
        mixture: Quality of the traces of the warm-up; the default is that of pretraining.
        last: Operations of a problem's last step.
        num_warmup: Traces that the teacher is warmed up on.
        num_warmup_epochs: Epochs of the warm-up.
        kl_weight: Weight of r_KL (λ), where the arm does not say another.
        student_lr: Peak learning rate of the students.
        student_epochs: Epochs of the students.
        num_iterations: Iterations of RLT.
        group_size: Explanations of a problem in an iteration.
        num_traces: Traces that a student learns from.
        num_pool: Further problems: for ranked traces, and to choose answers from.
        num_test: Held-out problems.
        num_votes: Answers to each of them, of the students that vote; 0: none but the usual one.
        right_traces: Least and greatest share of right traces of the warm-up teacher, a gate of the finding.
    """

    name: str
    base: str = "miniature"
    pretraining: str = ""
    student: str | None = None
    length: int = 5
    mixture: Mixture = field(default_factory=Mixture)
    last: tuple[Operation, ...] = OPERATIONS
    num_warmup: int = 2048
    num_warmup_epochs: int = 1
    kl_weight: float = 3
    student_lr: float = 2e-4
    student_epochs: int = 3
    num_iterations: int = 40
    group_size: int = 8
    num_traces: int = 512
    num_pool: int = 2048
    num_test: int = 512
    num_votes: int = 0
    right_traces: tuple[float, float] = (0.10, 0.35)

    @property
    def num_sampled(self) -> int:
        """Return how many explanations RLT samples, its final ones included."""
        return self.num_iterations * PROMPTS_PER_STEP * self.group_size + self.num_traces

    @property
    def num_equal(self) -> int:
        """Return how many traces of each problem are as many as RLT samples."""
        return round(self.num_sampled / self.num_traces)


class Arms:
    """All stages of one setting and one seed.

    Args:
        stages: Runs the stages.
        setting: What all arms share.
        seed: Seed of problems, traces, sampling and training.
    """

    SETTINGS: ClassVar[dict[str, Setting]]
    ARMS: ClassVar[Sequence[str]]  # that run if none is named
    WITHOUT_TRACES: ClassVar[Sequence[str]] = ("base",)
    VOTED: ClassVar[Sequence[str]] = ()  # whose students answer each problem several times
    TRAINING: ClassVar[Sequence[str]] = ("warmup", "rlt", "raw", "pool")  # files of rows for training
    classify: Callable[[str, str], tuple[TraceKind, int]] = staticmethod(chain_kind)

    def __init__(self, stages: Stages, setting: Setting, seed: int) -> None:
        self.stages, self.setting, self.seed = stages, setting, seed
        self.base = str(stages.folder / "base") if setting.pretraining else setting.base
        self.student_base = setting.student or self.base
        self.name = f"{setting.name}/seed{seed}"
        self.folder = stages.folder / self.name
        self.seeds: dict[str, Any] = {"data__seed": seed, "model__seed": seed, "rollouts__seed": seed}
        self.weight: dict[str, Any] = {"model__reward__kl_weight": setting.kl_weight}

    @classmethod
    def check_arm(cls, arm: str) -> None:
        """Raise InputError if there is no such arm."""
        if arm not in cls.ARMS:
            raise InputError(f"--arms may name {', '.join(cls.ARMS)}, but names {arm}. Correct it.")

    def data_file(self, name: str) -> Path:
        """Return the path of a file of rows that `write_data` writes."""
        return self.folder / "data" / f"{name}.jsonl"

    def write_rows(self, name: str, rows: Iterable[Row]) -> Path:
        """Write a file of rows whole, and return its path."""
        path = self.data_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        rewrite(path, map(format_line, rows))
        return path

    def write_data(self) -> None:
        """Write the rows of all stages; all arms have their traces for the same problems."""
        setting, seed = self.setting, 10 * self.seed
        mixture = setting.mixture
        kind: dict[str, Any] = {"length": setting.length, "last": setting.last}
        rows = {
            "warmup": chain_rows(setting.num_warmup, seed + 1, "train", mixture, **kind),
            "rlt": chain_rows(512, seed + 2, "train", mixture, **kind),
            "raw": chain_rows(setting.num_traces, seed + 3, "train", mixture, **kind),
            "oracle": chain_rows(setting.num_traces, seed + 3, "train", None, **kind),
            "pool": chain_rows(setting.num_pool, seed + 4, "train", mixture, **kind),
            "test": chain_rows(setting.num_test, 0, "test", mixture, **kind),
        }
        for name, some in rows.items():
            keys = ("question", "answer") if name == "test" else ("question", "solution", "reasoning_trace")
            self.write_rows(name, ({key: row[key] for key in keys} for row in some))

    def count_overlaps(self) -> int:
        """Return the number of held-out questions that are in a training stream, pretraining included."""
        seen = {row["question"] for name in self.TRAINING for row in read(self.data_file(name))}
        asked = [row["question"] for row in read(self.data_file("test"))]
        return sum(question in seen or find_split(question, CHAIN_SPLITS) != "test" for question in asked)

    # Stages

    def stage(self, name: str, verb: str, config: str, result: str | None = None, **options: Any) -> Path:
        """Run a stage in a folder of this seed, and return the folder."""
        return self.stages(f"{self.name}/{name}", verb, config, result, **options)

    def prepare(self) -> None:
        """Write the data and, once for all seeds, pretrain the base of a setting that has none."""
        self.write_data()
        if self.setting.pretraining:
            with self.stages.locks.setdefault("base", threading.Lock()):
                if not Path(self.base, "pretraining.jsonl").exists():
                    words = ["--output_dir", self.base, *self.setting.pretraining.split()]
                    self.stages.run(words, Path(f"{self.base}.log"), pretrain)

    def warm_up(self) -> Path:
        """Return the teacher after its warm-up (stage 1)."""
        folder = self.stage(
            "warmup/teacher",
            "fit",
            "laptop/warmup",
            model__pretrained=self.base,
            data__source=self.data_file("warmup"),
            trainer__max_epochs=self.setting.num_warmup_epochs,
            data__seed=self.seed,
            model__seed=self.seed,
        )
        return folder / "model"

    def run_rlt(
        self, arm: str, student: Path | str | None = None, source: str = "rlt", **options: Any
    ) -> Path:
        """Train the warm-up teacher by RLT (stage 2), and return the model."""
        folder = self.stage(
            f"{arm}/teacher",
            "fit",
            "laptop/rlt",
            model__teacher=self.warm_up(),
            model__student=student or self.student_base,
            data__source=self.data_file(source),
            **{
                "trainer__max_steps": self.setting.num_iterations,
                "model__group_size": self.setting.group_size,
                **self.weight,
                **self.seeds,
                **options,
            },
        )
        return folder / "model"

    def explain(
        self, name: str, teacher: Path, student: Path | str | None = None, source: str = "raw", **options: Any
    ) -> Path:
        """Let a teacher explain the problems of a file (stage 3); return the folder of its traces."""
        return self.stage(
            name,
            "predict",
            "laptop/generate",
            model__teacher=teacher,
            model__student=student or self.student_base,
            data__source=self.data_file(source),
            **{**self.weight, **self.seeds, **options},
        )

    def answer(self, name: str, model: Path | str, source: str = "raw", **options: Any) -> Path:
        """Let a model answer the problems of a file, and keep right answers; return the folder."""
        problems = {"model__teacher": model, "data__source": self.data_file(source)}
        return self.stage(name, "predict", "laptop/rejection", **{**problems, **self.seeds, **options})

    def make_traces(self, arm: str) -> Path:
        """Return the file that an arm's student learns from."""
        if arm == "warmup":
            return self.explain("warmup/traces", self.warm_up()) / "distillation.jsonl"
        return self.data_file(arm)  # raw, oracle

    def fine_tune(
        self,
        arm: str,
        traces: Path,
        start: Path | str | None = None,
        lr: float | None = None,
        epochs: int | None = None,
    ) -> Path:
        """Fine-tune the untrained student, or another start, on traces (stage 4); return the model."""
        folder = self.stage(
            f"{arm}/student",
            "fit",
            "laptop/sft",
            model__pretrained=start or self.student_base,
            data__source=traces,
            model__optimizer__lr=lr or self.setting.student_lr,
            trainer__max_epochs=epochs or self.setting.student_epochs,
            data__seed=self.seed,
            model__seed=self.seed,
        )
        return folder / "model"

    def train_student(self, arm: str) -> Path | str:
        """Return the student of an arm."""
        return self.student_base if arm == "base" else self.fine_tune(arm, self.make_traces(arm))

    def evaluate(self, arm: str, model: Path | str, **options: Any) -> None:
        """Let an arm's student answer the held-out problems (stage 5), and vote if the setting says so."""
        seeded = {"rollouts__seed": self.seed, **options}
        for name, temperature in (("sampled", 0.7), ("greedy", 0.0)):
            self.ask(f"{arm}/{name}", model, rollouts__sampling__temperature=temperature, **seeded)
        if self.votes(arm):
            self.ask(f"{arm}/votes", model, rollouts__num_samples=self.setting.num_votes, **seeded)

    def votes(self, arm: str) -> bool:
        """Return whether an arm's student answers each problem several times."""
        return bool(self.setting.num_votes) and arm in self.VOTED

    def ask(self, name: str, model: Path | str, source: str = "test", **options: Any) -> Path:
        """Let a model answer the problems of a file."""
        sets = json.dumps({"chains": str(self.data_file(source))})
        return self.stage(
            name, "test", "laptop/evaluate", model__pretrained=model, data__sets=sets, **options
        )

    def run_arm(self, arm: str) -> None:
        """Run all stages of an arm."""
        self.evaluate(arm, self.train_student(arm))

    # Figures

    def measure(self, arm: str) -> dict[str, Any]:
        """Return the figures of an arm: accuracies and kinds of traces in percent, mean reward in nats."""
        found = {
            "accuracy": self.read_accuracy(f"{arm}/sampled"),
            "greedy": self.read_accuracy(f"{arm}/greedy"),
        }
        if self.votes(arm):
            for name in ("pass_at_k", "maj_at_k"):
                found[name] = self.read_accuracy(f"{arm}/votes", name)
        if arm not in self.WITHOUT_TRACES:
            rows = read(self.make_traces(arm))
            found |= {"rows": len(rows), "traces": self.measure_kinds(rows)}
            if rows and "reward" in rows[0]:
                found["reward"] = fmean(row["reward"] for row in rows)
        return found

    @classmethod
    def summarise(cls, ones: list[Any], arms: list[str]) -> dict[str, Table]:
        """Return further tables of a setting, by their titles."""
        return {}

    def read_accuracy(self, name: str, key: str = "pass_at_1") -> float:
        """Return the share of problems that a student answers right, in percent."""
        [found] = json.loads((self.folder / name / "evaluation.json").read_text())["sets"].values()
        return 100 * float(found[key])

    def read_thoughts(self, arm: str) -> list[Row]:
        """Return the thoughts that an arm's student samples for held-out problems, in their order."""
        rows = [{"question": row["question"], "reasoning_trace": ""} for row in read(self.data_file("test"))]
        for row in read(self.folder / arm / "sampled" / "responses.jsonl"):
            rows[int(row["id"].split("/")[1]) - 1]["reasoning_trace"] = self.find_thought(row["response"])
        return rows

    @staticmethod
    def find_thought(text: str) -> str:
        """Return the thought of an answer; none without its opening tag."""
        return text.partition(R1.thought_open)[2].partition(R1.thought_close)[0]

    def measure_kinds(self, rows: list[Row]) -> dict[str, float]:
        """Return the share of each kind of trace, in percent."""
        counts = Counter(self.classify(row["question"], row["reasoning_trace"])[0] for row in rows)
        return {kind: 100 * counts[kind] / max(1, len(rows)) for kind in TRACE_KINDS}

    @classmethod
    def measure_rewards(cls, rows: Iterable[Row]) -> Table:
        """Return the number of traces of each kind, and the means of their reward and its terms, in nats."""
        by_kind = defaultdict(list)
        for row in rows:
            by_kind[str(cls.classify(row["question"], row["reasoning_trace"])[0])].append(row)
        return {
            kind: {"number": len(some)}
            | {name: fmean(row[key] for row in some) for name, key in TERMS.items() if key in some[0]}
            for kind, some in sorted(by_kind.items())
        }


def pretrain(words: list[str], log: Path) -> None:
    """Import PyTorch and pretrain a base: a target of `Stages.run`."""
    from make_miniature import main

    from rlt_lightning.commands.demo import enter_stage

    enter_stage(log)
    main(words)


def read(path: Path) -> list[Row]:
    """Return all rows of a file of JSON lines."""
    return [*read_json_rows(path)]
