"""The finding with a real model: SmolLM2-135M as teacher, as frozen student, and as compared students.

    python research/finding_smollm2.py --output_dir DIR          # make finding-smollm2: all arms, one seed

Every arm trains the same student in the same way, on other explanations of the same problems:

    raw            the uneven traces themselves
    warmup         a teacher that was fine-tuned on such traces, at temperature 0.7 as all others
    greedy         control: the same teacher at temperature 0
    best_of_4      control: the same teacher, the best of four by the reward
    rlt            that teacher after GRPO with the RLT reward
    solution_only  the same without r_KL (lambda 0)
    shuffled       the same with advantages shuffled within each group: nothing to learn from
    oracle         right steps throughout

All stages are `rlt` commands, with one setting for all arms. Run it again after a crash: finished stages are
skipped, and the interrupted one resumes. It writes `finding.json`, `finding.md` and `finding.svg` about all
arms and seeds in its folder. Processes with other seeds or arms may run at the same time in the same folder.

On a GPU: --train "--trainer.accelerator gpu --trainer.precision bf16-mixed" and, so that one batch holds all
problems, --explain "--trainer.accelerator gpu --data.prompts_per_step 256", --answer "--trainer.accelerator
gpu --data.batch_size 192", the last two also with --rollouts.engine.init_args.max_sequences.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure
from trace_kinds import TRACE_KINDS, word_sum_kind

from rlt_lightning.tasks.stepwise import word_sum_rows

ARMS = ("raw", "warmup", "greedy", "best_of_4", "rlt", "solution_only", "shuffled", "oracle")
WRITTEN: dict[str, dict[str, Any]] = {  # how the warm-up teacher writes the traces of an arm
    "warmup": {},
    "greedy": {"rollouts.sampling.temperature": 0},
    "best_of_4": {"rollouts.num_traces": 4, "distillation.select": "best_reward"},
}
TRAINED: dict[str, dict[str, Any]] = {  # the settings of each teacher that RL trains
    "rlt": {},
    "solution_only": {"model.reward.kl_weight": 0},
    "shuffled": {"model.advantages": "rlt_lightning.numerics.advantages.ShuffledAdvantages"},
}
ANSWERS: dict[str, dict[str, Any]] = {"accuracy": {}, "greedy": {"rollouts.sampling.temperature": 0}}
NUM_TRACES, TRACE_SEED = 256, 2  # problems that students learn from; rows and seed of laptop/smollm2_generate
CONFIGS = Path(__file__).parents[1] / "configs"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time pass, among those that name the same file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, text: str) -> None:
    """Replace a file as a whole, since another process may be reading it."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


class Stages:
    """Runs `rlt` stage by stage and keeps what each has taken.

    Args:
        out: Folder of all stages.
        options: Further options of a stage, by its config's name.
    """

    def __init__(self, out: Path, options: dict[str, list[str]]) -> None:
        self.out = out
        self.options = options

    def run(self, name: str, verb: str, config: str, result: str, settings: dict[str, Any]) -> Path:
        """Run one stage unless its result is there, and return the result's path."""
        with locked(self.out / f".{name}.lock"):  # a stage that several seeds share runs once
            return self._run(name, verb, config, result, settings)

    def _run(self, name: str, verb: str, config: str, result: str, settings: dict[str, Any]) -> Path:
        folder = self.out / name
        if (folder / result).exists():
            return folder / result
        command = [sys.executable, "-m", "rlt_lightning", verb, "--config", str(CONFIGS / f"{config}.yaml")]
        settings = settings | {"output_dir": folder, "resume": "true"}
        command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        command += self.options.get(config, [])
        print(f"== {name}", flush=True)
        start = time.monotonic()
        with (self.out / f"{name}.log").open("a") as log:
            if status := subprocess.run(command, stdout=log, stderr=log).returncode:
                raise SystemExit(f"{name} ended with status {status}: see {log.name}")
        seconds = time.monotonic() - start
        with (self.out / "times.jsonl").open("a") as times:
            times.write(json.dumps({"stage": name, "seconds": round(seconds, 1)}) + "\n")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # 1.6 GB each
        print(f"   {seconds:.0f} s", flush=True)
        return folder / result

    def seconds(self) -> float:
        """Return what all stages have taken together."""
        return sum(row["seconds"] for row in read_rows(self.out / "times.jsonl"))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in path.open()]


