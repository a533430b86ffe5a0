"""`rlt report`: the figures on the page are those of the files, and nothing on it can run."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from browser import chromium, completion, synthetic_run, tokens, write_metrics, write_rows
from commands import rlt

from rlt_lightning.commands.report import KL_LEVELS, MARKER, measure_ends, render_heat, write_report
from rlt_lightning.types import InputError

EVIL = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)> & $body \u2028 '\"><b>"
HEADER = ["figure", "first", "last", "change"]


class Reader(HTMLParser):
    """Collects the tags of a page, its tables' rows, and the paths of its charts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.paths: list[str] = []
        self.titles: list[str] = []  # of coloured tokens
        self.in_table = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        values = dict(attrs)
        self.in_table |= tag == "table"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "path":
            self.paths.append(str(values["d"]))
        if tag == "span" and values.get("title"):
            self.titles.append(str(values["title"]))

    def handle_data(self, data: str) -> None:
        if self.in_table:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.in_table &= tag != "table"


def read(path: Path) -> Reader:
    return Reader(path.read_text())


def test_first_and_last_means_are_those_of_metrics_csv(tmp_path: Path) -> None:
    rewards = [-4.0, -3.0, -2.0, -1.0, 0.5, 1.5, 2.5, 3.0]  # a quarter is two steps
    write_metrics(tmp_path, {"reward/mean": rewards, "reward/val_mean": ["", -3.5, *[""] * 5, 2.25]})
    header, reward, held_out = read(write_report(tmp_path)).rows
    assert header == HEADER
    error = stdev(rewards[:2]) / math.sqrt(2)
    expected = [f"{fmean(rewards[:2])} ± {error:.2g}", f"{fmean(rewards[-2:])} ± 0.25", "+6.25"]
    assert reward == ["reward/mean", *expected]
    assert held_out == ["reward/val_mean", "-3.5", "2.25", "+5.75"]


def test_a_long_run_has_windows_of_ten_steps() -> None:
    values = [float(i) for i in range(100)]
    assert [mean for mean, _ in measure_ends(values)] == [4.5, 94.5]
    assert measure_ends([3.0]) == ((3.0, 0.0), (3.0, 0.0))


def test_every_metric_stands_in_a_table(tmp_path: Path) -> None:
    names = ["reward/mean", "reward/own_term", "policy/loss", "perf/step_s", "eval/aime24/pass_at_1"]
    write_metrics(tmp_path, {name: [1.0, 2.0] for name in names})
    shown = {row[0].split()[-1] for row in read(write_report(tmp_path)).rows}
    assert shown == {*names, "figure"}


