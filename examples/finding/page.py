"""What people see of the finding: tables, a picture, explanations, and whether it holds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from arms import NUM_GROUPS, TRAINED, Arms, read
from figures import NAMES, collect, curves, difference, failures, interval, kinds_over_iterations
from stages import ROOT

KIND_COLORS = {
    "steps": "#2a7f62",
    "filler": "#c9c9c9",
    "leap": "#d98c3f",
    "wrong": "#b2475c",
    "other": "#555555",
}
NEXT = """
Next:
  make finding             all arms, three seeds, ranked groups, variations: about twenty minutes
  make finding-smollm2     the same with SmolLM2-135M: an hour or more
  docs/new_task.md         a task and a model of your own
  docs/pipeline.md         all stages with SmolLM2, and with a 7B teacher on 8 GPUs"""


def plus_minus(values: list[float]) -> str:
    """Return a mean in percent with half of its interval, as text."""
    return f"{fmean(values):.1f} ± {interval(values):.1f}"


def kinds_text(kinds: dict[str, float]) -> str:
    """Return the shares of the kinds as one cell of a table."""
    return " / ".join(f"{kinds[kind]:.0f}" for kind in KIND_COLORS)


def mean_kinds(per_seed: list[dict[str, float]]) -> dict[str, float]:
    """Return the shares of the kinds, averaged over seeds."""
    return {kind: fmean(kinds[kind] for kinds in per_seed) for kind in KIND_COLORS}


def main_table(figures: dict[str, Any]) -> str:
    """Return a Markdown table of the arms: the accuracies of their students, and their kinds of traces."""
    num_seeds = len(figures["seeds"])
    over = f"{num_seeds} seeds" if num_seeds > 1 else "over problems"
    lines = [
        f"| student trained on | accuracy at T 0.7, % (± 95 %, {over}) | greedy, % "
        "| traces: steps / filler / leap / wrong / other, % |",
        "|---|---|---|---|",
    ]
    for arm, found in figures["arms"].items():
        name = f"**{NAMES[arm]}**" if arm == "rlt" else NAMES[arm]
        kinds = kinds_text(mean_kinds(found["kinds"]))
        lines.append(f"| {name} | {plus_minus(found['accuracy'])} | {fmean(found['greedy']):.1f} | {kinds} |")
    return "\n".join(lines)


def page(figures: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    arms, parts = figures["arms"], [main_table(figures)]
    if "warmup" in arms:
        how = "paired by seed" if len(figures["seeds"]) > 1 else "over problems"
        lines = [f"| difference to the warm-up teacher's students | points (± 95 %, {how}) |", "|---|---|"]
        for arm in (name for name in arms if name != "warmup"):
            mean, half = difference(arms, arm, "warmup")
            lines.append(f"| {NAMES[arm]} | {mean:+.1f} ± {half:.1f} |")
        parts.append("\n".join(lines))
    trained = {arm: found["rise"] for arm, found in arms.items() if "rise" in found}
    if trained:
        lines = ["| reward that was trained, first → last quarter | rise | of which r_SS | −λ r_KL |"]
        lines.append("|---|---|---|---|")
        for arm, rises in trained.items():
            cells = (fmean(one[name] for one in rises) for name in rises[0])
            lines.append(f"| {NAMES[arm]} | {' | '.join(f'{value:+.2f}' for value in cells)} |")
        parts.append("\n".join(lines))
    lines = ["| kind of trace, warm-up teacher | mean reward | traces |", "|---|---|---|"]
    for kind, found in sorted(figures["reward_by_kind"].items(), key=lambda item: -item[1]["reward"]):
        lines.append(f"| {kind} | {found['reward']:.2f} | {found['num']} |")
    parts.append("\n".join(lines))
    if figures["groups"]:
        lines = [
            "| group by reward, best first | mean reward | its students, % (± 95 %) | right steps they take "
            "| traces: steps / filler / leap / wrong / other, % | students if ranked by r_SS only "
            "| by r_KL only |",
            "|" + "---|" * 7,
        ]
        for number, group in enumerate(figures["groups"]):
            single = (figures[f"groups_{term}_only"][number]["accuracy"] for term in ("solution", "kl"))
            lines.append(
                f"| {number + 1} | {group['reward']:.2f} | {plus_minus(group['accuracy'])} "
                f"| {fmean(group['right_steps']):.1f} | {kinds_text(group['kinds'])} "
                f"| {' | '.join(f'{fmean(one):.1f}' for one in single)} |"
            )
        parts.append("\n".join(lines))
    if figures.get("variations"):
        lines = [
            "| variation | ± 95 % over | warm-up teacher, % | RLT teacher, % | greedy: warm-up → RLT, % "
            "| right traces: warm-up → RLT, % | rise of the reward |",
            "|" + "---|" * 7,
        ]
        for name, found in figures["variations"].items():
            pair = [found[arm] for arm in ("warmup", "rlt")]
            num_seeds = len(pair[0]["accuracy"])
            cells = [name.replace("_", " "), f"{num_seeds} seeds" if num_seeds > 1 else "problems"]
            cells += [plus_minus(one["accuracy"]) for one in pair]
            cells.append(" → ".join(f"{fmean(one['greedy']):.1f}" for one in pair))
            cells.append(" → ".join(f"{mean_kinds(one['kinds'])['steps']:.0f}" for one in pair))
            cells.append(f"{fmean(rise['reward/mean'] for rise in found['rlt']['rise']):+.2f}")
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def draw(figures: dict[str, Any], mains: list[Arms], path: Path) -> None:
    """Draw accuracies, kinds of traces, curves of reward and kinds, and groups if there are any."""
    from matplotlib.figure import Figure

    arms = figures["arms"]
    trained = [arm for arm in ("rlt", "solution_only", "kl_only", "shuffled") if arm in arms]
    below: list[Callable[[Any], None]] = []
    if trained:
        below.append(lambda axes: draw_curves(axes, mains, trained))
        below.append(lambda axes: draw_kinds_over_iterations(axes, mains[0], trained[0]))
    if figures["groups"]:
        below.append(lambda axes: draw_groups(axes, figures))
    height = 1.4 + 0.32 * len(arms)  # inches
    figure = Figure(figsize=(12, height + 4 * bool(below)), layout="constrained")
    parts = figure.subfigures(2, 1, height_ratios=[height, 4]) if below else [figure]
    left, right = parts[0].subplots(1, 2, sharey=True)
    names = [NAMES[arm] for arm in arms][::-1]
    draw_accuracies(left, arms, names)
    draw_kinds(right, arms, names)
    handles, labels = right.get_legend_handles_labels()
    parts[0].legend(handles, labels, loc="outside lower right", ncols=5, frameon=False, fontsize=8)
    for axes, panel in zip(
        parts[-1].subplots(1, len(below), squeeze=False)[0] if below else (), below, strict=True
    ):
        panel(axes)
    figure.savefig(path)


def legend_below(axes: Any, ncols: int, **options: Any) -> None:
    """Put the legend under the axes, where it hides nothing."""
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "frameon": False, "fontsize": 8}
    axes.legend(ncols=ncols, **place, **options)


def draw_accuracies(axes: Any, arms: dict[str, Any], names: list[str]) -> None:
    """Draw the accuracy of each arm's students as a bar."""
    values = [found["accuracy"] for found in arms.values()][::-1]
    colors = ["#2a6f97" if arm == "rlt" else "#9db4c0" for arm in arms][::-1]
    means, halves = [fmean(some) for some in values], [interval(some) for some in values]
    above = [min(half, 100 - mean) for mean, half in zip(means, halves, strict=True)]
    below = [min(half, mean) for mean, half in zip(means, halves, strict=True)]
    axes.barh(names, means, xerr=(below, above), color=colors, capsize=3)
    for place, (mean, half) in enumerate(zip(means, above, strict=True)):
        axes.text(mean + half + 1.5, place, f"{mean:.0f}", va="center")
    axes.set(xlim=(0, 110), xlabel="held-out problems solved, %")
    axes.set_title("Students, by what they were trained on")


