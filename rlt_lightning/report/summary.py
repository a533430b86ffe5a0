"""The top of a page: what was trained, what changed, what that took, and how runs differ.

run/result.py    first and last figures of a fit               ─┐
config.yaml      models, method, problems                      ─┼▶ build_summary    of one run
metrics.csv      seconds of the phases, tokens per second      ─┘  tabulate_results of all runs
rollouts.jsonl   kinds of completions, right answers           ──▶ tabulate_kinds
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlt_lightning.report.collect import DIVERGENCE, Run, is_distilled
from rlt_lightning.run.metrics import find_metric, list_metrics
from rlt_lightning.run.result import HELD_OUT, Change, FitResult

# The figures of the table, in its order. The loss is left out where it says nothing or the same.
FIGURES = (
    *("reward/mean", "reward/solution", "reward/kl", "student/kl_mean", "reward/correct"),
    *(DIVERGENCE, "policy/loss"),
    *("rollout/closed_frac", "rollout/length_mean", "policy/entropy", *HELD_OUT),
)
# Settings that most people change, if the run has them.
SETTINGS = (
    *("trainer.max_steps", "model.init_args.group_size", "data.init_args.prompts_per_step"),
    *("model.init_args.optimizer.lr", "model.init_args.reward.init_args.kl_weight"),
    *("model.init_args.loss.init_args.kl_coef", "rollouts.sampling.temperature"),
    *("rollouts.sampling.max_completion_length", "data.init_args.num_embedded_rows", "seed_everything"),
)
# Settings of the command, which change nothing about a run.
OF_COMMAND = {".output_dir", ".verbose", ".resume", ".overwrite"}
OWN_FOLDER = ("trainer.default_root_dir", "output_dir", "save_dir")  # every run has another


def build_summary(run: Run) -> dict[str, Any]:
    """Return what the top of the page says of a run: sentences and settings."""
    settings = {name.removeprefix("."): str(value) for name, value in run.settings.items()}
    return {
        "trained": describe_training(run),
        "over": describe_windows([run]) if run.result and run.result.changes else "",
        "facts": list_costs(run),
        "main_settings": {name: settings[name] for name in SETTINGS if name in settings},
        "settings": [[name, value] for name, value in settings.items()],
    }


def read_setting(run: Run, *names: str) -> str:
    """Return a setting of the model, the data or the trainer by the first name that the run has; else ''."""
    for name in names:
        section, _, rest = name.partition(".")
        for place in (f".{section}.init_args.{rest}", f".{section}.{rest}"):
            if (value := run.settings.get(place)) is not None:
                return str(value)
    return ""


def read_place(run: Run, *names: str) -> str:
    """Return the model or source that a setting names; of a long absolute path its end."""
    text = read_setting(run, *names)
    parts = Path(text).parts
    return "/".join(("…", *parts[-3:])) if Path(text).is_absolute() and len(parts) > 4 else text


def classify_run(run: Run) -> str:
    """Return what kind of run it is, in the words that begin its page."""
    if run.evaluation is not None:
        return "Evaluation"
    if not (run.result and run.result.steps):
        return "Scored completions" if run.completions.total else "Groups by reward"
    if is_distilled(run):
        return "On-policy distillation"
    if "reward/mean" not in run.metrics and not run.completions.spreads.get("reward"):
        return "Supervised fine-tuning"
    if read_setting(run, "model.scorer"):
        return "Likelihood rewards"
    is_taught = describe_students(run) or read_setting(run, "model.student")
    reward = describe_reward(run)
    return (
        "Reinforcement-learned teacher"
        if is_taught and reward in ("", "RLTReward")
        else "Reinforcement learning"
    )


def describe_training(run: Run) -> str:
    """Return what was trained, on what and how, in one sentence; of other runs what was done."""
    count = count_problems(run)
    if run.evaluation is not None:
        sets = ", ".join(str(found.get("title", name)) for name, found in run.evaluation["sets"].items())
        judge = f", judged by {run.evaluation['judge']}" if "judge" in run.evaluation else ""
        return f"The model {run.evaluation.get('model', '')} was evaluated on {sets}{judge}."
    steps = run.result.steps if run.result else 0
    if not steps:
        return f"{run.completions.total:,} completions of {count} were scored." if count else ""
    model = read_place(run, "model.pretrained", "model.teacher") or "a model"
    source = read_place(run, "data.source")
    on = f" on {source}" if source else ""
    length = f"{steps:,} iterations" + (
        f", {run.completions.total:,} completions of {count}" if count else ""
    )
    kind = classify_run(run)
    if kind == "On-policy distillation":
        teacher = read_place(run, "model.teacher") or "itself"
        return (
            f"{kind}: the student {model} was trained on its own answers{on} to match {teacher}, which sees "
            f"the solution: {length}."
        )
    if kind == "Supervised fine-tuning":
        return f"{kind}: {model} was trained{on}: {steps:,} optimizer steps."
    if kind == "Likelihood rewards":
        return (
            f"{kind}: {model} was trained{on} to think so that the reference solution becomes probable for "
            f"the scorer {read_setting(run, 'model.scorer')}, by {describe_reward(run)}: {length}."
        )
    if kind == "Reinforcement-learned teacher":
        students = describe_students(run) or read_place(run, "model.student")
        return (
            f"{kind}: {model} was trained to explain solutions{on} in the way that helps the frozen "
            f"student{'s' * (', ' in students)} {students} most: {length}."
        )
    reward = describe_reward(run)
    return f"{kind}{f' with {reward}' if reward else ''}: {model} was trained{on}: {length}."


def describe_reward(run: Run) -> str:
    """Return the name of the reward's class; '' if the settings name none."""
    return read_setting(run, "model.reward.class_path").rpartition(".")[2]


