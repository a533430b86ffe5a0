"""The arms of the finding: how each makes the traces from which its student learns.

A model of 184,000 parameters is teacher, frozen student and student. For each seed the teacher is warmed up
on traces of uneven quality. Each arm then makes 512 traces in its own way, and a student learns from them:

    base           no traces: the student before training
    warmup         by the warm-up teacher
    rlt            by that teacher after 40 iterations of RLT
    solution_only  the same without r_KL (lambda 0)
    kl_only        the same without r_SS
    shuffled       the same with advantages shuffled within each group: nothing to learn from
    lambda_N       the same with weight N of r_KL instead of 3
    raw            traces like those of the warm-up
    oracle         traces with all steps right
    own_t0         the untrained student's own greedy answers, right or wrong: no teacher, no solution
    own_right_8    its first right one of eight sampled answers: no teacher

Two have no traces either. GRPO rewards a student's own right answers, with as many answers in all as RLT and
its traces sample, and that student is evaluated:

    grpo           of the untrained student
    warm_grpo      of a student that has read the traces of the warm-up as the teacher has, without solutions

Further arms show what decoding and selection give without RLT, and what they add to it:

    warmup_tN      by the warm-up teacher at temperature N; 0: greedily
    rlt_tN         the same by the teacher after RLT
    best_of_N      by the warm-up teacher, of N explanations the best by the same reward
    best_of_equal  the same, with as many explanations in all as RLT samples: 6 a problem, 2 in setting filler
    best_of_N_tN   the same at another temperature
    majority_of_N  by the warm-up teacher, the most frequent of N

The temperature is 0.7 unless a name says otherwise. A teacher samples once at each temperature, and the best
of 4 and of 16 are chosen from the same file. All stages are `rlt` commands, with one setting for all arms.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from stages import Stages

from rlt_lightning.run.jsonl import format_line, read_json_rows, rewrite
from rlt_lightning.tasks.stepwise import OPERATIONS, Mixture, Operation

FOLDER = Path(__file__).parent / "miniatures"
MINIATURES = {name: str(FOLDER / f"miniature-{name}") for name in ("seed1", "qwen2", "pieces")}
SHUFFLED = "rlt_lightning.numerics.advantages.ShuffledAdvantages"
TRAINED: dict[str, dict[str, Any]] = {  # what an arm's RLT differs in
    "rlt": {},
    "solution_only": {"model__reward__kl_weight": 0},
    "kl_only": {"model__reward__solution_weight": 0},
    "shuffled": {"model__advantages": SHUFFLED},
    "lambda_0.3": {"model__reward__kl_weight": 0.3},
    "lambda_1": {"model__reward__kl_weight": 1},
    "lambda_3": {"model__reward__kl_weight": 3},
    "lambda_10": {"model__reward__kl_weight": 10},
}


@dataclass(frozen=True)
class Decoding:
    """How a teacher writes the traces of an arm.

    Args:
        teacher: Arm whose teacher writes them.
        temperature: Its sampling temperature; 0: greedily.
        num_traces: Traces of a problem, of which one is selected; None: as many as RLT samples in all.
        by_count: Select the most frequent trace instead of the one with the best reward.
    """

    teacher: str = "warmup"
    temperature: float = 0.7
    num_traces: int | None = 1
    by_count: bool = False


DECODED = {
    "warmup_t0": Decoding(temperature=0),
    "warmup_t0.3": Decoding(temperature=0.3),
    "warmup_t1": Decoding(temperature=1),
    "best_of_4": Decoding(num_traces=4),
    "best_of_equal": Decoding(num_traces=None),
    "best_of_16": Decoding(num_traces=16),
    "best_of_4_t0.3": Decoding(temperature=0.3, num_traces=4),
    "best_of_16_t0.3": Decoding(temperature=0.3, num_traces=16),
    "best_of_4_t1": Decoding(temperature=1, num_traces=4),
    "best_of_16_t1": Decoding(temperature=1, num_traces=16),
    "majority_of_16": Decoding(num_traces=16, by_count=True),
    "rlt_t0": Decoding("rlt", temperature=0),
    "rlt_t0.3": Decoding("rlt", temperature=0.3),
    "rlt_t1": Decoding("rlt", temperature=1),
    "rlt_best_of_4": Decoding("rlt", num_traces=4),
    "rlt_best_of_16": Decoding("rlt", num_traces=16),
}
OWN: dict[str, tuple[str, dict[str, Any]]] = {  # the untrained student's own answers: which, and how many
    "own_t0": ("traces.jsonl", {"rollouts__num_traces": 1, "rollouts__sampling__temperature": 0}),
    "own_right_8": ("distillation.jsonl", {"rollouts__num_traces": 8}),
}
WITHOUT_TRACES = ("base", "grpo", "warm_grpo")
ARMS = (*WITHOUT_TRACES, *OWN, "raw", "warmup", *TRAINED, *DECODED, "oracle")
NUM_SAMPLED = 16  # traces of a problem, of which the best of 4 and of 16 are selected
PROMPTS_PER_STEP = 8  # of laptop/rlt and laptop/grpo
WARMUP_LR = 3e-4  # of laptop/warmup
SAMPLED_ARMS = ("warmup", "rlt", "solution_only")  # whose teachers explain one problem eight times
LEAD = ("rlt", "warmup", "warmup_t0", "best_of_equal")  # RLT, and what it must beat
VOTED = ("base", *LEAD, "rlt_t0")  # whose students answer each problem several times, where a setting says so
NUM_GROUPS = 8  # of ranked traces
STEPS_RIGHT, LEAPS_COPIED, CLOSED = 0.99, 0.95, 0.95  # gates


@dataclass(frozen=True)
class Setting:
    """What all arms of a comparison share.

    Args:
        name: Name of its folder; "main", or what it varies.
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
        num_pool: Problems whose traces are ranked.
        num_pool_traces: Traces of each of them.
        num_test: Held-out problems.
        num_votes: Answers to each of them, of the students of the arms `VOTED`; 0: none but the usual one.
        right_traces: Least and greatest share of right traces of the warm-up teacher, a gate.
    """

    name: str = "main"
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
    num_pool_traces: int = 1
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


MAINS = {
    # The warm-up teacher's most probable explanation has all steps right.
    "main": Setting(),
    # It is filler, and RLT and its 2,560 traces sample as much as two traces of each problem.
    "filler": Setting(
        "filler",
        length=4,
        mixture=Mixture(hazard=0.75),
        num_traces=2560,
        student_epochs=1,
        num_pool_traces=8,
        num_votes=16,
        right_traces=(0.02, 0.35),
    ),
    # The base knows every step and has never composed two; in the warm-up four of five traces are filler.
    "steps_only": Setting(
        "steps_only",
        pretraining="--corpus sheets --num_steps 4000 --num_drills 2021 --stop_after 2400",
        length=4,
        mixture=Mixture(hazard=0.1, filler=1, filler_start=0.8),
        num_warmup_epochs=4,
        kl_weight=0.1,
        num_traces=2560,
        right_traces=(0, 1),
    ),
}
VARIATIONS = {
    "another_base": Setting("another_base", base=MINIATURES["seed1"]),
    "qwen2": Setting("qwen2", base=MINIATURES["qwen2"]),
    "pieces_student": Setting("pieces_student", student=MINIATURES["pieces"]),
    "four_steps": Setting("four_steps", length=4),
    "other_mixture": Setting("other_mixture", mixture=Mixture(hazard=0.46)),
}
ANY_SHARE = replace(MAINS["filler"], right_traces=(0, 1), num_votes=0)
FURTHER = {  # of the variations, those that only run when they are named
    "pieces_teacher": Setting("pieces_teacher", base=MINIATURES["pieces"], student="miniature"),
    "pieces_both": Setting("pieces_both", base=MINIATURES["pieces"]),
    "filler_another_base": replace(ANY_SHARE, name="filler_another_base", base=MINIATURES["seed1"]),
    "filler_pieces_student": replace(ANY_SHARE, name="filler_pieces_student", student=MINIATURES["pieces"]),
    # A map of filler: how often traces of the warm-up break off, and how many explanations a group has.
    **{
        name: replace(ANY_SHARE, name=name, mixture=Mixture(hazard=hazard), group_size=group_size)
        for hazard in (0.3, 0.5, 0.65, 0.75, 0.8, 0.85, 0.9, 0.95)
        for group_size in (4, 8, 32, 64)
        for name in [f"hazard_{hazard}_group_{group_size}"]
    },
    # The same with fewer right traces than the base itself writes.
    **{
        name: replace(
            ANY_SHARE,
            name=name,
            mixture=Mixture(hazard=0.95),
            group_size=group_size,
            num_warmup_epochs=4,
        )
        for group_size in (8, 64)
        for name in [f"hazard_0.95_epochs_4_group_{group_size}"]
    },
}


class Arms:
    """All stages of one setting and one seed.

    Args:
        stages: Runs the stages.
        setting: What all arms share.
        seed: Seed of problems, traces, sampling and training.
    """

    def __init__(self, stages: Stages, setting: Setting, seed: int) -> None:
        self.stages, self.setting, self.seed = stages, setting, seed
        self.base = str(stages.folder / "base") if setting.pretraining else setting.base
        self.student_base = setting.student or self.base
        self.name = f"{setting.name}/seed{seed}"
        self.folder = stages.folder / self.name
        self.seeds: dict[str, Any] = {"data__seed": seed, "model__seed": seed, "rollouts__seed": seed}
        self.weight: dict[str, Any] = {"model__reward__kl_weight": setting.kl_weight}

    def data_file(self, name: str) -> Path:
        """Return the path of a file of rows that `write_data` writes."""
        return self.folder / "data" / f"{name}.jsonl"

    def write_data(self) -> None:
        """Write the rows of all stages; all arms have their traces for the same problems."""
        from rlt_lightning.tasks.stepwise import chain_rows

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
            self.data_file(name).parent.mkdir(parents=True, exist_ok=True)
            keys = ("question", "answer") if name == "test" else ("question", "solution", "reasoning_trace")
            text = "".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in some)
            self.data_file(name).write_text(text)

    def num_overlaps(self) -> int:
        """Return the number of held-out questions that are in a training stream, pretraining included."""
        from rlt_lightning.tasks.stepwise import CHAIN_SPLITS

        names = ("warmup", "rlt", "raw", "pool")
        seen = {row["question"] for name in names for row in read(self.data_file(name))}
        asked = [row["question"] for row in read(self.data_file("test"))]
        return sum(question in seen or CHAIN_SPLITS.find_split(question) != "test" for question in asked)

    # Stages

    def prepare(self) -> None:
        """Write the data, warm the teacher up (stage 1) and let it write traces."""
        self.write_data()
        self.make_base()
        self.stages(
            f"{self.name}/warmup/teacher",
            "fit",
            "laptop/warmup",
            model__pretrained=self.base,
            data__source=self.data_file("warmup"),
            trainer__max_epochs=self.setting.num_warmup_epochs,
            data__seed=self.seed,
            model__seed=self.seed,
        )
        self.make_traces("warmup")

    def make_base(self) -> None:
        """Pretrain the base of a setting that has none, once for all seeds."""
        if not self.setting.pretraining:
            return
        with self.stages.locks.setdefault("base", threading.Lock()):
            if not Path(self.base, "pretraining.jsonl").exists():
                words = ["--output_dir", self.base, *self.setting.pretraining.split()]
                self.stages.run(words, Path(f"{self.base}.log"), pretrain)

    def train_teacher(self, arm: str) -> Path:
        """Return the model that writes an arm's traces; stage 2 trains it if the arm has RLT."""
        warm = self.folder / "warmup" / "teacher" / "model"
        if arm not in TRAINED:
            return warm
        folder = self.stages(
            f"{self.name}/{arm}/teacher",
            "fit",
            "laptop/rlt",
            model__teacher=warm,
            model__student=self.student_base,
            data__source=self.data_file("rlt"),
            trainer__max_steps=self.setting.num_iterations,
            model__group_size=self.setting.group_size,
            **{**self.weight, **self.seeds, **TRAINED[arm]},
        )
        return folder / "model"

    def make_traces(self, arm: str) -> Path:
        """Return the file that an arm's students learn from; stage 3 makes it for arms with a teacher."""
        if arm in ("raw", "oracle"):
            return self.data_file(arm)
        if arm in OWN:
            return self.answer(arm)
        decoding = DECODED.get(arm, Decoding(arm))
        if decoding.num_traces != 1:
            return self.select_traces(arm, decoding)
        temperature = {"rollouts__sampling__temperature": decoding.temperature} if arm in DECODED else {}
        return self.generate(arm, "traces", "raw", decoding.teacher, **temperature) / "distillation.jsonl"

    def answer(self, arm: str) -> Path:
        """Return the file of the untrained student's own answers to the problems of `raw`."""
        which, options = OWN[arm]
        answers = self.stages(
            f"{self.name}/{arm}/answers",
            "predict",
            "laptop/rejection",
            "README.md",
            model__teacher=self.student_base,
            data__source=self.data_file("raw"),
            **self.seeds,
            **options,
        )
        return answers / which  # distillation.jsonl has the right ones only

    def select_traces(self, arm: str, decoding: Decoding) -> Path:
        """Return the file of one trace a problem, selected among the first ones that the teacher sampled."""
        number, temperature = decoding.num_traces or self.setting.num_equal, decoding.temperature
        most = NUM_SAMPLED if decoding.num_traces else number
        sampled = self.generate(
            decoding.teacher,
            f"traces_{most}_t{temperature:g}",
            "raw",
            rollouts__sampling__temperature=temperature,
            rollouts__num_traces=most,
            distillation__select="all",
        )
        path = self.folder / arm / "selected.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rewrite(path, map(format_line, select(read(sampled / "traces.jsonl"), number, decoding.by_count)))
        return path

    def generate(
        self, arm: str, name: str, source: str, teacher: str | None = None, **options: object
    ) -> Path:
        """Let an arm's teacher, or that of another arm, explain the problems of a file."""
        return self.stages(
            f"{self.name}/{arm}/{name}",
            "predict",
            "laptop/generate",
            "README.md",
            model__teacher=self.train_teacher(teacher or arm),
            model__student=self.student_base,
            data__source=self.data_file(source),
            **{**self.weight, **self.seeds, **options},
        )

    def reward_answers(self, arm: str) -> Path:
        """Train a student by its own right answers (GRPO); return the model."""
        student: Path | str = self.student_base
        if arm == "warm_grpo":
            epochs = self.setting.num_warmup_epochs
            student = self.fine_tune(arm, self.data_file("warmup"), WARMUP_LR, epochs)
        group_size = self.setting.group_size
        trained = self.stages(
            f"{self.name}/{arm}/rewarded",
            "fit",
            "laptop/grpo",
            model__teacher=student,
            data__source=self.data_file("rlt"),
            trainer__max_steps=self.setting.num_sampled // (PROMPTS_PER_STEP * group_size),
            model__group_size=group_size,
            **self.seeds,
        )
        return trained / "model"

    def train_student(self, arm: str, traces: Path, greedy: bool = True) -> None:
        """Train a student on traces (stage 4) and evaluate it."""
        model = self.fine_tune(arm, traces, self.setting.student_lr, self.setting.student_epochs)
        self.evaluate(arm, model, greedy)

    def fine_tune(self, arm: str, traces: Path, lr: float, epochs: int) -> Path:
        """Fine-tune the untrained student on traces; return the model."""
        trained = self.stages(
            f"{self.name}/{arm}/student",
            "fit",
            "laptop/sft",
            model__pretrained=self.student_base,
            data__source=traces,
            model__optimizer__lr=lr,
            trainer__max_epochs=epochs,
            data__seed=self.seed,
            model__seed=self.seed,
        )
        return trained / "model"

    def evaluate(self, arm: str, model: Path | str, greedy: bool = True, **options: Any) -> None:
        """Let an arm's student answer the held-out problems (stage 5)."""
        for name, temperature in (("sampled", 0.7), ("greedy", 0.0))[: 1 + greedy]:
            self.ask(
                f"{arm}/{name}",
                model,
                rollouts__sampling__temperature=temperature,
                rollouts__seed=self.seed,
                **options,
            )

    def ask(self, name: str, model: Path | str, source: str = "test", **options: Any) -> Path:
        """Let a model answer the problems of a file."""
        return self.stages(
            f"{self.name}/{name}",
            "test",
            "laptop/evaluate",
            model__pretrained=model,
            data__sets=json.dumps({"chains": str(self.data_file(source))}),
            **options,
        )

    def run_arm(self, arm: str, samples: bool = False) -> None:
        """Run all stages of an arm; with `samples`, its teacher also explains one problem eight times."""
        if samples:
            self.generate(arm, "samples", "rlt", data__max_rows=1, rollouts__num_traces=8)
        student: Path | str = self.student_base
        if arm in WITHOUT_TRACES:
            student = student if arm == "base" else self.reward_answers(arm)
            self.evaluate(arm, student)
        else:
            self.train_student(arm, self.make_traces(arm))
            student = self.folder / arm / "student" / "model"
        if self.setting.num_votes and arm in VOTED:
            votes = {"rollouts__num_samples": self.setting.num_votes, "rollouts__seed": self.seed}
            self.ask(f"{arm}/votes", student, **votes)
            self.measure_entropies(arm, student)

    def measure_entropies(self, arm: str, student: Path | str) -> None:
        """Write how sure an arm's student is of its answers, and its teacher of its traces, at T 0.7."""
        path, teacher = self.folder / arm / "entropies.json", ""
        if arm in ("warmup", "rlt"):
            teacher = str(self.train_teacher(arm))
        if not path.exists():
            words = [str(student), teacher, str(self.data_file("test")), str(path)]
            self.stages.run(words, path.with_suffix(".log"), write_entropies)

    def all_groups(self, by: dict[str, dict[str, Any]]) -> None:
        """Rank the warm-up teacher's traces by rewards; train a student on each group (paper, Figure 4b)."""
        several = {"rollouts__num_traces": self.setting.num_pool_traces, "distillation__select": "all"}
        pool = self.generate("warmup", "pool", "pool", **several) / "distillation.jsonl"
        for name, reward in by.items():
            ranked = self.stages(
                f"{self.name}/{name}/ranked",
                "predict",
                "recipe_7b/rank",
                "groups.json",
                trainer__accelerator="cpu",
                model__teacher=self.train_teacher("warmup"),
                model__student=self.student_base,
                data__source=pool,
                data__prompts_per_step=64,
                data__tags="r1",
                data__teacher_system_prompt="",
                data__student_system_prompt="",
                scores__rank_groups=NUM_GROUPS,
                **reward,
            )
            for group in range(1, NUM_GROUPS + 1):
                rows = ranked / "groups" / f"group-{group:02d}.jsonl"
                self.train_student(f"{name}/{group}", rows, greedy=False)

    # Gates

    def measure_gates(self) -> dict[str, float]:
        """Return the figures by which the gates judge the base and the warm-up teacher's traces."""
        from gates import write_gates  # imports PyTorch

        found = []
        for base in {self.base, self.student_base}:
            path = self.folder / "data" / f"gates-{Path(base).name}.json"
            if not path.exists():
                self.stages.run([base, str(path)], path.with_suffix(".log"), write_gates)
            found.append(json.loads(path.read_text()))
        rows = read(self.folder / "warmup" / "traces" / "traces.jsonl")
        return {
            **{name: min(one[name] for one in found) for name in found[0]},
            "right_traces": measure_kinds(rows)["steps"] / 100,
            "closed": sum(row["finish_reason"] == "stop" for row in rows) / len(rows),
        }

    def passes_gates(self) -> bool:
        """Print the figures of the gates and return whether all gates hold."""
        found, num_overlaps = self.measure_gates(), self.num_overlaps()
        low, high = self.setting.right_traces
        print(
            f"{self.name}, checked before RLT (research/finding.md): single steps right "
            f"{found['step_accuracy']:.1%} (above {STEPS_RIGHT:.0%}),\n"
            f"    leaps copied {found['leaps_copied']:.1%} (above {LEAPS_COPIED:.0%}), traces of the warm-up "
            f"teacher right {found['right_traces']:.0%} ({low:.0%} to {high:.0%}),\n"
            f"    closed {found['closed']:.1%} (above {CLOSED:.0%}), held-out questions in training data "
            f"{num_overlaps} of {self.setting.num_test} (none)",
            flush=True,
        )
        fine = found["step_accuracy"] > STEPS_RIGHT and found["leaps_copied"] > LEAPS_COPIED
        fine = fine and found["closed"] > CLOSED and low <= found["right_traces"] <= high and not num_overlaps
        if not fine:
            print(f"{self.name}: a gate does not hold, so RLT is not tried here", flush=True)
        return fine