def draw_kinds(axes: Any, arms: dict[str, Any], names: list[str]) -> None:
    """Draw which kinds of traces each arm's students were trained on."""
    shares = [mean_kinds(found["kinds"]) for found in arms.values()][::-1]
    left = [0.0] * len(shares)
    for kind, color in KIND_COLORS.items():
        widths = [share[kind] for share in shares]
        axes.barh(names, widths, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlim=(0, 100), xlabel="traces, %", title="Kinds of traces they were trained on")


def draw_curves(axes: Any, mains: list[Arms], trained: list[str]) -> None:
    """Draw the reward that each arm trains over its iterations, averaged over seeds."""
    for arm in trained:
        runs = [curves(one, arm)["reward/mean"] for one in mains]
        axes.plot(
            range(1, len(runs[0]) + 1), [fmean(step) for step in zip(*runs, strict=True)], label=NAMES[arm]
        )
    axes.set(xlabel="iteration", ylabel="nats", title="The reward that is trained")
    legend_below(axes, 2)


def draw_kinds_over_iterations(axes: Any, one: Arms, arm: str) -> None:
    """Draw which kinds of traces one teacher writes while it is trained."""
    shares = kinds_over_iterations(one, arm)
    iterations = range(1, len(next(iter(shares.values()))) + 1)
    axes.stackplot(iterations, *shares.values(), colors=KIND_COLORS.values(), labels=list(shares))
    axes.set(xlabel="iteration", ylabel="completions, %", ylim=(0, 100), xlim=(1, iterations[-1]))
    axes.set_title(f"What the teacher writes ({NAMES[arm]}, seed {one.seed})")