def count_problems(run: Run) -> str:
    """Return the number of problems that a run has completions of, in words; '' if there are none."""
    number = len(run.completions.problems)
    return f"{number:,} problem{'s' * (number != 1)}" if number else ""


def describe_students(run: Run) -> str:
    """Return the several students of a run, with their weights if they have any; '' if there is one."""
    setting = ".model.init_args.students"
    weights = {name: v for name, v in run.settings.items() if name.startswith(f"{setting}.")}
    weighed = [f"{name.removeprefix(f'{setting}.')} ({value:g})" for name, value in weights.items()]
    return ", ".join([*map(str, run.settings.get(setting) or ()), *weighed])


def list_costs(run: Run) -> dict[str, str]:
    """Return what a run took: seconds of its phases, and tokens."""
    phases = [run.metrics[m.name] for m in list_metrics() if m.drawn == "stack" and m.name in run.metrics]
    by_step: dict[int, float] = {}
    for steps, values in phases:
        for step, value in zip(steps, values, strict=True):
            by_step[step] = by_step.get(step, 0.0) + (value or 0.0)
    facts = {"time of all iterations": describe_seconds(sum(by_step.values()))} if by_step else {}
    speeds = dict(zip(*run.metrics.get("perf/tokens_per_s", ([], [])), strict=True))
    tokens = sum(by_step[step] * (speed or 0.0) for step, speed in speeds.items() if step in by_step)
    if tokens:
        what = "sampled" if "rollout/length_mean" in run.metrics else "trained, prompts included"
        facts[f"tokens {what}"] = f"{float(f'{tokens:.3g}'):,.0f}"
    return facts


