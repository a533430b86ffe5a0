"""Divide scored rows into groups of equal size by reward, and compare two traces of each problem."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from rlt_lightning.run.jsonl import Row, format_line, rewrite
from rlt_lightning.types import InputError, Rollout

SHOWN = 5  # problems for each side of a comparison
SHOWN_CHARACTERS = 600  # of each trace there


def split_into_groups(rewards: list[float], num_groups: int) -> list[list[int]]:
    """Divide rows by reward into groups whose sizes differ by one at most (RLT, arXiv:2506.08388, figure 4).

    Args:
        rewards: One per row, N.
        num_groups: Number of groups.

    Returns:
        Row positions, best group first, each by descending reward; equal rewards in the order of the rows.

    Raises:
        InputError: If there are fewer rows than groups.
    """
    if not 1 <= num_groups <= len(rewards):
        raise InputError(
            f"scores.rank_groups must be between 1 and the number of scored rows, {len(rewards)}, but is "
            f"{num_groups}. Lower it, or score more rows."
        )
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    bounds = [round(i * len(order) / num_groups) for i in range(num_groups + 1)]
    return [order[begin:end] for begin, end in pairwise(bounds)]


def write_groups(rows: list[Row], num_groups: int, terms: Sequence[str], folder: Path) -> None:
    """Write each group's rows to `groups/`, and means of the terms to `groups.json`."""
    groups = [
        [rows[i] for i in group] for group in split_into_groups([row["reward"] for row in rows], num_groups)
    ]
    (folder / "groups").mkdir(exist_ok=True)
    for stale in (folder / "groups").glob("group-*.jsonl"):  # from an earlier run
        stale.unlink()
    figures = []
    for number, group in enumerate(groups, start=1):
        name = f"groups/group-{number:02d}.jsonl"
        rewrite(folder / name, map(format_line, group))
        means = {name: fmean(row[name] for row in group) for name in terms}
        rewards = [row["reward"] for row in group]
        bounds = {"reward_min": min(rewards), "reward_max": max(rewards)}
        figures.append({"group": number, "file": name, "num_rows": len(group), **means, **bounds})
    (folder / "groups.json").write_text(json.dumps(figures, indent=1) + "\n")


def write_comparison(
    rows: list[Row], rollouts: list[Rollout], columns: list[str], terms: Sequence[str], folder: Path
) -> None:
    """Compare two traces of each problem: write `comparison.jsonl`, largest difference first, and a page.

    Args:
        rows: Scored rows. `trace_column` names the trace; each problem has both, one after the other.
        rollouts: The scored texts, one per row.
        columns: The two trace columns.
        terms: The reward and its terms, columns of the scored rows.
        folder: Folder to write to.
    """
    scored = list(zip(rows, rollouts, strict=True))
    pairs = []
    for both in zip(scored[::2], scored[1::2], strict=False):  # a limited run may lack the last one
        assert [row["trace_column"] for row, _ in both] == columns
        problem = both[0][1].problem
        pair: Row = {"question": problem.question, "solution": problem.solution.strip()}
        pair["difference"] = both[0][0]["reward"] - both[1][0]["reward"]
        for column, (row, rollout) in zip(columns, both, strict=True):
            pair[column] = {name: row[name] for name in terms} | {"trace": rollout.text}
        pairs.append(pair)
    pairs.sort(key=lambda pair: -pair["difference"])
    rewrite(folder / "comparison.jsonl", map(format_line, pairs))
    rewrite(folder / "comparison.md", [write_comparison_page(pairs, columns, terms)])


def write_comparison_page(pairs: list[Row], columns: list[str], terms: Sequence[str]) -> str:
    """Return a page that says which trace is ahead, and where each leads by most (RLT, figure 5)."""
    differences = [pair["difference"] for pair in pairs]
    error = stdev(differences) / len(differences) ** 0.5 if len(pairs) > 1 else float("nan")
    ahead = sum(difference > 0 for difference in differences)
    lines = [
        f"# `{columns[0]}` against `{columns[1]}`",
        "",
        f"{len(pairs)} problems. Reward of `{columns[0]}` minus reward of `{columns[1]}`: "
        f"{fmean(differences):+.3f} ± {error:.3f} (standard error); `{columns[0]}` is ahead in {ahead}.",
    ]
    sides = ((columns[0], pairs[:SHOWN]), (columns[1], pairs[: -SHOWN - 1 : -1]))
    for column, shown in sides:
        lines += ["", f"## Where `{column}` is ahead the most"]
        for pair in shown:
            if (pair["difference"] > 0) != (column == columns[0]):
                continue
            lines += ["", f"### {pair['difference']:+.3f}", "", *quote(pair["question"])]
            for name in columns:
                figures = ", ".join(f"{term} {pair[name][term]:.3f}" for term in terms)
                lines += ["", f"`{name}`: {figures}", "", *quote(pair[name]["trace"])]
    return "\n".join(lines) + "\n"


def quote(text: str) -> list[str]:
    """Return a text as a Markdown quotation; a long one is cut."""
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
    return [f"> {line}" for line in shown.strip().splitlines()]