def draw_groups(axes: Any, figures: dict[str, Any]) -> None:
    """Draw the accuracies of students of traces ranked by the reward or by a term (the paper's Figure 4b)."""
    numbers = range(1, NUM_GROUPS + 1)
    groups = figures["groups"]
    values = [group["accuracy"] for group in groups]
    means = [fmean(some) for some in values]
    axes.plot(numbers, means, "o-", label="ranked by the reward")
    for some, place in zip(values, numbers, strict=True):
        axes.plot([place] * len(some), some, "_", color="C0", alpha=0.6)  # each seed
    for name, label in (("groups_solution_only", "by r_SS only"), ("groups_kl_only", "by r_KL only")):
        axes.plot(
            numbers, [fmean(group["accuracy"]) for group in figures[name]], "s--", alpha=0.6, label=label
        )
    steps = axes.twinx()
    taken = [fmean(group["right_steps"]) for group in groups]
    steps.plot(numbers, taken, "^:", color="#2a7f62", label="right steps they take (right axis)")
    steps.set(ylim=(0, 5.2), ylabel="steps, of 5")
    axes.set(xlabel="group of the warm-up teacher's traces, best first", ylabel="held-out problems solved, %")
    axes.set(title="Students of ranked traces", ylim=(0, 104))
    lines = [*axes.get_legend_handles_labels()[0], *steps.get_legend_handles_labels()[0]]
    legend_below(axes, 2, handles=lines)


def show_explanations(one: Arms, arms: list[str]) -> None:
    """Print the best and the worst of eight explanations of one problem under each teacher."""
    paths = {arm: one.folder / arm / "samples" / "traces.jsonl" for arm in arms}
    samples = {arm: read(path) for arm, path in paths.items() if path.exists()}
    for question in {rows[0]["question"] for rows in samples.values()}:
        print(f"\n{question}")
    for arm, rows in samples.items():
        print(f"  {NAMES[arm]}")
        rows.sort(key=lambda row: row["reward"])
        for name, row in (("best", rows[-1]), ("worst", rows[0])):
            print(f"    {name:5} {row['reward']:6.2f}  {row['reasoning_trace']}")


def show(
    folder: Path, mains: list[Arms], others: list[Arms], arms: list[str], whole: bool, seconds: float
) -> int:
    """Write and print the results; return 1 if the finding does not hold.

    The files are `finding.json`, `finding.md`, `finding.svg` and, if RLT trained a teacher, `report.html`.
    """
    figures = collect(mains, others, arms, whole, seconds)
    (folder / "finding.json").write_text(json.dumps(figures, indent=1) + "\n")
    (folder / "finding.md").write_text(page(figures))
    draw(figures, mains, folder / "finding.svg")
    show_explanations(mains[0], arms)
    print(f"\n{page(figures)}")
    trained = [str(mains[0].folder / arm / "teacher") for arm in arms if arm in TRAINED]
    if trained:
        words = [
            sys.executable,
            "-m",
            "rlt_lightning",
            "report",
            *trained,
            "--output",
            str(folder / "report.html"),
        ]
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    print(f"{seconds:.0f} s. Figures: {folder / 'finding.json'}, tables: {folder / 'finding.md'}")
    print(f"Picture: {folder / 'finding.svg'}" + (f", curves: {folder / 'report.html'}" if trained else ""))
    wrong = failures(figures)
    for sentence in wrong:
        print(f"finding: the finding does not hold: {sentence}.", file=sys.stderr)
    if not wrong and {"warmup", "rlt"} <= set(arms):
        mean, half = difference(figures["arms"], "rlt", "warmup")
        print(f"RLT's students solve {mean:.1f} ± {half:.1f} points more than those of the warm-up teacher.")
    print(NEXT)
    return bool(wrong)
