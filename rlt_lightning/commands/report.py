"""`rlt report RUN`: write one HTML page about a run, which needs no network and runs no script.

    file of the run                         what the page shows of it
    metrics.csv                             first and last means, six curves
    rollouts.jsonl                          completions of the first and the last iteration, token by token
    scores.jsonl, traces.jsonl              completions of largest and smallest reward
    evaluation.md                           the whole page
    config.yaml                             the whole file, folded, at the end

Everything that comes from a run is escaped.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest, nsmallest
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from string import Template

import yaml

from rlt_lightning.checkpoints.run_folder import read_settings
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.run import __version__
from rlt_lightning.run.jsonl import JsonRow, read_json_rows
from rlt_lightning.run.metrics_csv import Curve, read_metrics
from rlt_lightning.run.redaction import redact
from rlt_lightning.types import InputError

MARKER = "<!doctype html><!-- rlt report -->"  # first line of a file that we may overwrite
# What a stage improves. On-policy distillation also logs minus its divergence as a reward, RL also a loss.
OBJECTIVES = ("distill/divergence", "reward/mean", "policy/loss")
# What a person looks at next, in this order. The page draws the first six figures that a run has.
NEXT_FIGURES = (
    *("reward/solution", "reward/kl", "reward/correct", "rollout/length_mean", "policy/entropy"),
    *("policy/grad_norm", "rollout/closed_frac", "policy/kl_ref", "reward/group_std", "policy/lr"),
    *("data/completion_tokens", "perf/tokens_per_s"),
)
NUM_CURVES = 6
# Figures of a completion, beside the terms of its reward.
FIGURES = {
    *("reward", "baseline", "solution_log_prob_mean", "solution_log_prob_min", "kl_mean", "kl_max"),
    *("correct", "formatted", "timed_out", "judged_tokens", "num_tokens", "student_tokens", "closed", "fits"),
}
NUM_PROBLEMS = 4  # of an iteration, with two completions each
MAX_WINDOW = 10  # steps that a first or last mean is of, and at most a quarter of the run
WIDTH, HEIGHT, LEFT = 320, 150, 52  # of a chart, pixels; LEFT is the room of the numbers
KL_LEVELS = (0.1, 0.5, 1.5, 4.0)  # nats at which the colours begin
LOG_PROB_LEVELS = tuple(-math.log(probability) for probability in (0.9, 0.5, 0.1, 0.01))


def report(run_dir: str, output: str | None = None) -> None:
    """Write one page about a run: what changed, its curves, and completions coloured by token.

    Args:
        run_dir: The run folder.
        output: The page to write; by default report.html in the run folder.

    Raises:
        InputError: See `write_report`.
    """
    path = write_report(Path(run_dir), Path(output) if output else None)
    print(f"{path}: opens in any browser without a network")


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run and return its path; None is report.html in the run folder.

    Raises:
        InputError: If the folder holds no run with figures, a file is damaged, or `output` is no report.
    """
    logged = read_metrics(run / "metrics.csv")
    curves = {name: curve for name, curve in logged.items() if any(v is not None for v in curve[1])}
    body = [f'<p class="soft">{escape(str(run))}</p>', *render_gaps(logged)]
    if curves:
        body += render_curves(curves)
    if (results := run / "evaluation.md").is_file():
        text = results.read_text(encoding="utf-8", errors="replace")
        body.append(f'<h2>{results.name}</h2><pre class="plain">{escape(text)}</pre>')
    sections = [section for section in choose_completions(run) if section[1]]
    if sections:
        body.append(KEY)
    for title, rows in sections:
        cards = "".join(map(render_completion, rows))
        body.append(f'<h2>{escape(title)}</h2><div class="pair">{cards}</div>')
    if len(body) == 1:
        raise InputError(
            f"RUN_DIR must be the folder of a run that has written figures, but {run} holds no values in "
            "metrics.csv and no completions. Name the folder that --output_dir was, or wait for an iteration."
        )
    if settings := read_settings(run):
        text = yaml.safe_dump(redact(settings), sort_keys=False, allow_unicode=True)
        body.append(
            f'<details><summary>config.yaml</summary><pre class="plain">{escape(text)}</pre></details>'
        )
    path = output or run / "report.html"
    write_page(path, f"Run {run.resolve().name}", "\n".join(body))
    return path


def write_page(path: Path, title: str, body: str) -> None:
    """Write a page, in one step.

    Args:
        path: File to write.
        title: Its heading, plain text.
        body: HTML, in which all texts are escaped.

    Raises:
        InputError: If the file exists and is no page of ours, or it cannot be written.
    """
    require_replaceable(path)
    template = Template((files("rlt_lightning.commands") / "report.html").read_text())
    page = template.substitute(marker=MARKER, title=escape(title), body=body, version=__version__)
    scratch = path.with_suffix(".tmp")
    try:
        scratch.write_text(page, encoding="utf-8", errors="replace")  # half a surrogate pair is no UTF-8
        scratch.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}). Write the page elsewhere.") from error


