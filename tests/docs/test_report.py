"""`rlt report`: the figures on the page are those of the files, and nothing on it can run."""

from __future__ import annotations

import json
import math
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import run_page
from commands import ROOT
from rows_of import read as read_rows
from rows_of import write

from rlt_lightning.commands.report import KL_LEVELS, MARKER, render_heat, write_report
from rlt_lightning.types import InputError

EVIL = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)> & $body \u2028 '\"><b>"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
HEADER = ["figure", "first", "last", "change"]


def completion(step: int, problem: int, number: int, reward: float, **columns: Any) -> dict[str, Any]:
    """A row of rollouts.jsonl; its reward is split between two terms."""
    return {
        "step": step,
        "row": problem + 1,
        "completion": number,
        "policy_version": step - 1,
        "question": f"How much is {problem} + {problem}?",
        "solution": f"\nIt is {2 * problem}.\n",
        "explanation": f"step {step} word{number} of problem {problem}",
        "finish_reason": "stop",
        "num_tokens": 5 + number,
        "seed": 1,
        "worker": None,
        "reward": reward,
        "solution_reward": reward / 4,
        "kl_reward": 3 * reward / 4,
        "format_reward": 0.0,
        **columns,
    }


def write_metrics(folder: Path, columns: dict[str, list[Any]]) -> None:
    """Write metrics.csv, one row per step from 1."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(["step", *columns])]
    lines += [",".join(map(str, [i + 1, *row])) for i, row in enumerate(zip(*columns.values(), strict=True))]
    (folder / "metrics.csv").write_text("\r\n".join(lines) + "\r\n")


def tokens() -> dict[str, Any]:
    """The columns of tokens: a surprise, an emoji of two tokens, a negative KL, a line's end."""
    return {
        "thought_tokens": ["\n", "So", " twice", "", "🙂", " is"],
        "thought_kl": [0.05, 0.7, 5.25, 0.2, 2.5, -1.75],
        "solution_tokens": ["It", " is", " 2", "."],
        "solution_log_probs": [-0.01, -0.8, -6.5, -2.5],
    }


class Reader(HTMLParser):
    """Collects the tags of a page and its tables' rows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
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


def test_figures_that_are_not_finite_are_named(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"reward/mean": [1.0, 2.0, "nan"], "policy/loss": ["nan", "inf", "nan"]})
    page = write_report(tmp_path).read_text()
    assert "NaN or infinite</b>, first at: policy/loss (step 1), reward/mean (step 3)" in page


def test_a_real_run_shows_its_tokens_and_settings(finished_run: Path, tmp_path: Path) -> None:
    page = write_report(finished_run, tmp_path / "page.html")
    rows = read_rows(finished_run / "rollouts.jsonl")
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


def test_the_heat_is_that_of_the_tokens() -> None:
    row = tokens()
    page = render_heat(row["thought_tokens"], row["thought_kl"], KL_LEVELS)
    assert page == (
        '\n<span class="w2" title="0.7 nats">So</span><span class="w4" title="5.25 nats"> twice</span>'
        # A character of two tokens has the colour of the larger figure.
        '<span class="w3" title="0.2, 2.5 nats">🙂</span><span class="c3" title="-1.75 nats"> is</span>'
    )
    assert render_heat(["a"], [-2.5], (1.0,), sign=-1) == '<span class="w1" title="-2.5 nats">a</span>'


def hostile_run(folder: Path) -> Path:
    row = completion(1, 0, 0, -1.0, question=EVIL, solution=EVIL, explanation=EVIL)
    told = (
        completion(1, 1, 0, -1.0) | tokens() | {"thought_tokens": [EVIL] * 6, "solution_tokens": [EVIL] * 4}
    )
    write(folder / "rollouts.jsonl", [row, told | {f"{EVIL}_reward": 0.0}])
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
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("needs Chromium, which is not installed")
    from playwright.sync_api import sync_playwright

    complaints: list[Any] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        page = browser.new_page()
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.as_uri())
        assert page.locator("article").count() == 2
        assert page.locator("article pre").nth(1).inner_text() == EVIL
        browser.close()
    assert [text for text in complaints if text not in (path.as_uri(), "data:,")] == []


def test_a_torn_last_line_is_left_out(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    before = write_report(run).read_text()
    for name, torn in (("metrics.csv", "7,-1.2,0."), ("rollouts.jsonl", '{"step": 7, "rew')):
        with open(run / name, "a") as file:
            file.write(torn)
    assert write_report(run).read_text() == before


def test_only_a_report_is_overwritten(finished_run: Path, tmp_path: Path) -> None:
    run, path = finished_run, tmp_path / "page.html"
    path.write_text("<!doctype html>my own page")
    with pytest.raises(InputError, match="is no page of rlt"):
        write_report(run, path)
    assert path.read_text() == "<!doctype html>my own page"
    path.unlink()
    write_report(run, path)
    write_report(run, path)
    assert path.read_text().startswith(MARKER)


def test_the_example_run_s_pages_are_those_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / run_page.KEPT, tmp_path / run_page.KEPT)
    monkeypatch.chdir(tmp_path)
    run_page.write_pages()
    for page in (run_page.PAGE, run_page.KEPT / "report.html"):
        assert page.read_text() == (ROOT / page).read_text(), f"run scripts/run_page.py: {page}"