def describe_seconds(seconds: float) -> str:
    """Return a time in hours, minutes or seconds."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 / 60:.0f} min"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"


def describe_windows(runs: list[Run]) -> str:
    """Return what the first and last figures of the table are means of."""
    changes = [run.result.changes for run in runs if run.result]
    sizes = {max(change.num_steps for change in found.values()) for found in changes if found}
    number = (
        f"{min(sizes)} iterations" if len(sizes) == 1 else "iterations, a quarter of each run and at most ten"
    )
    held_out = any(run.result and run.result.held_out for run in runs)
    more = " Held-out figures: the first and the last validation." if held_out else ""
    return f"Means over the first and over the last {number}. Problems differ between iterations.{more}"


def tabulate_results(runs: list[Run], names: list[str]) -> list[list[str]]:
    """Return the table of what the runs learned, the header first; empty if none is a fit.

    One run has columns for first, last and change; several have one column each.
    """
    results = [run.result or FitResult(run.folder) for run in runs]
    found = [result.changes | result.held_out for result in results]
    shown = [name for name in FIGURES if any(name in changes for changes in found)]
    if any({"reward/mean", DIVERGENCE} & changes.keys() for changes in found):
        shown = [name for name in shown if name != "policy/loss"]
    shown += sorted({name for changes in found for name in changes if name.endswith("/pass_at_1")} - {*shown})
    if not shown:
        return []
    if len(runs) > 1:
        rows = [
            [title_figure(n), *(describe_change(n, c[n]) if n in c else "–" for c in found)] for n in shown
        ]
        return [["figure", *names], *rows]
    [changes] = found
    rows = [[title_figure(n), *split_change(n, changes[n])] for n in shown]
    return [["figure", "first", "last", "change"], *rows]


def title_figure(name: str) -> str:
    """Return the words for a figure of the table."""
    own = {
        "reward/solution": "solution term, r_SS",
        "reward/kl": "KL term, −kl_weight · r_KL",
        "student/kl_mean": "KL per token, not weighted",
        "rollout/closed_frac": "closed",
        "rollout/length_mean": "length, tokens",
        **{held_out: f"held-out {words}" for held_out, words in HELD_OUT.items()},
    }
    if name.endswith("/pass_at_1"):
        return f"accuracy on {name.split('/')[1]}"
    return own.get(name) or find_metric(name).title.lower()


def is_fraction(name: str) -> bool:
    """Return whether a figure is shown in percent."""
    return find_metric(name).unit == "fraction" or name.endswith(("_frac", "/pass_at_1"))


def describe_change(name: str, change: Change) -> str:
    """Return a figure at the start and at the end of a run."""
    first, last, _ = split_change(name, change)
    if first == last:
        return first
    unit = "\u00a0%" if is_fraction(name) else ""
    return f"{first.removesuffix(unit)} → {last}"


def split_change(name: str, change: Change) -> list[str]:
    """Return a figure at the start, at the end, and its change."""
    scale, units = (100, ("\u00a0%", " points")) if is_fraction(name) else (1, ("", ""))
    first, last = scale * change.first, scale * change.last
    texts = f"{first:.3g}{units[0]}", f"{last:.3g}{units[0]}", f"{last - first:+.3g}{units[1]}"
    return [text.replace("-", "−") for text in texts]


def list_differences(runs: list[Run]) -> list[list[str]]:
    """Return the settings in which runs differ, one row each: its name, and its value in every run."""
    names = sorted({name for run in runs for name in run.settings} - OF_COMMAND)
    rows = [[shorten_name(name), *(str(run.settings.get(name, "–")) for run in runs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1 and not row[0].endswith(OWN_FOLDER)]


def shorten_name(name: str) -> str:
    """Return a setting as the command line takes it: model.reward.kl_weight."""
    return name.removeprefix(".").replace(".init_args", "")


def describe_scales(runs: list[Run]) -> str:
    """Return why the rewards of the runs that have any must not be compared; '' if they may be."""
    runs = [run for run in runs if "reward" in run.completions.terms or "reward/mean" in run.metrics]
    if len({is_distilled(run) for run in runs}) > 1:
        return "These runs do not train for the same: the reward of one is no reward of the other."
    named = ("model.reward", "model.student", "model.class_path")
    own = [row[0] for row in list_differences(runs) if row[0].startswith(named)]
    if not own:
        return ""
    shown = ", ".join(name.removeprefix("model.") for name in own[:4])
    return (
        f"The rewards of these runs have different scales, since {shown} differ{'s' * (len(own) == 1)}: a "
        "larger reward does not mean a better run. Compare right answers, held-out accuracy and students."
    )


def tabulate_kinds(run: Run, name: str) -> dict[str, Any] | None:
    """Return what the reward makes of each kind of completion; None without two kinds or a reward."""
    found = run.completions.by_kind
    if len(found) < 2 or is_distilled(run):
        return None
    total = sum(kind.count for kind in found.values())
    rows = [
        [
            kind,
            f"{100 * own.count / total:.1f} %",
            f"{own.rewards.mean:.3g}".replace("-", "−"),
            f"{own.leads.mean:+.3g}".replace("-", "−") if own.leads.count else "–",
            f"{100 * own.tops / own.groups:.0f} % of {own.groups:,}" if own.groups else "–",
        ]
        for kind, own in found.items()
    ]
    header = ["kind", "share", "mean reward", "minus its group's mean", "has the group's largest reward"]
    return {"run": name, "rows": [header, *rows]}
