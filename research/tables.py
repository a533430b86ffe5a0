"""Write the tables of the finding, and the explanations that the terminal shows."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from arms import LEAD, SAMPLED_ARMS, TRAINED, Arms, read
from figures import NAMES, compute_difference, compute_interval
from stages import Stages
from trace_kinds import chain_kind

KIND_COLORS = {
    "steps": "#2a7f62",
    "filler": "#c9c9c9",
    "leap": "#d98c3f",
    "wrong": "#b2475c",
    "other": "#555555",
}
KIND_WORDS = {
    "steps": "every step right",
    "filler": "breaks off into filler",
    "leap": "leaps to the answer",
    "wrong": "has a wrong number",
    "other": "in another form",
}
MOST_COLUMNS = 100  # of a line of text


def plus_minus(values: list[float]) -> str:
    """Return a mean in percent with half of its interval, as text."""
    return f"{fmean(values):.1f} ± {compute_interval(values):.1f}"


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
        f"| student trained on | accuracy at T 0.7, % (± 95 %, {over}) | greedy, % (± the same) "
        "| traces: steps / filler / leap / wrong / other, % |",
        "|---|---|---|---|",
    ]
    for arm, found in figures["arms"].items():
        name = f"**{NAMES[arm]}**" if arm == "rlt" else NAMES[arm]
        kinds = kinds_text(mean_kinds(found["kinds"])) if "kinds" in found else ""
        lines.append(
            f"| {name} | {plus_minus(found['accuracy'])} | {plus_minus(found['greedy'])} | {kinds} |"
        )
    return "\n".join(lines)


def build_tables(figures: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    arms, parts = figures["arms"], [main_table(figures)]
    if "warmup" in arms:
        how = "paired by seed" if len(figures["seeds"]) > 1 else "over problems"
        lines = [f"| difference to the warm-up teacher's students | points (± 95 %, {how}) |", "|---|---|"]
        for arm in (name for name in arms if name != "warmup"):
            mean, half = compute_difference(arms, arm, "warmup")
            lines.append(f"| {NAMES[arm]} | {mean:+.1f} ± {half:.1f} |")
        parts.append("\n".join(lines))
    if "rlt" in arms:
        how = "paired by seed" if len(figures["seeds"]) > 1 else "over problems"
        lines = [
            f"| RLT's students minus those of | sampled, points (± 95 %, {how}) | greedy |",
            "|---|---|---|",
        ]
        for arm in (name for name in arms if name != "rlt"):
            cells = [compute_difference(arms, "rlt", arm, how) for how in ("accuracy", "greedy")]
            lines.append(
                f"| {NAMES[arm]} | {' | '.join(f'{mean:+.1f} ± {half:.1f}' for mean, half in cells)} |"
            )
        parts.append("\n".join(lines))
    voted = {arm: found for arm, found in arms.items() if "num_votes" in found}
    if voted:
        k = next(iter(voted.values()))["num_votes"]
        lines = [
            f"| students, sampled at T 0.7 | pass@{k}, % | maj@{k}, % | entropy of the student, nats a token "
            "| of the teacher |",
            "|---|---|---|---|---|",
        ]
        for arm, found in voted.items():
            cells = [plus_minus(found["pass_at_k"]), plus_minus(found["maj_at_k"])]
            cells += [
                f"{fmean(found[who]):.3f}" if who in found else ""
                for who in ("student_entropy", "teacher_entropy")
            ]
            lines.append(f"| {NAMES[arm]} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    trained = {arm: found["rise"] for arm, found in arms.items() if "rise" in found}
    if trained:
        lines = ["| reward that was trained, first → last quarter | rise | of which r_SS | −λ r_KL |"]
        lines.append("|---|---|---|---|")
        for arm, rises in trained.items():
            means = [fmean(one[name] for one in rises) for name in rises[0]]
            lines.append(f"| {NAMES[arm]} | {' | '.join(f'{value:+.2f}' for value in means)} |")
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
            f"| variation | seeds | {' | '.join(f'{NAMES[arm]}: sampled, greedy, %' for arm in LEAD)} "
            "| right traces: warm-up → RLT, % | rise of the reward |",
            "|" + "---|" * (len(LEAD) + 4),
        ]
        for name, found in figures["variations"].items():
            cells = [name.replace("_", " "), str(len(found["rlt"]["accuracy"]))]
            cells += [f"{plus_minus(found[a]['accuracy'])}, {fmean(found[a]['greedy']):.1f}" for a in LEAD]
            rights = (mean_kinds(found[arm]["kinds"])["steps"] for arm in ("warmup", "rlt"))
            cells.append(" → ".join(f"{right:.1f}" for right in rights))
            cells.append(f"{fmean(rise['reward/mean'] for rise in found['rlt']['rise']):+.2f}")
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return re.sub(r"(?<=\| )-(?=\d)", "−", "\n\n".join(parts)) + "\n"


def show_explanations(one: Arms) -> None:
    """Print the best and the worst of eight explanations of one problem by each teacher that wrote them.

    The reward ranks them. What kind each one is stands beside its reward, since the highest reward is not
    always the best explanation.
    """
    paths = {arm: one.folder / arm / "samples" / "traces.jsonl" for arm in SAMPLED_ARMS}
    samples = {arm: read(path) for arm, path in paths.items() if path.exists()}
    for row in [rows[0] for rows in samples.values()][:1]:
        print("\nOne problem, explained eight times by each teacher; best and worst by reward (nats):")
        print(f"  {row['question']}   {row['solution'].strip()}")
    for arm, rows in samples.items():
        kinds = {row["trace"]: chain_kind(row["question"], row["reasoning_trace"])[0] for row in rows}
        counts = ", ".join(f"{n} {KIND_WORDS[kind]}" for kind, n in Counter(kinds.values()).most_common())
        print(f"\n  {NAMES[arm]}: {counts}")
        rows.sort(key=lambda row: row["reward"])
        shown = [("best", rows[-1]), ("worst", rows[0])]
        if rows[0]["reasoning_trace"] == rows[-1]["reasoning_trace"]:
            shown = [("both", rows[-1])]
        for name, row in shown:
            print(f"    {name:5} {row['reward']:6.2f}  ({KIND_WORDS[kinds[row['trace']]]})")
            print(wrap(row["reasoning_trace"], 6))
    if len(samples) > 1:
        note = "The same text earns less from a teacher that is surer of it, so compare texts, not rewards."
        print(f"\n{wrap(note, 2)}")


def wrap(text: str, indent: int) -> str:
    """Return a text in lines as wide as the terminal, indented."""
    width = min(shutil.get_terminal_size().columns or 80, MOST_COLUMNS)
    margin = " " * indent
    return textwrap.fill(text, max(width, 2 * indent + 20), initial_indent=margin, subsequent_indent=margin)


def write_results(figures: dict[str, Any], one: Arms) -> Path | None:
    """Write `finding.json` and `finding.md`, and `report.html` if RLT has trained a teacher.

    Args:
        figures: What `collect` returns.
        one: The seed whose teachers the report shows.

    Returns:
        The path of the report.
    """
    stages: Stages = one.stages
    (stages.folder / "finding.json").write_text(json.dumps(figures, indent=1) + "\n")
    (stages.folder / "finding.md").write_text(build_tables(figures))
    trained = [str(one.folder / arm / "teacher") for arm in figures["arms"] if arm in TRAINED]
    if not trained:
        return None
    path = stages.folder / "report.html"
    stages.run(["report", *trained, "--output", str(path)], stages.folder / "report.log")
    return path