def test_a_curve_is_drawn_through_its_values(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"policy/loss": [4.0, 1.0, 2.0, "nan", 3.0]})
    page = write_report(tmp_path)
    [path] = read(page).paths
    assert re.findall("[ML]", path) == ["M", "L", "L", "M"]  # a gap where it is not finite
    places = [tuple(map(float, pair)) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    left, right = places[0][0], places[-1][0]
    assert [(x - left) / (right - left) for x, _ in places] == pytest.approx([0, 0.25, 0.5, 1], abs=1e-3)
    top, bottom = places[0][1], places[1][1]
    assert [1 + 3 * (bottom - y) / (bottom - top) for _, y in places] == pytest.approx([4, 1, 2, 3], abs=0.01)


STAGES = {
    "rlt": [
        "reward/mean",
        "reward/solution",
        "reward/kl",
        "rollout/length_mean",
        "policy/entropy",
        "policy/loss",
    ],
    "traditional": ["reward/mean", "reward/correct", "rollout/length_mean", "policy/entropy", "policy/loss"],
    "likelihood": [
        "reward/mean",
        "reward/efficiency",
        "rollout/length_mean",
        "policy/grad_norm",
        "policy/loss",
    ],
    "opd": ["distill/divergence", "reward/mean", "rollout/length_mean", "policy/grad_norm", "policy/loss"],
    "sft": ["policy/loss", "policy/grad_norm", "policy/lr", "data/completion_tokens", "perf/tokens_per_s"],
}
HIDDEN = {
    "sft": set(),
    "opd": {"reward/mean", "policy/loss"},
    "likelihood": {"reward/efficiency", "policy/loss"},
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_its_curves(stage: str, tmp_path: Path) -> None:
    write_metrics(tmp_path, {name: [1.0, 2.0] for name in STAGES[stage]})
    drawn = re.findall(r"<figure><b>(.*?)</b>", write_report(tmp_path).read_text())
    assert drawn[0] == STAGES[stage][0]
    assert {*drawn} == {*STAGES[stage]} - HIDDEN.get(stage, {"policy/loss"})


def test_an_evaluation_shows_its_results(tmp_path: Path) -> None:
    (tmp_path / "evaluation.md").write_text("# Evaluation of <m>\n\n| MATH-500 | 75.0 ± 2.0 |\n")
    write_metrics(tmp_path, {"eval/math500/pass_at_1": [0.75]})
    page = write_report(tmp_path).read_text()
    assert "# Evaluation of &lt;m&gt;\n\n| MATH-500 | 75.0 ± 2.0 |\n" in page


def test_a_real_run_shows_its_tokens_and_settings(finished_run: Path, tmp_path: Path) -> None:
    page = write_report(finished_run, tmp_path / "page.html")
    rows = [json.loads(line) for line in (finished_run / "rollouts.jsonl").open()]
    ends = [row for row in rows if row["step"] in (rows[0]["step"], rows[-1]["step"])]
    told = [row for row in ends if "thought_kl" in row]
    figures = {
        f"{value:g} nats" for row in told for value in (*row["thought_kl"], *row["solution_log_probs"])
    }
    found = read(page)
    assert found.titles
    assert {title for title in found.titles if "," not in title} <= figures
    text = unescape(page.read_text())
    assert f"First iteration, step {rows[0]['step']}" in text
    assert f"Last iteration, step {rows[-1]['step']}" in text
    assert "max_completion_length" in text  # config.yaml


def test_each_problem_has_its_best_and_worst_completion(tmp_path: Path) -> None:
    rows = [completion(1, problem, n, -float(n)) for problem in range(6) for n in (1, 0, 2)]
    rows += [completion(2, 0, 0, -0.5)]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    page = write_report(tmp_path).read_text()
    shown = re.findall(r"step (\d) word(\d) of problem (\d)", page)
    expected = [("1", n, str(problem)) for problem in range(4) for n in ("0", "2")]
    assert shown == [*expected, ("2", "0", "0")]


def test_scored_rows_are_shown_by_reward(tmp_path: Path) -> None:
    rows = [
        {"question": "Q", "solution": "S", "reasoning_trace": f"trace {n}.", "reward": -float(n)}
        for n in range(9)
    ]
    write_rows(tmp_path / "scores.jsonl", rows)
    shown = re.findall(r"trace (\d)\.", write_report(tmp_path).read_text())
    assert shown == ["0", "1", "2", "3", "8", "7", "6", "5"]


def test_the_heat_is_that_of_the_tokens() -> None:
    row = tokens()
    page = render_heat(row["thought_tokens"], row["thought_kl"], KL_LEVELS)
    assert page == (
        '\n<span class="w2" title="0.7 nats">So</span><span class="w4" title="5.25 nats"> twice</span>'
        # A character of two tokens has the colour of the larger figure.
        '<span class="w3" title="0.2, 2.5 nats">🙂</span><span class="c3" title="-1.75 nats"> is</span>'
    )
    assert render_heat(["a"], [-2.5], (1.0,), sign=-1) == '<span class="w1" title="-2.5 nats">a</span>'


def test_columns_of_the_source_are_no_figures(tmp_path: Path) -> None:
    scored = {"question": "Q", "solution": "S", "reasoning_trace": "T", "level": 3, "reward": -1.0}
    write_rows(tmp_path / "scores.jsonl", [scored | {"brevity_reward": -0.5, "kl_mean/other": 0.25}])
    page = write_report(tmp_path).read_text()
    assert "reward -1 · brevity_reward -0.5 · kl_mean/other 0.25" in page
    assert "level" not in page


def hostile_run(folder: Path) -> Path:
    row = completion(1, 0, 0, -1.0, question=EVIL, solution=EVIL, explanation=EVIL)
    told = (
        completion(1, 1, 0, -1.0) | tokens() | {"thought_tokens": [EVIL] * 6, "solution_tokens": [EVIL] * 4}
    )
    write_rows(folder / "rollouts.jsonl", [row, told | {f"{EVIL}_reward": 0.0}])
    quoted = EVIL.replace('"', '""')
    write_metrics(folder, {f'"reward/{quoted}"': [1.0, 2.0]})
    (folder / "evaluation.md").write_text(EVIL)
    (folder / "config.yaml").write_text(json.dumps({EVIL: EVIL}))
    return folder


def test_texts_are_escaped(tmp_path: Path) -> None:
    found = read(write_report(hostile_run(tmp_path / "<img src=x onerror=alert(3)>")))
    assert {*found.tags} & {"script", "img", "b", "iframe"} == {"b"}
    assert found.tags.count("b") == 3 * 2 + 1  # three labels of each completion, the chart's title
    assert [name for name, _ in found.attributes if name.startswith("on")] == []
    assert [value for name, value in found.attributes if name in ("src", "href")] == ["data:,"]


def test_a_hostile_completion_runs_nothing_in_a_browser(tmp_path: Path) -> None:
    path = write_report(hostile_run(tmp_path))
    complaints: list[Any] = []
    with chromium() as browser:
        page = browser.new_page()
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.as_uri())
        assert page.locator("article").count() == 2
        assert page.locator("article pre").nth(1).inner_text() == EVIL
    assert [text for text in complaints if text not in (path.as_uri(), "data:,")] == []


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    before = write_report(synthetic_run(tmp_path)).read_text()
    for name in ("metrics.csv", "rollouts.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write("7,-1.2,0." if name == "metrics.csv" else '{"step": 7, "rew')
    assert write_report(tmp_path).read_text() == before


def test_only_a_report_is_overwritten(tmp_path: Path) -> None:
    run, path = synthetic_run(tmp_path / "run"), tmp_path / "page.html"
    path.write_text("<!doctype html>my own page")
    with pytest.raises(InputError, match="is no page of rlt"):
        write_report(run, path)
    assert path.read_text() == "<!doctype html>my own page"
    path.unlink()
    write_report(run, path)
    write_report(run, path)
    assert path.read_text().startswith(MARKER)


def test_the_command_takes_one_run(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run")
    done = rlt("report", str(run), "--output", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'page.html'}: ")
    assert rlt("report", str(run), str(run)).returncode == 2
