"""Draw the picture of `make finding`: students, traces, curves and groups. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from statistics import fmean
from typing import Any

from arms import NUM_GROUPS, Arms
from figures import NAMES, compute_interval, measure_kinds_over_iterations, read_curves
from tables import KIND_COLORS, mean_kinds


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


def draw_accuracies(
    axes: Any, arms: dict[str, Any], names: list[str], marked: Collection[str] = ("rlt",)
) -> None:
    """Draw the accuracy of each arm's students as a bar, in greedy answers as a diamond; mark some arms."""
    values = [found["accuracy"] for found in arms.values()][::-1]
    colors = ["#2a6f97" if arm in marked else "#9db4c0" for arm in arms][::-1]
    means, halves = [fmean(some) for some in values], [compute_interval(some) for some in values]
    above = [min(half, 100 - mean) for mean, half in zip(means, halves, strict=True)]
    below = [min(half, mean) for mean, half in zip(means, halves, strict=True)]
    axes.barh(names, means, xerr=(below, above), color=colors, capsize=3)
    for place, (mean, half) in enumerate(zip(means, above, strict=True)):
        axes.text(mean + half + 1.5, place, f"{mean:.0f}", va="center")
    greedy = [fmean(found["greedy"]) if "greedy" in found else None for found in arms.values()][::-1]
    for place, share in enumerate(greedy):
        if share is not None:
            axes.plot(share, place, "D", color="#d98c3f", markersize=5)
    axes.set(xlim=(0, 110), xlabel="held-out problems solved, %: bars T 0.7, diamonds greedy")
    axes.set_title("Students, by what they were trained on")


def draw_kinds(axes: Any, arms: dict[str, Any], names: list[str]) -> None:
    """Draw which kinds of traces each arm's students were trained on."""
    none = dict.fromkeys(KIND_COLORS, 0.0)
    shares = [mean_kinds(found["kinds"]) if "kinds" in found else none for found in arms.values()][::-1]
    left = [0.0] * len(shares)
    for kind, color in KIND_COLORS.items():
        widths = [share[kind] for share in shares]
        axes.barh(names, widths, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlim=(0, 100), xlabel="traces, %", title="Kinds of traces they were trained on")


def draw_curves(axes: Any, mains: list[Arms], trained: list[str]) -> None:
    """Draw the reward that each arm trains over its iterations, averaged over seeds."""
    for arm in trained:
        runs = [read_curves(one, arm)["reward/mean"] for one in mains]
        axes.plot(
            range(1, len(runs[0]) + 1), [fmean(step) for step in zip(*runs, strict=True)], label=NAMES[arm]
        )
    axes.set(xlabel="iteration", ylabel="nats", title="The reward that is trained")
    legend_below(axes, 2)


def draw_kinds_over_iterations(axes: Any, one: Arms, arm: str) -> None:
    """Draw which kinds of traces one teacher writes while it is trained."""
    shares = measure_kinds_over_iterations(one, arm)
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