def require_replaceable(path: Path) -> None:
    """Check that a page would overwrite nothing but an older page."""
    is_page = path.is_file() and path.read_bytes().startswith(MARKER.encode())
    if path.exists() and not is_page:
        raise InputError(f"{path} exists and is no page of rlt. Choose another name for the page.")


# Figures of metrics.csv


def render_curves(curves: dict[str, Curve]) -> Iterator[str]:
    """Yield the table of what changed, the charts, and the table of all other figures."""
    drawn = choose_figures(curves)
    shown = [name for figure in drawn for name in (figure, validation_name(figure)) if name in curves]
    others = sorted(curves.keys() - {*shown})
    header = ("figure", "first", "last", "change")
    yield "<h2>What changed</h2>"
    yield render_table(header, [render_change(name, curves[name]) for name in shown])
    yield (
        f'<p class="soft">Means over the first and over the last steps, a quarter of the run and at most '
        f"{MAX_WINDOW}, ± standard errors; of held-out figures the first and the last value.</p>"
    )
    yield f'<div class="charts">{"".join(draw_chart(name, curves) for name in drawn)}</div>'
    if others:
        table = render_table(header, [render_change(name, curves[name]) for name in others])
        yield f"<details><summary>All other figures</summary>{table}</details>"


def render_gaps(curves: dict[str, Curve]) -> Iterator[str]:
    """Yield a line that names the figures of which a value is not finite, and their first such step."""
    gaps = [
        f"{name} (step {curve[0][curve[1].index(None)]})"
        for name, curve in curves.items()
        if None in curve[1]
    ]
    if gaps:
        yield f"<p><b>NaN or infinite</b>, first at: {escape(', '.join(sorted(gaps)))}</p>"


def choose_figures(curves: dict[str, Curve]) -> list[str]:
    """Return the names of the training figures that the page draws."""
    present = {*curves, *(name.replace("/val_", "/") for name in curves)}
    objective = [name for name in OBJECTIVES if name in present][:1]
    accuracies = sorted(name for name in present if name.endswith("/pass_at_1"))[:2]
    names = [*objective, *accuracies, *(name for name in NEXT_FIGURES if name in present)]
    return (names or sorted(present))[:NUM_CURVES]


def render_change(name: str, curve: Curve) -> tuple[str, ...]:
    """Return a row of the table: the figure, its first and its last mean, and their difference."""
    is_held_out = "/val_" in name or name.startswith("eval/")
    first, last = measure_ends([value for value in curve[1] if value is not None], 1 if is_held_out else None)
    change = last[0] - first[0]
    cells = (format_mean(*first), format_mean(*last), f"{change:+.4g}")
    return (f"<code>{escape(name)}</code>", *cells)


def validation_name(name: str) -> str:
    """Return the held-out metric that goes with a training metric."""
    return name.replace("/", "/val_", 1)


