"""`rlt report`: what it reads, what it leaves out, and the page in a real browser."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from browser import chromium, completion, synthetic_run, tokens, write_metrics, write_rows
from commands import ROOT, rlt

from rlt_lightning.report.charts import build_curve_sections, build_group_charts
from rlt_lightning.report.collect import TOKEN_COLUMNS, Bounds, Run, collect, judge_text
from rlt_lightning.report.page import (
    MARKER,
    build_data,
    build_data_of_rows,
    cut_digits,
    report,
    shorten_names,
    write_page,
)
from rlt_lightning.tasks.countdown import solve_row
from rlt_lightning.types import InputError

ALL = Bounds(10**6, 10**9)
EVIL = "</script><img src=x onerror=alert(1)> & <b>bold</b> \u2028 “quoted”"


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with chromium() as found:
        yield found


class Opened:
    """A page in a browser, and all that it has complained of or asked for."""

    def __init__(self, chrome: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        height = 844 if width < 500 else 900
        self.context = chrome.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def draw_all(self) -> None:
        """Open what is folded and wait until every chart is drawn."""
        self.page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        drawn = "[...document.querySelectorAll('.plot')].every((plot) => Chart.getChart(plot.firstChild))"
        self.page.wait_for_function(drawn)  # which ends after 30 seconds: an awaited `evaluate` never does

    def painted(self, plot: Any, css_color: str) -> float:
        """The fraction of a chart's pixels that have a colour of the page, or nearly."""
        found = plot.locator("canvas").evaluate(
            """(canvas, name) => {
              const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
              const wanted = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
              const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d');
              copy.drawImage(canvas, 0, 0);
              const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
              const near = (value, i) => Math.abs(data[i] - value) <= 24;
              let same = 0;
              for (let i = 0; i < data.length; i += 4)
                same += data[i + 3] > 200 && wanted.every((value, j) => near(value, i + j));
              return same / (data.length / 4);
            }""",
            css_color,
        )
        return float(found)

    def shown(self) -> list[int]:
        """The completions in the list, as they stand on the page."""
        buttons = self.page.locator(".row").all()
        return [int(button.get_attribute("data-completion")) for button in buttons]

    def set(self, label: str, value: str) -> None:
        """Fill in a field, and wait until the list has followed."""
        field = self.page.get_by_label(label, exact=True)
        if field.evaluate("(node) => node.tagName") == "SELECT":
            field.select_option(label=value)
        else:
            field.fill(value)
        self.page.wait_for_selector(".list:not([aria-busy])", state="attached")

    def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        width = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return int(width)

    def close(self) -> None:
        """Close it; nothing may have gone wrong until now."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(("file://", "data:"))] == []
        self.context.close()


@pytest.fixture
def opened(chrome: Any) -> Iterator[Any]:
    pages = []

    def open_page(path: Path, **options: Any) -> Opened:
        pages.append(Opened(chrome, path, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


def charts_of(*runs: Run) -> dict[str, dict[str, Any]]:
    return {chart["name"]: chart for section in build_curve_sections([*runs]) for chart in section["charts"]}


def test_spreads_of_terms_are_those_of_the_completions(tmp_path: Path) -> None:
    run = collect(synthetic_run(tmp_path / "run"), ALL)
    # Step 2 has problems 0 and 1: -4.8 + 0.01 n and -3.8 + 0.01 n, three quarters of which are the KL term.
    kl = [0.75 * (-4.8 + problem + 0.01 * n) for problem in (0, 1) for n in range(4)]
    chart = charts_of(run)["reward/kl"]["series"][0]
    assert chart["x"] == [1, 2, 3, 4, 5, 6]
    assert chart["y"][1] == pytest.approx(-2.8)  # the line is that of metrics.csv
    assert chart["high"][1] - chart["y"][1] == pytest.approx(stdev(kl))
    assert chart["y"][1] - chart["low"][1] == pytest.approx(stdev(kl))
    reward = charts_of(run)["reward/mean"]["series"][0]
    assert reward["high"][0] - reward["y"][0] == pytest.approx(0.5)  # reward/std


def test_completions_alone_make_curves_too(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.csv").unlink()
    charts = charts_of(collect(tmp_path / "run", ALL))
    assert charts["reward/mean"]["series"][0]["y"][0] == pytest.approx(-4.9 + 2.5 + 0.015)
    assert "policy/entropy" not in charts


@pytest.mark.parametrize("column", ["own_reward", "own"])  # of an RLTReward, of a TextReward
def test_a_term_without_entry_has_a_band(column: str, tmp_path: Path) -> None:
    write_metrics(tmp_path, {"reward/own": [-0.5]})
    # The standard deviation of -0.4 and -0.6 is 0.2 / sqrt(2).
    write_rows(
        tmp_path / "rollouts.jsonl", [completion(1, 0, n, -2.0, **{column: -0.4 - 0.2 * n}) for n in range(2)]
    )
    [series] = charts_of(collect(tmp_path, ALL))["reward/own"]["series"]
    assert series["high"] == [pytest.approx(-0.5 + 0.2 / math.sqrt(2))]


def test_a_term_without_entry_needs_no_metrics(tmp_path: Path) -> None:
    write_rows(tmp_path / "rollouts.jsonl", [completion(1, 0, n, -2.0, own_reward=-0.5) for n in range(2)])
    assert charts_of(collect(tmp_path, ALL))["reward/own"]["series"][0]["y"] == [-0.5]


def test_held_out_figures_stand_in_the_chart_of_their_metric(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"reward/mean": [-3.0, -2.0], "reward/val_mean": ["", -2.5]})
    [chart] = charts_of(collect(tmp_path, ALL)).values()
    assert [series["label"] for series in chart["series"]] == ["", "held-out problems"]
    assert (chart["series"][1]["x"], chart["series"][1]["y"]) == ([2], [-2.5])


def test_every_metric_is_drawn_once(tmp_path: Path) -> None:
    names = ["reward/correct", "reward/own_term", "policy/loss", "perf/mfu", "rollout/staleness"]
    write_metrics(
        tmp_path, {name: [1.0, 2.0] for name in [*names, "reward/val_correct", "eval/aime24/pass_at_1"]}
    )
    sections = {
        s["title"]: [c["name"] for c in s["charts"]] for s in build_curve_sections([collect(tmp_path, ALL)])
    }
    assert sections["Reward"] == ["reward/correct", "reward/own_term"]
    assert sections["Policy"] == ["policy/loss"]
    assert sections["All other figures"] == ["perf/mfu", "rollout/staleness"]


def test_cells_that_are_not_finite_are_gaps_and_told(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"reward/mean": ["nan", -2.0, "inf", -1.0], "policy/lr": ["nan", "", "", ""]})
    run = collect(tmp_path, ALL)
    assert run.metrics == {"reward/mean": ([1, 2, 3, 4], [None, -2.0, None, -1.0])}
    assert "reward/mean is not finite at 2 steps (first: 1)" in run.notes[0]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    synthetic_run(tmp_path)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("7,-1.2,0.")
    with open(tmp_path / "rollouts.jsonl", "a") as file:
        file.write('{"step": 7, "rew')
    run = collect(tmp_path, ALL)
    assert run.metrics["reward/mean"][0] == [1, 2, 3, 4, 5, 6]
    assert run.completions.total == 48


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "must be the folder of a run"),
        ({"rollouts.jsonl": ""}, "no figures yet"),
        ({"metrics.csv": "step,reward/mean\n"}, "no figures yet"),
        ({"metrics.csv": "step,reward/mean\n1,much\n"}, "Line 2 of"),
        ({"metrics.csv": "reward/mean\n1\n"}, "move the file away"),
        ({"metrics.csv": "step,a\nnan,1\n"}, "Line 2 of"),
        ({"groups.json": "[1,"}, "must be JSON"),
        ({"evaluation.json": "[]"}, "must hold a JSON dict"),
        ({"evaluation.json": '{"a": 1}'}, "must have sets"),
        ({"groups.json": '[{"group": 1}]'}, "must have group, num_rows, reward"),
        ({"metrics.csv": "step,a\n1,2\n", "config.yaml": "a: ["}, "must be YAML"),
        ({"rollouts.jsonl": "no json\n"}, "must be JSON, but line 1"),
        ({"rollouts.jsonl": "[1]\n"}, "must be a JSON object, but one is [1]"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(files: dict[str, str], reason: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(reason)) as error:
        collect(tmp_path, ALL)
    assert "\n" not in str(error.value)


def test_only_a_report_is_overwritten(tmp_path: Path) -> None:
    run, path = synthetic_run(tmp_path / "run"), tmp_path / "page.html"
    path.write_text("<!doctype html>my own page")
    with pytest.raises(InputError, match="is no report"):
        report([str(run)], output=str(path))
    assert path.read_text() == "<!doctype html>my own page"
    path.unlink()
    report([str(run)], output=str(path))
    report([str(run)], output=str(path))
    assert path.read_text().startswith(MARKER)
    with pytest.raises(InputError, match="is a folder"):
        report([str(run)], output=str(run))
    with pytest.raises(InputError, match="max_completions must be above 0"):
        report([str(run)], max_completions=0)


def test_runs_are_named_by_what_tells_them_apart() -> None:
    assert shorten_names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert shorten_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    with pytest.raises(InputError, match="named twice"):
        shorten_names([Path("/x/a"), Path("/x/../x/a")])


def test_a_bounded_page_keeps_what_matters_of_every_problem(tmp_path: Path) -> None:
    rows = []
    for step in range(1, 51):
        for problem in ((2 * step) % 20, (2 * step + 1) % 20):
            rows += [completion(step, problem, n, math.sin(100 * step + 7 * problem + n)) for n in range(8)]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    found = collect(tmp_path, Bounds(200, 10**9)).completions
    assert found.total == 800
    assert len(found.kept) == 200
    for problem in range(20):
        own = [i for i, row in enumerate(rows) if row["row"] == problem + 1]
        best, worst = (choose(own, key=lambda i: rows[i]["reward"]) for choose in (max, min))
        assert {best, worst, own[0], own[-1]} <= found.kept.keys()
    by_step = [sum(row["step"] == step for row in found.kept.values()) for step in range(1, 51)]
    assert min(by_step) > 0
    # The curve's spread is still that of all completions.
    assert found.spreads["reward"][7].count == 16
    size = len(rows[0]["explanation"])
    few = collect(tmp_path, Bounds(200, 60 * size))
    texts = sum(len(row["text"]) for row in few.completions.kept.values())
    problems = {row["problem"] for row in few.completions.kept.values()}
    texts += sum(len(p.question + p.solution) for p in map(few.completions.problems.__getitem__, problems))
    assert 20 * size < texts <= 60 * size
    assert "of the 800 completions in rollouts.jsonl are on this page" in few.notes[0]


def test_a_problem_shows_its_typical_completions_of_both_ends(tmp_path: Path) -> None:
    rewards = {1: [-4.0, -2.0, -3.5], 2: [-3.5, -1.0, -9.0], 3: [-0.5, -6.0, -1.0]}
    rows = [
        completion(step, 0, n, reward) for step, group in rewards.items() for n, reward in enumerate(group)
    ]
    rows += [completion(1, 1, n, -2.0 - n) for n in range(3)]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    completions = build_data([collect(tmp_path, ALL)])["completions"]
    again, once = (problem["runs"][0] for problem in completions["problems"])
    landmarks = ("typical_first", "typical_last", "highest", "lowest", "times")
    assert [again[name] for name in landmarks] == [2, 8, 6, 5, 3]
    assert [once[name] for name in landmarks] == [10, None, 9, 11, 1]
    # The mean of the last time, -2.5, minus that of the first, -9.5 / 3.
    assert again["gain"] == pytest.approx(-2.5 + 9.5 / 3)
    assert once["gain"] is None
    assert again["sizes"] == {"1": 3, "2": 3, "3": 3}
    assert again["means"]["2"] == pytest.approx(-4.5)


def test_identical_samples_of_a_problem_are_one_entry(tmp_path: Path) -> None:
    texts = ("same", "other", "same", "same")
    rows = [completion(1, 0, n, -1.0, explanation=text, num_tokens=5) for n, text in enumerate(texts)]
    rows[2] |= tokens()
    rows += [completion(2, 0, n, -1.0, explanation="same", num_tokens=5) for n in range(2)]
    rows += [completion(2, 1, 0, -1.0, explanation="same", num_tokens=5)]
    rows += [completion(2, 1, 1, -2.0, explanation="same", num_tokens=5, finish_reason="length")]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    found = collect(tmp_path, ALL)
    data = build_data([found])["completions"]
    assert [*found.completions.kept] == [0, 1, 4, 6, 7]
    assert data["sample"] == [
        "3 of 4 samples: 1, 3, 4",
        "sample 2 of 4",
        "all 2 samples",
        "sample 1 of 2",
        "sample 2 of 2",
    ]
    assert data["copies"] == [3, 1, 2, 1, 1]
    assert data["tokens"][0]["thought_tokens"] == rows[2]["thought_tokens"]  # which a copy has recorded
    assert found.notes == []  # all are on the page
    assert data["problems"][0]["runs"][0]["highest"] == 0
    assert found.completions.spreads["reward"][1].count == 4


def test_a_page_of_one_problem_has_a_card_for_each_explanation(tmp_path: Path, opened: Any) -> None:
    question = {"question": "start 2, add 1, times 7?", "solution": "\\boxed{1}"}
    log_probs = {"student_log_prob_before": -700.0, "student_log_prob_after": math.log(0.5)}
    log_probs |= {"student_prob_before": 0.1, "student_prob_after": 0.9}
    rows = [completion(1, 0, n, -1.0 - n % 2, explanation=f"text {n % 2}", num_tokens=5) for n in range(4)]
    rows = [row | question | log_probs | tokens() for row in rows]
    for row in rows:
        del row["step"]
    write_page(tmp_path / "page.html", "Page", build_data_of_rows(rows, ["note"], {"teacher": "T"}))
    page = opened(tmp_path / "page.html").page
    headings = ["2 of 4 samples: 1, 3: largest reward", "2 of 4 samples: 2, 4"]
    assert page.locator(".card h3").all_inner_texts() == headings
    text = page.inner_text("body")
    assert "of every result only the last digit is kept" in text
    # exp(-700) = 9.9e-305
    assert text.count("probability of the whole solution: 9.9e−305 → 0.500, without → with") == 2
    assert "teacher\nT" in text or "teacher T" in text
    assert page.locator(".row").count() == 0  # no list beside the cards
    assert "more figures" in text


def test_a_verdict_says_what_limits_it(tmp_path: Path) -> None:
    rising = [-1 + step / 40 for step in range(40)]
    write_metrics(
        tmp_path,
        {"reward/mean": rising, "policy/entropy": [1.0] * 20 + [0.01] * 20, "reward/val_mean": rising},
    )
    [run] = build_data([collect(tmp_path, ALL)])["runs"]
    assert run["verdict"].endswith(" nats. But the entropy is 0.01 nats at the end.")
    first, problems, held_out = run["over"].removesuffix(".").split(". ")
    assert first == "Means over the first and over the last 10 iterations, ± standard errors over iterations"
    assert problems == "Problems differ between iterations"
    assert held_out == "Held-out figures: the first and the last validation"
    assert run["warnings"][0].startswith("the entropy is 0.01 nats at the end, 1 at the start")


def test_a_figure_that_enters_the_reward_as_it_is_has_one_chart(tmp_path: Path) -> None:
    curves = {"reward/kl_mean": [0.1, 0.2], "student/kl_mean": [0.1, 0.2]}
    write_metrics(tmp_path, curves | {"reward/kl_max": [1.0, 1.0], "student/kl_max": [1.0, 9.0]})
    assert [*charts_of(collect(tmp_path, ALL))] == ["reward/kl_mean", "reward/kl_max", "student/kl_max"]


def test_bands_are_drawn_on_demand(tmp_path: Path, opened: Any) -> None:
    write_metrics(tmp_path, {"reward/mean": [-1.0, -0.9], "reward/std": [5.0, 5.0]})
    report([str(tmp_path)])
    page = opened(tmp_path / "report.html").page
    height = "() => { const { y } = Object.values(Chart.instances)[0].scales; return y.max - y.min; }"
    assert page.evaluate(height) < 0.5  # that of the line
    page.get_by_role("button", name="Bands").click()
    assert page.evaluate(height) > 5


CHAIN = "start 2, add 1, times 7?"  # 3, then 1
KINDS = {
    "steps": "2 add 1 is 3, 3 times 7 is 1.",
    "leap": "clearly the answer is 1.",
    "filler": "one looks at the numbers, one takes the next part.",
}


def write_chains(folder: Path, rewards: dict[int, dict[str, float]], **columns: Any) -> Path:
    """A run on chains: an explanation of each named kind, with its reward, by iteration."""
    texts = {"question": CHAIN, "solution": "\\boxed{1}"}
    rows = [
        completion(step, 0, n, reward, explanation=KINDS[kind], **texts, **columns)
        for step, group in rewards.items()
        for n, (kind, reward) in enumerate(group.items())
    ]
    write_rows(folder / "rollouts.jsonl", rows)
    return folder


def test_kinds_and_right_answers_stand_beside_the_reward(tmp_path: Path) -> None:
    rewards = {1: {"leap": 0.0, "filler": -1.0}, 2: {"steps": -0.5, "leap": -0.2, "filler": -2.0}}
    run = collect(write_chains(tmp_path, rewards), ALL)
    data = build_data([run])
    assert data["completions"]["kind"] == ["leap", "filler", "steps", "leap", "filler"]
    assert data["completions"]["right"] == [True, False, True, True, False]
    assert run.completions.kinds["leap"] == {1: 0.5, 2: pytest.approx(1 / 3)}
    assert run.completions.right == {1: 0.5, 2: pytest.approx(2 / 3)}
    [table] = data["kinds"]
    by_kind = {row[0]: row[1:] for row in table["rows"][1:]}
    # Leaps: mean of 0 and -0.2; 0.5 and 0.7 above the means -0.5 and -0.9; first in both groups.
    assert by_kind["leap"] == ["40.0 %", "−0.1", "+0.6", "100 % of 2"]
    assert by_kind["steps"] == ["20.0 %", "−0.5", "+0.4", "0 % of 1"]
    charts = {chart["title"]: chart for section in data["sections"] for chart in section["charts"]}
    assert charts["Ends with the right answer"]["series"][0]["y"] == [50.0, pytest.approx(200 / 3)]


def test_kind_of_an_answer_is_that_of_its_thought() -> None:
    text = f"<think>\n{KINDS['leap']}\n</think>\n\n<solution>\n\\boxed{{4}}\n</solution>"
    assert judge_text({}, CHAIN, "\\boxed{1}", text) == ("leap", False)
    made = solve_row([3, 5, 8], 19)
    assert judge_text({}, made["question"], made["solution"], "so \\boxed{8 * 3 - 5}") == (None, True)
    assert judge_text({}, made["question"], made["solution"], "so \\boxed{8 + 3 * 5}") == (None, False)
    assert judge_text({}, "Why?", "since it is so", "text") == (None, None)
    sums = "Ana has 8 shells, buys 5 and finds 3. How many shells does Ana have now?"
    assert judge_text({}, sums, "\\boxed{16}", "8 + 5 = 13. 13 + 3 = 16.") == ("steps", True)


def test_the_summary_says_whether_a_run_learned(tmp_path: Path) -> None:
    steps = range(40)
    write_metrics(
        tmp_path / "up",
        {"reward/mean": [-1 + step / 40 for step in steps]}
        | {"perf/generate_s": [2.0] * 40, "perf/train_s": [1.0] * 40, "perf/tokens_per_s": [100.0] * 40}
        | {"rollout/length_mean": [30.0] * 40},
    )
    write_metrics(tmp_path / "flat", {"reward/mean": [-1 + (step % 2) / 4 for step in steps]})
    write_metrics(tmp_path / "down", {"policy/loss": [1 + step / 40 for step in steps]})
    (tmp_path / "up" / "config.yaml").write_text(
        "model: {class_path: M, init_args: {teacher: T, student: S}}\ndata: {init_args: {source: D}}\n"
    )
    up, flat, down = build_data([collect(tmp_path / name, ALL) for name in ("up", "flat", "down")])["runs"]
    assert (up["learned"], flat["learned"], down["learned"]) == ("yes", "unclear", "no")
    assert up["trained"] == (
        "Reinforcement-learned teacher: T was trained to explain solutions on D in the way that helps the "
        "frozen student S most: 40 iterations."
    )
    # Means of -1 to -0.775 and of -0.25 to -0.025.
    assert "reward −0.887 ±\u00a00.024 → −0.138 ±\u00a00.024 nats" in up["verdict"]
    assert up["facts"] == {"time of all iterations": "2.0 min", "tokens sampled": "12,000"}
    assert down["trained"] == "Supervised fine-tuning: a model was trained: 40 optimizer steps."


def test_bands_and_axes_end_where_the_figure_can_be(tmp_path: Path) -> None:
    term = "solution_log_prob_reward"
    rows = [completion(1, 0, n, -1.0, **{term: value}) for n, value in enumerate((-0.1, -1.9))]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    write_metrics(tmp_path, {"reward/solution": [-1.0], "rollout/closed_frac": [1.0], "reward/kl": [-0.1]})
    charts = charts_of(collect(tmp_path, ALL))
    chart = charts["reward/solution"]
    assert chart["limits"] == [None, 0.0]
    # The standard deviation is 1.8 / sqrt(2) = 1.27, so that -1 + 1.27 is cut.
    assert (chart["series"][0]["high"], chart["series"][0]["low"]) == (
        [0.0],
        [pytest.approx(-2.2728, abs=1e-4)],
    )
    assert charts["rollout/closed_frac"]["limits"] == [0.0, 1.0]
    assert charts["reward/kl"]["limits"] == [None, None]
    write_metrics(tmp_path, {"reward/solution": [-1.0], "reward/baseline": [-2.0]})
    assert charts_of(collect(tmp_path, ALL))["reward/solution"]["limits"] == [None, None]


def test_distillation_shows_its_loss_first_and_no_reward(tmp_path: Path) -> None:
    write_chains(tmp_path, {1: {"leap": -0.3}, 2: {"steps": -0.1}})
    write_metrics(tmp_path, {"distill/divergence": [0.3, 0.1], "policy/loss": [0.3, 0.1]})
    data = build_data([collect(tmp_path, ALL)])
    titles = [section["title"] for section in data["sections"]]
    assert titles[:3] == ["What the completions are", "Policy", "Divergence"]
    names = [chart["title"] for section in data["sections"] for chart in section["charts"]]
    assert "Minus the divergence, by answer" in names
    assert "Reward" not in names
    assert data["completions"]["labels"]["reward"] == "minus the divergence"
    assert data["kinds"] == []
    assert data["runs"][0]["trained"].startswith("On-policy distillation: the student a model was trained")


def test_students_of_a_run_stand_in_one_chart(tmp_path: Path) -> None:
    columns = {"reward/kl": [-2.0], "reward/kl/one": [-1.0], "reward/kl/two": [-3.0]}
    write_metrics(tmp_path, columns | {"reward/val_kl/two": [-4.0]})
    charts = charts_of(collect(tmp_path, ALL))
    assert [*charts] == ["reward/kl"]
    found = {series["label"]: series["y"] for series in charts["reward/kl"]["series"]}
    assert found == {
        "all students": [-2.0],
        "one": [-1.0],
        "two": [-3.0],
        "two, held-out problems": [-4.0],
    }


def test_rewards_of_different_scales_are_told(tmp_path: Path) -> None:
    for name, weight in (("one", 3.0), ("two", 1.0)):
        write_metrics(tmp_path / name, {"reward/mean": [-1.0]})
        (tmp_path / name / "config.yaml").write_text(
            f"model: {{init_args: {{reward: {{init_args: {{kl_weight: {weight}}}}}}}}}\n"
        )
    one, two = (collect(tmp_path / name, ALL) for name in ("one", "two"))
    assert "since reward.kl_weight differs" in build_data([one, two])["scales"]
    assert build_data([one])["scales"] == ""
    two.settings[".model.init_args.reward.init_args.kl_weight"] = 3.0
    assert build_data([one, two])["scales"] == ""
    write_metrics(tmp_path / "warmup", {"policy/loss": [0.3]})  # it has no reward that could be compared
    assert build_data([one, two, collect(tmp_path / "warmup", ALL)])["scales"] == ""


def test_scores_of_any_source_are_read(tmp_path: Path) -> None:
    terms = {"reward": -1.0, "kl_reward": -0.5}
    answer = "<|begin_of_thought|>\n\nthe thought\n\n<|end_of_thought|>\n\n"
    answer += "<|begin_of_solution|>\n\nthe end\n\n<|end_of_solution|>"
    turns = [{"from": "user", "value": "Why?"}, {"from": "assistant", "value": answer}]
    rows = [
        {"question": "Q", "solution": "S", "reasoning_trace": "T", "level": 3, **terms},
        {"problem": "Q", "solution": "S", "reasoning_trace": "no", "r1": "R", "trace_column": "r1", **terms},
        {"conversations": turns, **terms},
    ]
    write_rows(tmp_path / "scores.jsonl", rows)
    found = collect(tmp_path, ALL).completions
    assert [row["text"] for row in found.kept.values()] == ["T", "R", "the thought"]
    assert [(problem.question, problem.solution) for problem in found.problems] == [
        ("Q", "S"),
        ("Why?", "the end"),
    ]
    assert found.terms == ["reward", "kl_reward"]  # level is a column of the source
    own_tags = [{"from": "assistant", "value": "[t]the thought[/t]"}]
    row = {"question": "Q", "solution": "S", "reasoning_trace": "T", "trace": 1, "conversations": own_tags}
    write_rows(tmp_path / "two" / "traces.jsonl", [row | terms | {"closed": True, "num_tokens": 7}])
    found = collect(tmp_path / "two", ALL).completions
    assert [(row["text"], row["copies"], row["sample"]) for row in found.kept.values()] == [("T", 1, "")]
    assert found.terms == ["reward", "kl_reward", "num_tokens", "closed"]


def test_columns_of_a_source_are_not_taken_for_ours(tmp_path: Path) -> None:
    texts = {"question": "Q", "solution": "4", "reasoning_trace": "T"}
    rows = [texts | {"reward": -1.0, "step": step, "row": "a"} for step in ("add", ["two", "lists"], 3)]
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = collect(tmp_path, ALL).completions
    assert [row["step"] for row in found.kept.values()] == [None, None, None]
    assert (found.problems[0].row, found.spreads) == (None, {})


def test_tokens_that_are_none_of_ours_are_left_out(tmp_path: Path) -> None:
    row = completion(1, 1, 0, -1.0) | {name: [1] for name in TOKEN_COLUMNS} | {"thought_kl": ["a"]}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    assert collect(tmp_path, ALL).completions.kept[0]["tokens"] is None


def test_groups_by_a_reward_without_models_are_drawn_by_what_they_have(tmp_path: Path) -> None:
    group = {"group": 1, "num_rows": 2, "reward": -1.0, "reward_min": -2.0, "reward_max": 0.0}
    (tmp_path / "groups.json").write_text(json.dumps([group]))
    [chart] = build_group_charts([collect(tmp_path, ALL)])
    assert [part["label"] for part in chart["series"]] == ["reward"]


def test_numbers_are_cut_and_never_nan(tmp_path: Path) -> None:
    assert cut_digits({"a": [1.23456789, 3, "x", None, True]}) == {"a": [1.23457, 3, "x", None, True]}
    row = completion(1, 0, 0, math.nan) | tokens() | {"thought_kl": [0.1, math.inf, 0.2, 0.3, 0.4, 0.5]}
    write_rows(tmp_path / "rollouts.jsonl", [row])
    report([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*)</script>', page)[1])  # type: ignore[index]
    assert data["completions"]["terms"]["reward"] == [None]
    assert data["completions"]["tokens"]["0"]["thought_kl"][1] is None


def test_the_command_line_takes_run_folders(tmp_path: Path) -> None:
    one, two = synthetic_run(tmp_path / "one"), synthetic_run(tmp_path / "two")
    result = rlt("report", str(one))
    assert result.returncode == 0, result.stderr
    assert str(one / "report.html") in result.stdout
    result = rlt(
        "report", str(one), "--output", str(tmp_path / "both.html"), str(two), "--max_completions=20"
    )
    assert result.returncode == 0, result.stderr
    assert "<h1>2 runs: one, two</h1>" in (tmp_path / "both.html").read_text()
    title = f"<h1>Reinforcement learning: {tmp_path.name}/one</h1>"
    assert title in (one / "report.html").read_text()
    for arguments, reason in (
        ([], "rlt report needs a run"),
        ([str(tmp_path)], "must be the folder of a run"),
        ([str(one), "--page", "x"], "--page"),
    ):
        result = rlt("report", *arguments)
        assert result.returncode == 2
        assert reason in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_real_runs_page_shows_its_completions_and_tokens(
    finished_run: Path, tmp_path: Path, opened: Any
) -> None:
    report([str(finished_run)], output=str(tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text()
    data = re.search(r'id="data">(.*)</script>', text)[1]  # type: ignore[index]
    assert len(text.encode()) - len(data.encode()) < 0.3 * 2**20
    recorded = [json.loads(line) for line in (finished_run / "rollouts.jsonl").open()]
    rows = [recorded[i] for i in collect(finished_run, ALL).completions.kept]  # of identical ones the first
    page = opened(tmp_path / "report.html")
    page.draw_all()
    names = page.page.locator(".chart code").all_inner_texts()
    assert {"reward/mean", "reward/kl", "policy/entropy", "rollout/closed_frac"} <= {n.strip() for n in names}
    shown = page.shown()  # of the last iteration
    assert [rows[i]["step"] for i in shown] == sorted((row["step"] for row in rows), reverse=True)[:20]
    best = next(i for i in shown if "thought_tokens" in rows[i])
    page.page.locator(f".row[data-completion='{best}']").click()
    thought, solution = page.page.locator(".list .detail .text[role=group]").all()
    assert thought.evaluate("(node) => node.textContent") == "".join(rows[best]["thought_tokens"])
    assert solution.evaluate("(node) => node.textContent") == "".join(rows[best]["solution_tokens"])
    assert rows[best]["solution"].strip() in solution.evaluate("(node) => node.textContent")


def test_texts_stay_texts(tmp_path: Path, opened: Any) -> None:
    texts = {"explanation": EVIL, "question": EVIL, "solution": EVIL}
    row = completion(1, 0, 0, -1.0) | texts | tokens() | {"thought_tokens": [EVIL, "b", "", "", "", ""]}
    write_rows(tmp_path / EVIL.replace("/", "_") / "rollouts.jsonl", [row | {"finish_reason": EVIL}])
    write_page(tmp_path / "one.html", EVIL, build_data_of_rows([row], [EVIL]))
    report([str(tmp_path / EVIL.replace("/", "_"))], output=str(tmp_path / "run.html"))
    for name in ("one.html", "run.html"):
        page = opened(tmp_path / name)
        assert page.page.locator("p.warning").count() == (name == "one.html")
        assert page.page.locator("img").count() == 0
        assert EVIL.replace("\u2028", "") in page.page.locator("main").evaluate(
            "(node) => node.textContent.replaceAll('\u2028', '')"
        )


@pytest.mark.full
def test_sorting_and_filtering_give_exactly_their_rows(tmp_path: Path, opened: Any) -> None:
    rows = [
        completion(1 + i // 10, i % 5, i % 10, math.sin(i), kl_reward=math.cos(i), explanation=f"text {i}")
        for i in range(60)
    ]
    rows[7]["explanation"] = "a NEEDLE here"
    del rows[3]["kl_reward"]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    report([str(tmp_path)])
    page = opened(tmp_path / "report.html")

    def expected(test: Any, key: Any, reverse: bool = True) -> list[int]:
        return sorted(
            (i for i, row in enumerate(rows) if test(row)), key=lambda i: key(rows[i]), reverse=reverse
        )

    assert page.shown() == expected(lambda row: True, lambda row: row["step"])[:20]  # the last iterations
    page.set("Sort by", "reward")
    assert page.shown() == expected(lambda row: True, lambda row: row["reward"])[:20]
    page.page.get_by_text("Next page").click()
    assert page.shown() == expected(lambda row: True, lambda row: row["reward"])[20:40]
    page.set("Sort by", "KL term")
    page.set("Order", "smallest first")
    known = expected(lambda row: "kl_reward" in row, lambda row: row["kl_reward"], reverse=False)
    assert page.shown() == known[:20]
    for _ in range(2):
        page.page.get_by_text("Next page").click()
    assert page.shown() == [*known[40:], 3]  # without the figure: last
    page.page.get_by_text("Filter by terms").click()
    page.set("reward, at least", "-0.5")
    page.set("KL term, at most", "0.25")
    page.set("Iteration from", "2")
    page.set("to", "4")

    def inside(row: dict[str, Any]) -> bool:
        return row["reward"] >= -0.5 and row.get("kl_reward", 9) <= 0.25 and 2 <= row["step"] <= 4

    wanted = expected(inside, lambda row: row["kl_reward"], reverse=False)
    assert 0 < len(wanted) < 20
    assert page.shown() == wanted
    assert page.page.get_by_text(f"{len(wanted)} of 60 completions").count() == 1
    page.set("Problem (row)", "3")
    assert page.shown() == [i for i in wanted if rows[i]["row"] == 3]
    page.page.get_by_text("Clear filters").click()
    page.set("Text of explanation, question or solution", "needle")
    assert page.shown() == [7]
    page.set("Text of explanation, question or solution", "How much is 4 + 4")
    assert sorted(page.shown()) == [i for i, row in enumerate(rows) if row["row"] == 5]


def test_each_tokens_figure_is_told_on_focus_and_hover_by_keys_alone(tmp_path: Path, opened: Any) -> None:
    write_page(tmp_path / "one.html", "One", build_data_of_rows([completion(1, 0, 0, -1.0) | tokens()]))
    page = opened(tmp_path / "one.html").page
    tip = page.locator("#tip")
    for _ in range(12):  # Tab leads to the explanation, in one stop
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('t')"):
            break
    assert "KL 0.050 nats" in tip.inner_text()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text() == "“ twice”: KL 5.25 nats\nnumber 1 of 5 by surprise"
    page.keyboard.press("ArrowRight")  # the character of two tokens is one stop
    assert "“🙂”: KL 2.50 nats (2 tokens: 0.200, 2.50)" in tip.inner_text()
    page.keyboard.press("End")
    assert "KL −1.75 nats" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden() or tip.bounding_box()["x"] < 0
    classes = (
        page.locator(".text").nth(1).locator(".t").evaluate_all("(all) => all.map((one) => one.className)")
    )
    assert classes == ["t line", "t w2", "t w4", "t w3", "t c3"]
    page.locator(".text[role=group]").last.locator(".t").nth(2).hover()
    assert "log-prob −6.50 nats, probability 0.002" in tip.inner_text()
    page.get_by_role("button", name=re.compile("^twice|^ twice")).click()
    assert "KL 5.25 nats" in tip.inner_text()
    assert page.evaluate("document.activeElement.textContent") == " twice"


@pytest.mark.full
def test_runs_are_overlaid_in_their_own_colours(tmp_path: Path, opened: Any) -> None:
    one, two = synthetic_run(tmp_path / "one"), synthetic_run(tmp_path / "two", shift=0.5)
    (one / "config.yaml").write_text("model: {init_args: {teacher: t, reward: {kl_weight: 3.0}}}\n")
    (two / "config.yaml").write_text("model: {init_args: {teacher: t, reward: {kl_weight: 1.0}}}\n")
    report([str(one), str(two)], output=str(tmp_path / "both.html"))
    page = opened(tmp_path / "both.html")
    page.draw_all()
    legend = page.page.locator(".legend button")
    assert legend.all_inner_texts() == ["one", "two", "Bands"]
    colors = page.page.locator(".plot").evaluate_all(
        """(plots) => plots.map((plot) => Chart.getChart(plot.firstChild))
             .filter((chart) => chart.config.type === "line")
             .map((chart) => chart.data.datasets.filter((line) => line.borderWidth))
             .map((lines) => lines.map((line) => line.label + line.borderColor))"""
    )
    assert len(colors) >= 5
    assert all(sorted(found) == sorted(colors[0]) for found in colors)
    assert len(set(colors[0])) == 2
    assert page.page.get_by_label("Settings that differ").get_by_role("cell", name="3.0").is_visible()
    assert "reward.kl_weight differs" in page.page.locator("p.warning").inner_text()
    reward = page.page.locator(".plot").first
    assert page.painted(reward, "--run-0") > 0.002
    assert page.painted(reward, "--run-1") > 0.002
    legend.first.click()
    assert page.painted(reward, "--run-0") == 0
    assert page.painted(reward, "--run-1") > 0.002
    names = reward.evaluate(
        "(plot) => Chart.getChart(plot.firstChild).data.datasets.map((line) => line.label)"
    )
    assert [name for name in names if name] == ["two"]
    assert legend.first.get_attribute("aria-pressed") == "false"
    page.set("Run", "two")
    assert page.shown()
    assert min(page.shown()) >= 48


def test_a_chart_tells_the_values_under_the_pointer(tmp_path: Path, opened: Any) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    # The second run has no value at the third step, and one at a step that the first does not have.
    write_metrics(
        one, {"reward/mean": [-4.0, -3.0, -2.5], "reward/std": [0.5] * 3, "reward/val_mean": ["", -2.0, ""]}
    )
    write_metrics(two, {"reward/mean": [-4.5, -3.5, "nan", -1.0]})
    report([str(one), str(two)], output=str(tmp_path / "page.html"))
    page = opened(tmp_path / "page.html")
    page.draw_all()
    plot = page.page.locator(".plot").first

    def told_at(step: float) -> Any:
        x = plot.evaluate(
            "(plot, step) => Chart.getChart(plot.firstChild).scales.x.getPixelForValue(step)", step
        )
        plot.hover(position={"x": x, "y": 80})
        return plot.evaluate(
            """(plot) => { const { title, body } = Chart.getChart(plot.firstChild).tooltip;
                 return [...title, ...body.flatMap((item) => item.lines)]; }"""
        )

    assert told_at(1.1) == ["iteration 1", "one: −4", "two: −4.50"]
    assert told_at(1.9) == ["iteration 2", "one: −3", "one, held-out problems: −2", "two: −3.50"]
    assert told_at(3) == ["iteration 3", "one: −2.50"]
    assert told_at(4) == ["iteration 4", "two: −1"]


@pytest.mark.full
def test_phases_of_a_long_run_are_stacked_and_each_can_be_hidden(tmp_path: Path, opened: Any) -> None:
    report([str(synthetic_run(tmp_path / "run", num_steps=1000))])
    page = opened(tmp_path / "run" / "report.html")
    page.draw_all()
    plot = page.page.locator("figure", has_text="Time of an iteration").locator(".plot")
    for phase in range(4):  # of 2 seconds each
        assert page.painted(plot, f"--phase-{phase}") > 0.05
    box = plot.evaluate("(plot) => Chart.getChart(plot.firstChild).legend.legendHitBoxes[1]")
    plot.click(position={"x": box["left"] + 5, "y": box["top"] + 5})
    assert page.painted(plot, "--phase-1") < 0.005  # its mark in the legend
    assert page.painted(plot, "--phase-2") > 0.05


def test_the_chart_library_is_the_one_that_the_docs_name() -> None:
    folder = ROOT / "rlt_lightning" / "report" / "web" / "chartjs"
    library = (folder / "chart.umd.min.js").read_bytes()
    docs = (ROOT / "docs" / "report.md").read_text()
    assert hashlib.sha256(library).hexdigest() in docs
    version = re.search(rb"Chart\.js v([\d.]+)\n", library)
    assert version
    assert f"Chart.js {version[1].decode()}" in docs
    assert b"</script" not in library.lower()
    for name in ("LICENSE.md", "LICENSE.color.md"):  # of Chart.js and of @kurkle/color inside it
        assert "Permission is hereby granted" in (folder / name).read_text()


@pytest.mark.full
def test_typical_largest_and_smallest_stand_side_by_side(tmp_path: Path, opened: Any) -> None:
    report([str(synthetic_run(tmp_path / "run"))])
    page = opened(tmp_path / "run" / "report.html").page
    headings = ["Typical, first time", "Typical, last time", "Largest reward", "Smallest reward"]
    assert page.locator(".card h3").all_inner_texts() == headings
    assert "need not be the best explanation" in page.locator("section", has_text="side by side").inner_text()
    first = page.locator("section .label + .text").first.inner_text()
    page.get_by_role("button", name="Next", exact=True).click()
    assert page.locator("section .label + .text").first.inner_text() != first
    write_rows(tmp_path / "once" / "rollouts.jsonl", [completion(1, 0, n, -1.0 - n) for n in range(3)])
    report([str(tmp_path / "once")])
    page = opened(tmp_path / "once" / "report.html").page
    assert page.get_by_text("Every problem was met once").count() == 1
    assert page.locator(".card h3").all_inner_texts() == ["Typical", "Largest reward", "Smallest reward"]


def test_kinds_filter_the_list_and_mark_it(tmp_path: Path, opened: Any) -> None:
    rewards = {1: {"leap": 0.0, "filler": -1.0}, 2: {"steps": -0.5, "leap": -0.2, "filler": -2.0}}
    report([str(write_chains(tmp_path, rewards))])
    page = opened(tmp_path / "report.html")
    assert page.shown() == [2, 3, 4, 0, 1]  # the last iteration first, whatever the reward
    first = page.page.locator(".row").first.inner_text()
    assert "steps" in first
    assert "✓ right answer" in first
    assert "+0.400 from its group's mean" in first
    page.set("Kind", "leap")
    assert page.shown() == [3, 0]
    page.set("Answer", "wrong")
    assert page.shown() == []
    page.page.get_by_text("Clear filters").click()
    page.set("Answer", "wrong")
    assert page.shown() == [4, 1]


def test_print_shows_every_chart_in_light_colours(tmp_path: Path, opened: Any) -> None:
    run = synthetic_run(tmp_path / "run")
    lines = (run / "metrics.csv").read_text().splitlines()
    folded_metric = [f"{line},{'perf/mfu' if i == 0 else 0.5}" for i, line in enumerate(lines)]
    (run / "metrics.csv").write_text("\n".join(folded_metric) + "\n")
    report([str(run)])
    page = opened(run / "report.html", scheme="dark").page
    missing = (
        "[...document.querySelectorAll('.plot')].filter((plot) => !Chart.getChart(plot.firstChild)).length"
    )
    folded = page.locator("details.print .plot").count()
    assert folded > 0
    assert page.evaluate(missing) == folded  # those in sight need no scrolling
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(missing) == 0
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("details.print[open]").count() == 0


def test_plots_of_a_row_stand_in_a_line_and_hold_their_lines(tmp_path: Path, opened: Any) -> None:
    run = synthetic_run(tmp_path / "run")
    report([str(run)])
    page = opened(run / "report.html").page
    tops = page.locator(".charts .chart").evaluate_all(
        """(cards) => cards.map((card) => [card, card.querySelector('.plot')]
             .map((node) => Math.round(node.getBoundingClientRect().top)))"""
    )
    rows = {card for card, _ in tops}
    assert len(rows) < len(tops)  # several stand in a row
    assert len(set(map(tuple, tops))) == len(rows)
    outside = page.evaluate(
        """() => Object.values(Chart.instances).filter((chart) => chart.config.type === 'line')
             .flatMap(({ data, scales }) => data.datasets.flatMap((line) => line.data)
             .filter(({ y }) => y < scales.y.min || y > scales.y.max))"""
    )
    assert outside == []


@pytest.mark.full
def test_groups_and_evaluations_are_drawn_and_nothing_else(tmp_path: Path, opened: Any) -> None:
    ranked, tested = tmp_path / "ranked", tmp_path / "tested"
    ranked.mkdir()
    tested.mkdir()
    groups = [
        {"group": i, "file": "f", "num_rows": 4, "reward": -i, "solution_log_prob_reward": -i / 2}
        | {"kl_reward": -i / 2, "format_reward": 0.0, "reward_min": -i - 0.4, "reward_max": -i + 0.4}
        for i in range(1, 17)
    ]
    (ranked / "groups.json").write_text(json.dumps(groups))
    found = {
        "num_problems": 500,
        "num_samples": 2,
        "pass_at_1": 0.75,
        "standard_error": 0.02,
        "pass_at_k": 0.8,
    }
    found |= {"maj_at_k": 0.76, "formatted_frac": 1.0, "timed_out_frac": 0.0, "title": "MATH-500"}
    found |= {"pass_at": {"1": 0.75, "2": 0.8}}
    summary = {"model": "m", "sets": {"math500": found}, "overall": None}
    (tested / "evaluation.json").write_text(json.dumps(summary))
    write_metrics(tested, {"eval/math500/pass_at_1": [0.75]})
    report([str(ranked)])
    report([str(tested)])
    page = opened(ranked / "report.html")
    page.draw_all()
    assert page.page.locator("h2").all_inner_texts() == ["What the run did", "Groups by reward"]
    lines = page.page.locator(".plot").evaluate(
        "(plot) => Chart.getChart(plot.firstChild).data.datasets.map((line) => line.data.length)"
    )
    assert lines == [16] * 3  # reward and two terms; the band comes by its button
    page = opened(tested / "report.html")
    page.draw_all()
    assert page.page.locator("h2").all_inner_texts() == ["What the run did", "Evaluation"]
    assert page.page.get_by_text("The model m was evaluated on MATH-500.").count() == 1
    assert page.page.get_by_text("What changed").count() == 0  # one figure has no change
    accuracy = page.page.locator(".plot").first
    bar = accuracy.evaluate("(plot) => Chart.getChart(plot.firstChild).data.datasets[0]")
    assert (bar["data"], bar["errors"]) == ([75], [2])
    assert page.painted(accuracy, "--run-0") > 0.2
    with_error = page.painted(accuracy, "--fg")
    accuracy.evaluate(
        """(plot) => { const chart = Chart.getChart(plot.firstChild);
             chart.data.datasets[0].errors = [null]; chart.update(); }"""
    )
    assert page.painted(accuracy, "--fg") < with_error
    assert page.page.get_by_role("cell", name="75.0 ± 2.0").count() == 1
    assert page.page.get_by_text("RLT-32B-1K").count() == 1  # the paper's table


@pytest.mark.full
def test_ten_thousand_completions_stay_quick(tmp_path: Path, opened: Any) -> None:
    rows = [
        completion(
            1 + i // 64, (i // 16) % 500, i % 16, math.sin(i), explanation=f"{i} " + "words of it " * 80
        )
        for i in range(10_050)
    ]
    write_rows(tmp_path / "rollouts.jsonl", rows)
    report([str(tmp_path)])
    page = opened(tmp_path / "report.html")
    assert page.page.get_by_text("10,000 of 10,000 completions").count() == 1
    assert page.page.get_by_text("10,000 of the 10,050 completions in rollouts.jsonl").count() == 1
    assert page.page.locator(".row").count() == 20  # a page of them, not all
    assert page.page.evaluate("document.querySelectorAll('*').length") < 5000
    page.set("Sort by", "problem")
    page.set("Text of explanation, question or solution", "10049 words")
    assert page.page.locator(".row").count() == 1


def violations(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found if v["impact"] in ("serious", "critical")
    ]


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(scheme: str, tmp_path: Path, opened: Any) -> None:
    runs = [str(synthetic_run(tmp_path / name)) for name in ("one", "two")]
    report(runs, output=str(tmp_path / "page.html"))
    page = opened(tmp_path / "page.html", scheme=scheme)
    page.draw_all()
    page.page.locator(".row").first.click()
    assert violations(page.page) == []
    levels = page.page.locator("h1, h2, h3, h4").evaluate_all(
        "(all) => all.map((one) => Number(one.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    label = page.page.locator(".plot").first.get_attribute("aria-label")
    assert label.startswith(
        "Reward, nats by iteration. one: −4.90 at 1, −4.40 at 6; least −4.90, largest −4.40."
    )
    table = page.page.locator(".chart table").first.inner_text().split()
    assert "−4.90" in table


@pytest.mark.full
def test_the_theme_follows_the_system_and_the_button(tmp_path: Path, opened: Any) -> None:
    report([str(synthetic_run(tmp_path / "run"))])
    page = opened(tmp_path / "run" / "report.html", scheme="dark")
    page.draw_all()

    def looks() -> tuple[str, str]:
        background = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        plot = page.page.locator(".plot").first
        assert page.painted(plot, "--fg") > 0.001  # the numbers at the axes
        return background, plot.evaluate(
            "(plot) => Chart.getChart(plot.firstChild).scales.x.options.ticks.color"
        )

    dark = looks()
    page.page.get_by_role("button", name="Light theme").click()
    light = looks()
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    page.page.reload()
    assert page.page.evaluate("document.documentElement.dataset.theme") == "light"  # it is remembered


@pytest.mark.full
def test_a_phone_shows_all_without_scrolling_sideways(tmp_path: Path, opened: Any) -> None:
    runs = [str(synthetic_run(tmp_path / ("a-run-with-quite-a-long-name" * 3 + name))) for name in ("1", "2")]
    report(runs, output=str(tmp_path / "page.html"))
    page = opened(tmp_path / "page.html", width=390)
    page.draw_all()
    page.page.locator(".row", has_text="with tokens").first.click()
    assert page.overflow() == 0
    page.page.locator(".list .detail .t").nth(2).click()  # a tap tells a token's figure
    assert "KL 5.25 nats" in page.page.locator("#tip").inner_text()
    box = page.page.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