def pretrain(words: list[str], log: Path) -> None:
    """Import PyTorch and pretrain a base: a target of `Stages.run`."""
    from make_miniature import write_miniature

    write_miniature(words, log)


def write_entropies(words: list[str], log: Path) -> None:
    """Import PyTorch and write entropies: a target of `Stages.run`."""
    from gates import write_entropies as write

    write(words, log)


def select(rows: list[dict[str, Any]], number: int, by_count: bool) -> list[dict[str, Any]]:
    """Return of each problem's first traces the one with the best reward, or the most frequent one.

    Args:
        rows: Traces; those of a problem stand together.
        number: How many of a problem's traces to choose from.
        by_count: Take the most frequent; of equally frequent ones, the one that was sampled first.
    """
    selected = []
    for _, group in groupby(rows, key=lambda row: row["row"]):
        traces = list(group)[:number]
        counts = Counter(row["reasoning_trace"] for row in traces)
        ranks = [counts[row["reasoning_trace"]] if by_count else row["reward"] for row in traces]
        selected.append(traces[ranks.index(max(ranks))])
    return selected


def read(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a file of JSON lines."""
    return [*read_json_rows(path)]


def measure_kinds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the share of each kind of trace, in percent."""
    from trace_kinds import TRACE_KINDS, chain_kind

    counts = Counter(chain_kind(row["question"], row["reasoning_trace"])[0] for row in rows)
    return {kind: 100 * counts[kind] / len(rows) for kind in TRACE_KINDS}