def measure_ends(
    values: Sequence[float], window: int | None = None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return mean and standard error of the first and of the last values.

    Args:
        values: At least one.
        window: Values of each mean; None: a quarter of them, at least one and at most `MAX_WINDOW`.
    """
    size = window or max(1, min(MAX_WINDOW, len(values) // 4))
    ends = values[:size], values[-size:]
    first, last = ((fmean(end), stdev(end) / math.sqrt(size) if size > 1 else 0.0) for end in ends)
    return first, last


def format_mean(mean: float, error: float) -> str:
    """Return a mean with its standard error; a standard error of 0 means that it is not known."""
    return f"{mean:.4g}" + (f" ± {error:.2g}" if error else "")


def draw_chart(name: str, curves: dict[str, Curve]) -> str:
    """Return one figure by step as SVG: training as a line, held-out rows dashed."""
    keys = (("train", name), ("held-out", validation_name(name)))
    lines = [(kind, curves[key]) for kind, key in keys if key in curves]
    steps = [step for _, curve in lines for step in curve[0]]
    values = [value for _, curve in lines for value in curve[1] if value is not None]
    left, right, low, high = min(steps), max(steps), min(values), max(values)
    width, height = right - left or 1, high - low or 1.0
    paths = []
    for kind, curve in lines:
        path, command = "", "M"
        for step, value in zip(*curve, strict=True):
            if value is None:  # a gap
                command = "M"
                continue
            x = LEFT + 4 + (step - left) / width * (WIDTH - LEFT - 8)
            y = 6 + (high - value) / height * (HEIGHT - 12)
            path += f"{command}{x:.1f} {y:.1f}" + ("h0" if command == "M" else "")  # a lone point is a dot
            command = "L"
        paths.append(f'<path class="{kind}" d="{path}"/>')
    label = f"{name}: from {values[0]:.4g} at step {left}; least {low:.4g}, largest {high:.4g}"
    more = " (dashed: held-out)" if len(lines) > 1 else ""
    return (
        f'<figure><b>{escape(name)}</b>{more}<svg viewBox="0 0 {WIDTH} {HEIGHT + 16}" '
        f'role="img" aria-label="{escape(label)}"><text x="0" y="12">{high:.4g}</text>'
        f'<text x="0" y="{HEIGHT}">{low:.4g}</text><text x="{LEFT}" y="{HEIGHT + 14}">step {left}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">{right}</text>{"".join(paths)}</svg></figure>'
    )


def render_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells that are HTML."""
    lines = ["".join(f"<th>{cell}</th>" for cell in header)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


# Completions


def choose_completions(run: Path) -> Iterator[tuple[str, list[JsonRow]]]:
    """Yield titles and rows: the first and the last iteration, or the largest and the smallest reward."""
    first, last = read_end_iterations(run / "rollouts.jsonl")
    if first:
        yield f"First iteration, step {first[0].get('step')}", choose_extremes(first)
        if last[0].get("step") != first[0].get("step"):
            yield f"Last iteration, step {last[0].get('step')}", choose_extremes(last)
        return
    for name in ("scores.jsonl", "traces.jsonl"):
        for choose, title in ((nlargest, "Largest reward"), (nsmallest, "Smallest reward")):
            rows = choose(NUM_PROBLEMS, read_json_rows(run / name), key=lambda row: row.get("reward") or 0.0)
            yield f"{title}, {name}", rows


def read_end_iterations(path: Path) -> tuple[list[JsonRow], list[JsonRow]]:
    """Return the rows of the first and of the last iteration of a rollouts.jsonl; empty without any."""
    first: list[JsonRow] = []
    last: list[JsonRow] = []
    for row in read_json_rows(path):
        if not first or row.get("step") == first[0].get("step"):
            first.append(row)
        if last and row.get("step") != last[0].get("step"):
            last.clear()
        last.append(row)
    return first, last


def choose_extremes(rows: list[JsonRow]) -> list[JsonRow]:
    """Return the completions of largest and smallest reward of the first problems."""
    groups: dict[tuple[object, object], list[JsonRow]] = {}
    for row in rows:
        groups.setdefault((row.get("row"), row.get("question")), []).append(row)
    chosen = []
    for group in islice(groups.values(), NUM_PROBLEMS):
        # Of equal ones the first, as the recorder does, which writes the tokens of these.
        best, worst = (choose(group, key=lambda row: row.get("reward") or 0.0) for choose in (max, min))
        chosen += [best] if best is worst else [best, worst]
    return chosen


def render_completion(row: JsonRow) -> str:
    """Return a completion with its problem, its figures and, where its tokens are recorded, their heat.

    Args:
        row: A row of rollouts.jsonl, scores.jsonl or traces.jsonl.
    """
    question, solution = (str(row.get(name, "")).strip() for name in ("question", "solution"))
    if "conversations" in row and not question:
        question = str(row["conversations"])
    column = "explanation" if "explanation" in row else str(row.get("trace_column", TRACE_COLUMN))
    explanation, solution = escape(str(row.get(column, ""))), escape(solution)
    if "thought_tokens" in row:
        explanation = render_heat(row["thought_tokens"], row["thought_kl"], KL_LEVELS)
        solution = render_heat(row["solution_tokens"], row["solution_log_probs"], LOG_PROB_LEVELS, sign=-1)
    figures = [
        f"{escape(name)} {value:.4g}"
        for name, value in row.items()
        if is_figure(name) and isinstance(value, (int, float))
    ]
    return (
        f"<article><b>Question</b><pre>{escape(question)}</pre><b>Explanation</b><pre>{explanation}</pre>"
        f'<b>Solution</b><pre>{solution}</pre><p class="soft">{" · ".join(figures)}</p></article>'
    )


def is_figure(column: str) -> bool:
    """Return whether a column of a completion is a figure that the page shows."""
    return column in FIGURES or column.endswith("_reward")


def render_heat(
    tokens: Sequence[str], values: Sequence[float], levels: Sequence[float], sign: int = 1
) -> str:
    """Return tokens as HTML: coloured from the first level on, with the figure as a tooltip.

    Args:
        tokens: Texts. A character of several tokens is at the last of them, the texts before it are empty.
        values: A figure of each token, nats.
        levels: Sizes of a figure at which the next colour begins.
        sign: What a surprise is: 1 for large figures, -1 for small ones. The opposite is blue.
    """
    spans = []
    waiting: list[float] = []
    for token, value in zip(tokens, values, strict=True):
        waiting.append(value)
        if not token:
            continue
        largest = max(waiting, key=abs)
        level = bisect_right(levels, abs(largest))
        title = ", ".join(f"{value:g}" for value in waiting)
        kind = "w" if sign * largest > 0 else "c"
        marked = f'<span class="{kind}{level}" title="{title} nats">{escape(token)}</span>'
        spans.append(marked if level else escape(token))
        waiting = []
    return "".join(spans)


KEY = (
    '<p class="soft key">Explanation: KL of teacher from student, <span class="w1">from 0.1 nats</span>'
    '<span class="w2">0.5</span><span class="w3">1.5</span><span class="w4">4</span>'
    '<span class="c2">blue: likelier to the student than to the teacher</span>. Solution: the student\'s '
    'probability, <span class="w1">at most 0.9</span><span class="w2">0.5</span><span class="w3">0.1</span>'
    '<span class="w4">0.01</span>. Point at a coloured token for its figure.</p>'
)
