"""`rlt report`: one page with everything inside it: the data, Chart.js and its own scripts."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rlt_lightning.report.charts import (
    build_curve_sections,
    build_evaluation_charts,
    build_evaluation_tables,
    build_group_charts,
)
from rlt_lightning.report.collect import (
    AskedProblem,
    Bounds,
    Run,
    collect,
    compute_mean,
    is_distilled,
    read_completions,
)
from rlt_lightning.report.summary import (
    build_summary,
    classify_run,
    describe_scales,
    describe_windows,
    list_differences,
    tabulate_kinds,
    tabulate_results,
)
from rlt_lightning.run.jsonl import Row
from rlt_lightning.run.metrics import label_columns
from rlt_lightning.tasks.stepwise import describe_question
from rlt_lightning.types import InputError
from rlt_lightning.version import __version__

MARKER = "<!doctype html><!-- rlt report -->"  # first line of a file that we may overwrite
NAME = "report.html"
MADE = f"Made by rlt_lightning {__version__}."
DIGITS = 6  # significant digits of every number on the page
# The page's scripts in web/, in the order in which they are joined; a later one uses the earlier ones.
SCRIPTS = ("elements", "charts", "tokens", "completions", "browser", "start")


def report(
    run_dirs: list[str], output: str | None = None, max_completions: int = 10_000, max_text_mib: float = 32.0
) -> None:
    """Write one page of runs: curves, completions with the heat of every token, groups, evaluations.

    Args:
        run_dirs: Run folders, in the order of their colours.
        output: The page to write; by default report.html in the run's folder or, for several runs, here.
        max_completions: Most completions on the page, of all runs together.
        max_text_mib: Most text of completions and problems on the page, of all runs together.

    Raises:
        InputError: If a folder is no run, or output is a file that is no report.
    """
    for name, value in (("max_completions", max_completions), ("max_text_mib", max_text_mib)):
        if value <= 0:
            raise InputError(f"--{name} must be above 0, but is {value}. Raise it.")
    folders = [Path(name) for name in run_dirs]
    path = Path(output) if output else (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    require_replaceable(path)
    characters = int(max_text_mib * 2**20)
    bounds = Bounds(max(1, max_completions // len(folders)), characters // len(folders))
    runs = [collect(folder, bounds) for folder in folders]
    write_page(path, build_title(runs), build_data(runs))
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, opens in any browser without a network")


def write_page(path: Path, title: str, data: dict[str, Any]) -> None:
    """Write a page that needs no network.

    Args:
        path: File to write.
        title: Heading of the page.
        data: What `build_data` or `build_data_of_rows` returns. The page leaves out what is missing.
    """
    parts = files("rlt_lightning.report") / "web"
    has_charts = any(data.get(name) for name in ("sections", "groups", "evaluation"))
    page = Template((parts / "page.html").read_text()).substitute(
        marker=MARKER,
        title=html.escape(title),
        css=(parts / "page.css").read_text(),
        data=write_json_for_html(cut_digits(data)),
        library=(parts / "chartjs" / "chart.umd.min.js").read_text() if has_charts else "",
        script="\n".join((parts / f"{name}.js").read_text() for name in SCRIPTS),
    )
    scratch = path.with_suffix(".tmp")
    try:
        scratch.write_text(page, encoding="utf-8", errors="replace")
        scratch.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}). Write the page elsewhere.") from error


def require_replaceable(path: Path) -> None:
    """Check that writing the page would overwrite nothing but an older report.

    Raises:
        InputError: If the path is a folder or another file.
    """
    if path.is_dir():
        raise InputError(
            f"The page must be a file, but {path} is a folder. Add a name, such as {path / NAME}."
        )
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            if not file.read(len(MARKER)) == MARKER:
                raise InputError(
                    f"{path} is there and is no report. Choose another name for the page, or move it away."
                )


def write_json_for_html(data: Any) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def cut_digits(value: Any) -> Any:
    """Return plain data with every number cut to the digits that the page shows."""
    if isinstance(value, dict):
        return {name: cut_digits(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [cut_digits(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value


def shorten_names(folders: list[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that differ from each other."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise InputError("Every RUN_DIR must be another folder, but one is named twice. Name it once.")


def build_title(runs: list[Run]) -> str:
    """Return the heading of a report: what the run is and where it lies; of several, their names."""
    if len(runs) > 1:
        names = shorten_names([run.folder for run in runs])
        return f"{len(runs)} runs" + (f": {', '.join(names)}" if len(names) < 4 else "")
    folder = runs[0].folder.resolve()
    own = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return f"{classify_run(runs[0])}: {'/'.join(own.parts[-2:] or folder.parts[-1:])}"


def build_data(runs: list[Run]) -> dict[str, Any]:
    """Return all that the page shows of runs."""
    names = shorten_names([run.folder for run in runs])
    return {
        "made": MADE,
        "windows": describe_windows(runs),
        "runs": [
            {"name": name, "folder": str(run.folder), "notes": run.notes, **build_summary(run)}
            for name, run in zip(names, runs, strict=True)
        ],
        "results": tabulate_results(runs, names),
        "differences": list_differences(runs),
        "scales": describe_scales(runs),
        "sections": build_curve_sections(runs),
        "groups": build_group_charts(runs),
        "evaluation": build_evaluation_charts(runs),
        "evaluation_tables": build_evaluation_tables(runs, names),
        "kinds": [
            table for run, name in zip(runs, names, strict=True) if (table := tabulate_kinds(run, name))
        ],
        "completions": build_completions(runs),
    }


def build_completions(runs: list[Run]) -> dict[str, Any] | None:
    """Return the completions of all runs by column, and their problems; None if there are none."""
    terms = list(dict.fromkeys(term for run in runs for term in run.completions.terms))
    labels = label_columns()
    data: dict[str, Any] = {"terms": {name: [] for name in terms}, "tokens": {}, "problems": []}
    data["labels"] = {name: labels[name] for name in terms if name in labels}
    if all(is_distilled(run) for run in runs):
        data["labels"]["reward"] = "minus the divergence"
    columns = ("run", "problem", "step", "sample", "copies", "column", "finish", "text", "kind", "right")
    data |= {name: [] for name in columns}
    numbers: dict[tuple[str, str], int] = {}
    for run_number, run in enumerate(runs):
        found = run.completions
        kept = {position: len(data["run"]) + i for i, position in enumerate(found.kept)}
        places = {i: kept[first] for i, first in enumerate(found.shown_as) if first in kept}
        shown = {row["problem"] for row in found.kept.values()}
        for own, problem in enumerate(found.problems):
            if own in shown:
                number = numbers.setdefault((problem.question, problem.solution), len(numbers))
                if number == len(data["problems"]):
                    texts = {"question": problem.question, "solution": problem.solution}
                    texts["about"] = describe_question(problem.question)
                    data["problems"].append({"row": problem.row, **texts, "runs": {}})
                data["problems"][number]["runs"][run_number] = find_landmarks(problem, places)
        for position, row in found.kept.items():
            problem = found.problems[row["problem"]]
            for name in columns[2:]:
                data[name].append(row[name])
            data["run"].append(run_number)
            data["problem"].append(numbers[problem.question, problem.solution])
            for name in terms:
                data["terms"][name].append(row["figures"].get(name))
            if row["tokens"]:
                data["tokens"][kept[position]] = row["tokens"]
    return data if data["run"] else None


def find_landmarks(problem: AskedProblem, places: dict[int, int]) -> dict[str, Any]:
    """Return a problem's compared completions, their places on the page or None, and its mean rewards."""
    found = {name: None if i is None else places.get(i) for name, i in problem.find_landmarks().items()}
    means = {write_step(step): compute_mean(group) for step, group in problem.groups.items() if group}
    sizes = {write_step(step): len(group) for step, group in problem.groups.items()}
    return {**found, "gain": problem.gain, "means": means, "sizes": sizes, "times": len(problem.groups)}


def write_step(step: int | None) -> str:
    """Return an iteration as the browser writes it."""
    return "null" if step is None else str(step)


def build_data_of_rows(
    rows: list[Row], notes: Iterable[str] = (), facts: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return what `write_page` shows of a few completions; those of a single problem are all open.

    Args:
        rows: Rows as in rollouts.jsonl. With its columns of tokens, the page shows each token's figure.
        notes: Sentences to read with the figures.
        facts: What the completions come from, such as the teacher's name.
    """
    completions = read_completions(lambda: rows, "rollouts.jsonl", Bounds(len(rows), sys.maxsize))
    run = Run(Path(), {}, completions, [], None, {}, [])
    runs = [{"name": "", "notes": [*notes]}]
    return {"made": MADE, "facts": facts or {}, "runs": runs, "completions": build_completions([run])}
