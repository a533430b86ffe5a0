"""The driver of all comparisons: options, stages side by side, figures, tables and a picture.

    DIR/NAME.json     all figures: of each setting its arms, one value per seed, and its further tables
    DIR/NAME.md       the same as tables, with 95 % intervals and differences of arms, paired by seed
    DIR/NAME.svg      accuracies of the students, and the kinds of traces that they learned from

Run it again after a crash: finished stages are skipped, and the interrupted one resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from arms import Arms, Setting, Table
from stages import StageError, Stages

from rlt_lightning.run.jsonl import rewrite
from rlt_lightning.types import InputError

Students = dict[str, dict[str, list[Any]]]  # figures of each arm, one per seed
# Student's t at 97.5 %, for 1 to 9 degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
KIND_COLORS = {
    "steps": "#2a7f62",
    "filler": "#c9c9c9",
    "leap": "#d98c3f",
    "wrong": "#b2475c",
    "other": "#555555",
}


def main(name: str, about: str | None, kind: type[Arms], default: str) -> int:
    """Run a comparison by the options of the command line; return 1 if a stage fails.

    Args:
        name: Name of its files.
        about: Its help.
        kind: Its arms.
        default: Settings that run if none is named.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", default="", help="such as '10 11 12'; '0 1 2' by default")
    parser.add_argument("--arms", default="", help=f"'{' '.join(kind.ARMS)}' by default")
    parser.add_argument(
        "--settings", default="", help=f"of {' '.join(kind.SETTINGS)}; '{default}' by default"
    )
    for verb in ("fit", "predict", "test"):
        parser.add_argument(f"--{verb}", default="", help=f"further options of all `rlt {verb}`, in one word")
    options = parser.parse_args()
    try:
        seeds = sorted(map(int, set((options.seeds or "0 1 2").split())))
        arms = list(dict.fromkeys(options.arms.split() or kind.ARMS))
        for arm in arms:
            kind.check_arm(arm)
        names = (options.settings or default).split()
        if unknown := {*names} - {*kind.SETTINGS}:
            raise InputError(
                f"--settings may name {', '.join(kind.SETTINGS)}, but names {', '.join(unknown)}. Correct it."
            )
        more = {verb: getattr(options, verb) for verb in ("fit", "predict", "test")}
        options.output_dir.mkdir(parents=True, exist_ok=True)
        run(
            name,
            kind,
            Stages(options.output_dir, more=more),
            [kind.SETTINGS[some] for some in names],
            seeds,
            arms,
        )
    except (InputError, StageError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def run(
    name: str, kind: type[Arms], stages: Stages, settings: list[Setting], seeds: list[int], arms: list[str]
) -> dict[str, Any]:
    """Run all stages, write what came out, print the tables, and return the figures."""
    stages.start()
    ones = {setting.name: [kind(stages, setting, seed) for seed in seeds] for setting in settings}
    every = [one for some in ones.values() for one in some]
    run_side_by_side(stages, [one.prepare for one in every])
    run_side_by_side(stages, [partial(one.run_arm, arm) for arm in arms for one in every])
    figures: dict[str, Any] = {"seeds": seeds, "settings": {}}
    pages = []
    for setting, some in ones.items():
        students, tables = collect(some, arms), kind.summarise(some, arms)
        figures["settings"][setting] = {"arms": students, "tables": tables}
        pages += [f"## {setting}, seeds {', '.join(map(str, seeds))}"]
        pages += list_tables(students, tables, some[0].setting.num_test)
    page = re.sub(r"(?<=\| )-(?=\d)", "−", "\n\n".join(pages)) + "\n"
    rewrite(stages.folder / f"{name}.json", [json.dumps(figures, indent=1) + "\n"])
    rewrite(stages.folder / f"{name}.md", [page])
    draw(settings, [found["arms"] for found in figures["settings"].values()], stages.folder / f"{name}.svg")
    print(page)
    return figures


def run_side_by_side(stages: Stages, jobs: Iterable[Callable[[], object]]) -> None:
    """Run jobs, as many side by side as there are cores; if one fails, end the stages that run."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            [*pool.map(lambda job: job(), jobs)]
        except BaseException:  # Ctrl-C too
            pool.shutdown(wait=False, cancel_futures=True)
            stages.stop()
            raise


def collect(ones: Sequence[Arms], arms: Sequence[str]) -> Students:
    """Return the figures of each arm, one per seed."""
    measured = {arm: [one.measure(arm) for one in ones] for arm in arms}
    return {
        arm: {name: [some[name] for some in found] for name in found[0]} for arm, found in measured.items()
    }


# Intervals


def compute_interval(values: Sequence[float], num_problems: int) -> float:
    """Return half the 95 % interval of a mean: over seeds, or of a share in % over one seed's problems."""
    if len(values) == 1:
        return 196 * math.sqrt(values[0] / 100 * (1 - values[0] / 100) / num_problems)
    return T_975[min(len(values), 10) - 2] * stdev(values) / math.sqrt(len(values))


def compute_difference(a: Sequence[float], b: Sequence[float], num_problems: int) -> tuple[float, float]:
    """Return the mean difference of two accuracies, and half of its 95 % interval.

    Seeds are paired. With one seed the interval is over its problems, as if the students were independent.
    """
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if len(differences) == 1:
        return differences[0], math.hypot(*(compute_interval(some, num_problems) for some in (a, b)))
    return fmean(differences), compute_interval(differences, num_problems)


# Tables and picture


def list_tables(students: Students, tables: dict[str, Table], num_problems: int) -> list[str]:
    """Return a table of all figures, one of differences for each kind of answer, and further tables."""
    columns = list(dict.fromkeys(name for found in students.values() for name in found))
    rows = {
        arm: {name: write_cell(name, found.get(name, []), num_problems) for name in columns}
        for arm, found in students.items()
    }
    parts = ["Mean ± 95 % (each seed):", write_table(rows)]
    for how in ("accuracy", "greedy"):
        differences = {
            arm: {
                other: "{:+.1f} ± {:.1f}".format(*compute_difference(found[how], against[how], num_problems))
                for other, against in students.items()
                if other != arm
            }
            for arm, found in students.items()
        }
        parts += [f"Row minus column, {how}, points:", write_table(differences)]
    for title, table in tables.items():
        parts += [f"{title}:", write_table(table)]
    return parts


def write_table(rows: Table) -> str:
    """Return rows of named cells as Markdown; the first column has their names."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [["", *names], ["---"] * (1 + len(names))]
    lines += [[key, *(write_value(row.get(name, "")) for name in names)] for key, row in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_cell(name: str, values: Sequence[Any], num_problems: int) -> str:
    """Return what a figure was over the seeds; kinds of traces as mean shares in percent."""
    if not values:
        return ""
    if isinstance(values[0], dict):
        return write_value({kind: fmean(some[kind] for some in values) for kind in values[0]})
    if len(values) == 1 and name not in ("accuracy", "greedy"):  # the others have no interval over problems
        return write_value(values[0])
    each = f" ({', '.join(map(write_value, values))})" if len(values) > 1 else ""
    return f"{fmean(values):.2f} ± {compute_interval(values, num_problems):.2f}{each}"


def write_value(value: Any) -> str:
    """Return a cell as text: a number, a text, or shares of kinds."""
    if isinstance(value, dict):
        return " / ".join(f"{kind} {share:.0f}" for kind, share in value.items())
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def draw(settings: Sequence[Setting], figures: Sequence[Students], path: Path) -> None:
    """Draw each setting's students, sampled as bars and greedily as diamonds, and their kinds of traces."""
    from matplotlib.figure import Figure

    height = sum(1.4 + 0.32 * len(students) for students in figures)  # inches
    figure = Figure(figsize=(12, height), layout="constrained")
    rows = figure.subplots(len(settings), 2, squeeze=False, sharey="row")
    for (left, right), setting, students in zip(rows, settings, figures, strict=True):
        names = [*students][::-1]
        means = [fmean(students[arm]["accuracy"]) for arm in names]
        halves = [compute_interval(students[arm]["accuracy"], setting.num_test) for arm in names]
        above = [min(half, 100 - mean) for mean, half in zip(means, halves, strict=True)]
        below = [min(half, mean) for mean, half in zip(means, halves, strict=True)]
        left.bar_label(left.barh(names, means, xerr=(below, above), color="#9db4c0", capsize=3), fmt="%.0f")
        greedy = [fmean(students[arm]["greedy"]) for arm in names]
        left.plot(greedy, names, "D", color="#d98c3f", markersize=5)
        left.set(xlim=(0, 112), xlabel="held-out problems solved, %: bars T 0.7, diamonds greedy")
        left.set_title(setting.name)
        start = [0.0] * len(names)
        for kind, color in KIND_COLORS.items():
            widths = [fmean(k[kind] for k in students[arm].get("traces", [{kind: 0.0}])) for arm in names]
            right.barh(names, widths, left=start, color=color, label=kind)
            start = [a + b for a, b in zip(start, widths, strict=True)]
        right.set(xlim=(0, 100), xlabel="traces that they were trained on, %")
    figure.legend(*rows[0][1].get_legend_handles_labels(), loc="outside lower right", ncols=5, frameon=False)
    figure.savefig(path)