def write_traces(out: Path) -> dict[str, Path]:
    """Write the sources of the arms without a teacher, on the problems that the teachers explain."""
    paths = {}
    for arm in ("raw", "oracle"):
        right = {"mixture": None} if arm == "oracle" else {}
        rows = word_sum_rows(NUM_TRACES, TRACE_SEED, **right)
        paths[arm] = out / f"{arm}.jsonl"
        write(paths[arm], "".join(json.dumps(row) + "\n" for row in rows))
    return paths


def teacher(stages: Stages, arm: str, seed: int) -> Path:
    """Train the teacher of an arm and return its model folder."""
    warm = stages.run("warmup", "fit", "laptop/smollm2_warmup", "model", {})
    if arm in WRITTEN:
        return warm
    seeds = {"model.seed": seed, "rollouts.seed": seed, "data.seed": 10 + seed}
    settings = {"model.teacher": warm, **TRAINED[arm], **seeds}
    return stages.run(f"{arm}-{seed}", "fit", "laptop/smollm2_rlt", "model", settings)


def traces(stages: Stages, arm: str, seed: int) -> Path:
    """Let the teacher of an arm explain the students' problems."""
    model = teacher(stages, arm, seed)
    settings = {"model.teacher": model, "rollouts.seed": 100 + seed, **WRITTEN.get(arm, {})}
    return stages.run(
        f"{arm}-{seed}-traces", "predict", "laptop/smollm2_generate", "distillation.jsonl", settings
    )


def student(stages: Stages, arm: str, seed: int, source: Path) -> None:
    """Train a student on an arm's explanations, and let it answer unseen problems, sampled and greedily."""
    settings: dict[str, Any] = {"data.source": source, "data.seed": seed, "model.seed": seed}
    model = stages.run(f"{arm}-{seed}-student", "fit", "laptop/smollm2_sft", "model", settings)
    for name, sampling in ANSWERS.items():
        settings = {"model.pretrained": model, "rollouts.seed": 200 + seed, **sampling}
        stages.run(f"{arm}-{seed}-{name}", "test", "laptop/smollm2_evaluate", "evaluation.json", settings)


def collect(stages: Stages) -> dict[str, Any]:
    """Return the figures of all arms and seeds that have answers in the folder, in percent."""
    arms: dict[str, Any] = {}
    for arm in ARMS:
        folders = stages.out.glob(f"{arm}-*-greedy/evaluation.json")
        figures: dict[str, Any] = defaultdict(list)
        for seed in sorted(int(path.parent.name.split("-")[1]) for path in folders):
            answers = {name: stages.out / f"{arm}-{seed}-{name}" / "evaluation.json" for name in ANSWERS}
            if not all(path.exists() for path in answers.values()):
                continue
            for name, path in answers.items():
                result = json.loads(path.read_text())["sets"]["word_sums"]
                figures[name].append(100 * result["pass_at_1"])
                figures[f"{name}_error"].append(100 * result["standard_error"])
            source = stages.out / f"{arm}-{seed}-traces" / "distillation.jsonl"
            figures["kinds"].append(measure_kinds(source if source.exists() else stages.out / f"{arm}.jsonl"))
            figures["seeds"].append(seed)
        if figures:
            arms[arm] = figures
    finding = {"unit": "percent", "arms": arms, "reward_by_kind": {}, "gates": {}, "groups": []}
    finding["seeds"] = sorted({seed for figures in arms.values() for seed in figures["seeds"]})
    if "warmup" in arms:
        path = stages.out / f"warmup-{arms['warmup']['seeds'][0]}-traces" / "traces.jsonl"
        finding |= {"reward_by_kind": reward_by_kind(path), "gates": gates(path)}
    return finding | {"seconds": stages.seconds()}


def measure_kinds(path: Path) -> dict[str, float]:
    """Return the share of each kind among the traces that a student learns from, in percent."""
    rows = read_rows(path)
    counts = Counter(word_sum_kind(row["question"], row["reasoning_trace"])[0] for row in rows)
    return {kind: 100 * counts[kind] / len(rows) for kind in TRACE_KINDS}


def reward_by_kind(path: Path) -> dict[str, dict[str, float]]:
    """Return the number of traces of each kind, and the means of their reward and its two terms."""
    rows = defaultdict(list)
    for row in read_rows(path):
        rows[word_sum_kind(row["question"], row["reasoning_trace"])[0]].append(row)
    names = {"reward": "reward", "solution": "solution_reward", "kl": "kl_reward"}
    return {
        kind: {"num": len(rows[kind]), **{k: fmean(row[v] for row in rows[kind]) for k, v in names.items()}}
        for kind in TRACE_KINDS
        if rows[kind]
    }


def gates(path: Path) -> dict[str, bool]:
    """Say of the warm-up teacher's traces whether RL has something to choose from, and can choose it."""
    rows, by_kind = read_rows(path), reward_by_kind(path)
    right = by_kind.get("steps", {"num": 0})["num"] / len(rows)
    closed = sum(row["closed"] for row in rows) / len(rows)
    best = max(by_kind, key=lambda kind: by_kind[kind]["reward"])
    return {
        f"right traces {100 * right:.0f} %, should be 10 to 35": 0.10 <= right <= 0.35,
        f"closed {100 * closed:.0f} %, should be above 95": closed > 0.95,
        f"the reward likes {best} best, should be steps": best == "steps",
    }


def interval(values: list[float], errors: list[float]) -> float:
    """Return half the width of a 95 % interval of a mean over seeds.

    With three or more seeds it is by Student's t, with fewer by the standard error over problems.
    """
    if len(values) >= 3:
        t = {3: 4.303, 4: 3.182, 5: 2.776}.get(len(values), 2.571)
        return t * stdev(values) / math.sqrt(len(values))
    return 1.96 * math.hypot(*errors) / len(errors)


def table(finding: dict[str, Any]) -> str:
    """Write the arms, and what the reward thinks of the warm-up teacher's traces, as tables."""
    lines = [f"| student trained on | accuracy, T 0.7 | greedy | traces: {' / '.join(TRACE_KINDS)}, % |"]
    lines.append("|---|---|---|---|")
    for arm, figures in finding["arms"].items():
        scores = []
        for name in ("accuracy", "greedy"):
            half = interval(figures[name], figures[f"{name}_error"])
            scores.append(f"{fmean(figures[name]):.1f} ± {half:.1f}")
        kinds = [fmean(row[kind] for row in figures["kinds"]) for kind in TRACE_KINDS]
        lines.append(f"| {arm} | {' | '.join(scores)} | {' / '.join(f'{kind:.0f}' for kind in kinds)} |")
    lines += [
        "",
        "| the warm-up teacher's traces | number | reward | r_SS | −λ r_KL |",
        "|---|---|---|---|---|",
    ]
    for kind, row in finding["reward_by_kind"].items():
        terms = " | ".join(f"{row[name]:.2f}" for name in ("reward", "solution", "kl"))
        lines.append(f"| {kind} | {row['num']} | {terms} |")
    return "\n".join(lines) + "\n"


def draw(finding: dict[str, Any], path: Path) -> None:
    """Draw the arms' accuracies beside the kinds of traces that their students learn from."""
    arms = finding["arms"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [arm.replace("_", "\n") for arm in arms]
    scores = [fmean(row["accuracy"]) for row in arms.values()]
    halves = [interval(row["accuracy"], row["accuracy_error"]) for row in arms.values()]
    within = [
        [min(half, score) for score, half in zip(scores, halves, strict=True)],
        [min(half, 100 - score) for score, half in zip(scores, halves, strict=True)],
    ]
    bars = left.bar(names, scores, yerr=within, capsize=5, color="#0b6e99")
    left.bar_label(bars, fmt="%.0f %%")
    greedy = [fmean(row["greedy"]) for row in arms.values()]
    left.plot(names, greedy, "D", color="#d98c3f", label="greedy")
    left.legend(loc="upper left")
    left.set(title="accuracy on unseen problems: bars T 0.7", ylabel="%", ylim=(0, 112))
    bottom = [0.0] * len(arms)
    for kind, color in zip(TRACE_KINDS, ("#2a7f3f", "#b0b0b0", "#d9822b", "#b03a3a", "#6b4fa0"), strict=True):
        parts = [fmean(kinds[kind] for kinds in row["kinds"]) for row in arms.values()]
        right.bar(names, parts, bottom=bottom, label=kind, color=color)
        bottom = [below + part for below, part in zip(bottom, parts, strict=True)]
    right.set(title="the traces that it learnt from", ylabel="%")
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (left, right):
        axes.tick_params(axis="x", labelsize=8.5)  # else the names of neighbours touch
    figure.savefig(path)


def main() -> None:
    """Run the arms that are asked for, and write down after each what is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="", help="such as '0 1 2'; '0' by default")
    parser.add_argument("--arms", default="", help="such as 'warmup rlt'; all by default")
    parser.add_argument("--train", default="", help="further options of all `rlt fit`, in one word")
    parser.add_argument("--rlt", default="", help="further options of those that train a teacher by RL")
    parser.add_argument("--explain", default="", help="further options of all `rlt predict`")
    parser.add_argument("--answer", default="", help="further options of all `rlt test`")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    arm_names = [arm for arm in ARMS if arm in (options.arms.split() or ARMS)]
    if unknown := set(options.arms.split()) - set(ARMS):
        parser.error(f"the arms are {', '.join(ARMS)}, but ARMS names {', '.join(unknown)}. Correct it.")
    words = options.seeds.split() or ["0"]
    if odd := [word for word in words if not word.isdecimal()]:
        parser.error(f"SEEDS must be numbers such as '0 1 2', but names {', '.join(odd)}. Correct it.")
    seeds = [int(word) for word in words]
    out: Path = options.output_dir
    out.mkdir(parents=True, exist_ok=True)
    train, explain, answer = (
        shlex.split(words) for words in (options.train, options.explain, options.answer)
    )
    stages = Stages(
        out,
        {
            "laptop/smollm2_warmup": train,
            "laptop/smollm2_sft": train,
            "laptop/smollm2_rlt": train + shlex.split(options.rlt),
            "laptop/smollm2_generate": explain,
            "laptop/smollm2_evaluate": answer,
        },
    )
    sources = write_traces(out)
    for seed in seeds:
        for arm in arm_names:
            student(stages, arm, seed, sources.get(arm) or traces(stages, arm, seed))
            finding = write_finding(stages)
            if arm == "warmup" and seed == seeds[0]:
                for line, passes in finding["gates"].items():
                    print(f"   gate: {line}: {'passes' if passes else 'FAILS'}", flush=True)
    print(f"\n{table(finding)}\nFigures: {out / 'finding.json'}, picture: {out / 'finding.svg'}")


def write_finding(stages: Stages) -> dict[str, Any]:
    """Write down what is known so far, and return it."""
    out = stages.out
    with locked(out / ".finding.lock"):  # else an older state may replace a newer one
        finding = collect(stages)
        write(out / "finding.json", json.dumps(finding, indent=1) + "\n")
        write(out / "finding.md", table(finding))
        draw(finding, out / "finding.svg")
    return finding


if __name__ == "__main__":
    main()
