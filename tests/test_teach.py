"""`rlt teach`: the tokens of `rlt predict`, what the student makes of them, and every way to ask."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from browser import chromium
from commands import rlt
from fake_worker import FakeWorker, worker_of
from test_vllm_worker import EXECUTABLE, LAUNCH, forked_vllm

from rlt_lightning.cli.parser import split_words
from rlt_lightning.cli.shared_settings import find_settings
from rlt_lightning.engines import Launch
from rlt_lightning.engines.launch import LocalServer, find_free_port
from rlt_lightning.models.format import ModelFormat, write_format
from rlt_lightning.pretrained import load_model, load_tokenizer
from rlt_lightning.scoring.teach import (
    ExplainedProblem,
    TeachOptions,
    build_heading,
    group_copies,
    read_problem,
)
from rlt_lightning.scoring.text import Terminal, fold_after, fold_texts, format_probability, shade_tokens
from rlt_lightning.tags import R1
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.types import InputError

ROWS = EMBEDDED["chains"](4, 9, "train")
FORMAT = ["--data.tags=r1", "--data.teacher_system_prompt=", "--data.student_system_prompt="]
SEED, NUMBER = 5, 3
DATA = {"source": "chains", "split": "train", "num_embedded_rows": 5, "seed": 0, "max_rows": None}


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose row 3 is its second: line 2 is blank."""
    path = tmp_path_factory.mktemp("source") / "rows.jsonl"
    lines = [json.dumps({"question": row["question"], "solution": row["solution"]}) for row in ROWS]
    path.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    return path


@pytest.fixture(scope="module")
def run(miniature: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `rlt predict` wrote about that file, with the teacher's folder beside it, as after `rlt fit`."""
    folder = tmp_path_factory.mktemp("run") / "run"
    options = ["--config=configs/miniature_generate.yaml", f"--data.source={source}", f"--seed={SEED}"]
    options += [f"--model.teacher={miniature}", "--data.prompts_per_step=1", "--rollouts.num_traces=2"]
    result = rlt("predict", *options, f"--output_dir={folder}")
    assert result.returncode == 0, result.stderr
    shutil.copytree(miniature, folder / "model")
    return folder


@pytest.fixture(scope="module")
def predicted(run: Path) -> list[dict[str, Any]]:
    """The traces of row 3."""
    return [row for row in read((run / "traces.jsonl").read_text()) if row["row"] == NUMBER]


def require_same(found: dict[str, Any], expected: dict[str, Any], bound: float = 1e-6) -> None:
    """Every column of a row of traces.jsonl; the models' names may differ.

    A forward of other rows rounds otherwise, so figures of a run with several problems in a batch have a
    wider bound.
    """
    for name, value in expected.items():
        if name != "teacher":
            assert found[name] == (pytest.approx(value, abs=bound) if isinstance(value, float) else value), (
                name
            )


def teach(*options: str, text: str = "") -> list[dict[str, Any]]:
    result = rlt("teach", *options, "--json=true", text=text)
    assert result.returncode == 0, result.stderr
    return read(result.stdout)


@pytest.fixture(scope="module")
def taught(run: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Row 3 by the run's teacher: two explanations as JSON, and as a page."""
    page = tmp_path_factory.mktemp("page") / "page.html"
    rows = teach(
        str(run), f"--file={source}", f"--row={NUMBER}", f"--seed={SEED}", "--num=2", f"--html={page}"
    )
    return {"rows": rows, "page": page}


# The same as predict


def test_a_run_explains_row_3_as_predict_does(taught: dict[str, Any], predicted: list[Any]) -> None:
    assert len(taught["rows"]) == len(predicted) == 2
    for found, expected in zip(taught["rows"], predicted, strict=True):
        require_same(found, expected)
        # The tokens that the reward counts are those of the text.
        assert "".join(found["thought_tokens"]).strip() == expected["reasoning_trace"]
        assert sum(found["solution_log_probs"]) == pytest.approx(found["student_log_prob_after"], abs=1e-5)


def test_a_piped_object_is_row_1_of_a_file_and_leaves_no_folder(run: Path, miniature: str) -> None:
    before = set(Path("runs").glob("*"))
    row = {name: ROWS[0][name] for name in ("question", "solution")}
    config = ["--config", "configs/miniature_generate.yaml", "--seed", str(SEED), "--num", "2"]
    found, _ = teach(miniature, *config, text=json.dumps(row))
    require_same(found, read((run / "traces.jsonl").read_text())[0])
    assert found["teacher"] == miniature
    assert set(Path("runs").glob("*")) == before


@pytest.mark.full
def test_arguments_and_sources_give_what_predict_gives(run: Path, source: Path, miniature: str) -> None:
    first = read((run / "traces.jsonl").read_text())[0]
    own = [f"--question={ROWS[0]['question']}", f"--solution={ROWS[0]['solution']}"]
    twice = [f"--seed={SEED}", "--num=2"]
    found, _ = teach(str(run), *own, *twice)
    require_same(found, first)
    # The run's own source, without --file.
    found, _ = teach(str(run), "--row=1", *twice)
    require_same(found, first)
    plain, _ = teach(str(run), own[0], *twice, text=ROWS[0]["solution"])
    require_same(plain, first)
    [other] = teach(str(run), *own, "--seed=6", "--temperature=1.5", "--max_tokens=7")
    assert other["num_tokens"] <= 7
    # A bare folder is its own student.
    alone, _ = teach(str(run / "model"), *FORMAT, *own, *twice, "--max_tokens=48")
    require_same(alone, first)
    assert alone["teacher"] == str(run / "model")


@pytest.mark.full
def test_an_embedded_source_gives_what_predict_gives(run: Path, miniature: str, tmp_path: Path) -> None:
    options = ["--config=configs/miniature_generate.yaml", "--data.num_embedded_rows=4"]
    result = rlt("predict", *options, f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    expected = read((tmp_path / "run" / "traces.jsonl").read_text())[2]
    require_same(teach(*options, "--row=3")[0], expected, 1e-5)


@pytest.mark.full
def test_a_trained_run_brings_its_settings(miniature: str, tmp_path: Path) -> None:
    """Of stage 1 and of stage 2, as `rlt fit` leaves them."""
    warmed, trained = tmp_path / "warm", tmp_path / "trained"
    few = ["--trainer.max_steps=1", "--data.num_embedded_rows=64", "--data.prompts_per_step=2"]
    result = rlt("fit", "--config=configs/miniature_warmup.yaml", *few, f"--output_dir={warmed}")
    assert result.returncode == 0, result.stderr
    config = ["--config=configs/quickstart.yaml", f"--model.teacher={warmed / 'model'}"]
    result = rlt("fit", *config, *few, "--rollouts.seed=4", f"--output_dir={trained}")
    assert result.returncode == 0, result.stderr
    for run, seed in ((warmed, 0), (trained, 4)):
        options = [f"--model.teacher={run / 'model'}", "--model.student=miniature", f"--rollouts.seed={seed}"]
        options += ["--data.source=chains", "--data.num_embedded_rows=64", "--data.seed=1"]
        config = ["--config=configs/miniature_generate.yaml", *options]
        result = rlt("predict", *config, f"--output_dir={run / 'predicted'}", "--data.max_rows=2")
        assert result.returncode == 0, result.stderr
        expected = read((run / "predicted" / "traces.jsonl").read_text())[1]
        limit = ["--max_tokens=48", "--data.seed=1", "--data.num_embedded_rows=64"]
        [found] = teach(str(run), "--file=chains", "--row=2", *limit)
        require_same(found, expected, 1e-5)
    shutil.rmtree(trained / "model")
    with pytest.raises(InputError, match=r"has none\. Make it from a checkpoint: rlt export --ckpt_path"):
        find_settings(str(trained))


@pytest.mark.full
def test_a_bespoke_stratos_row_is_explained(shared: Path, tiny_model: str) -> None:
    path = shared / "data" / "bespoke_stratos_rows" / "true_rows.json"
    [row] = teach(tiny_model, f"--file={path}", "--row=2", "--max_tokens=8")
    given = json.loads(path.read_text())[1]
    assert row["question"] == given["conversations"][0]["value"]
    assert row["system"] == given["system"]


def test_a_recorded_teacher_without_its_run_has_no_student(miniature: str, run: Path, tmp_path: Path) -> None:
    # A folder model/ in a run is that run's.
    assert find_settings(str(run / "model"))["data"] == find_settings(str(run))["data"]
    folder = tmp_path / "moved"
    shutil.copytree(miniature, folder)
    assert find_settings(str(folder))["model"]["init_args"]["student"] == str(folder)
    write_format(ModelFormat("teacher", R1, ""), folder)
    assert find_settings(str(folder))["model"]["init_args"]["student"] is None
    # Tags and prompts are those of its training.
    [row] = teach(str(folder), "--question=1?", "--solution=1", "--max_tokens=4")
    assert "reward" not in row


# What the student makes of it


def slow_log_probs(miniature: str, question: str, thought: str, solution: str) -> torch.Tensor:
    """The student's log-probs of the solution at temperature 0.7, from the text as a student writes it."""
    model, tokenizer = load_model(miniature, attn_implementation="eager"), load_tokenizer(miniature)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    before = f"{chat}<think>\n{thought}\n</think>\n\n<solution>\n"
    start = len(tokenizer(before, add_special_tokens=False).input_ids)
    ids = torch.tensor([tokenizer(before + solution, add_special_tokens=False).input_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, start - 1 : -1]
    return (logits / 0.7).log_softmax(-1).gather(1, ids[0, start:, None]).squeeze(1)


def test_before_and_after_are_those_of_a_slow_computation(taught: dict[str, Any], miniature: str) -> None:
    row = taught["rows"][0]
    before = slow_log_probs(miniature, row["question"], "", row["solution"])
    after = slow_log_probs(miniature, row["question"], row["reasoning_trace"], row["solution"])
    for name, values in (("before", before), ("after", after)):
        assert row[f"student_log_prob_{name}"] == pytest.approx(float(values.sum()), abs=1e-4)
        mean = float(values.sum()) / len(values)
        assert row[f"student_prob_{name}"] == pytest.approx(2.718281828**mean, abs=1e-5)
    assert row["solution_log_probs"] == pytest.approx(after.tolist(), abs=1e-4)


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*)</script>', page.read_text())
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_page_has_the_tokens_and_both_probabilities(taught: dict[str, Any]) -> None:
    completions = data_of(taught["page"])["completions"]
    for number, row in enumerate(taught["rows"]):
        tokens = completions["tokens"][str(number)]
        assert tokens["thought_tokens"] == row["thought_tokens"]
        assert tokens["thought_kl"] == pytest.approx(row["thought_kl"], abs=1e-4)
        assert tokens["solution_tokens"] == row["solution_tokens"]
        assert completions["terms"]["student_prob_after"][number] == pytest.approx(
            row["student_prob_after"], rel=1e-5
        )
    assert completions["labels"]["student_prob_before"] == "student's p before"


@pytest.mark.full
def test_a_browser_shows_the_page(taught: dict[str, Any]) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.goto(taught["page"].as_uri())
        text = page.inner_text("body")
    assert "The student's probability of the whole solution: 0." in text
    assert "only the last digit is kept" in text
    assert "Sample 1 of 2" in text
    assert taught["rows"][0]["reasoning_trace"] in text.replace("\n", "")


def test_the_text_says_what_the_best_is_worth(run: Path, source: Path, taught: dict[str, Any]) -> None:
    options = [f"--file={source}", f"--row={NUMBER}", f"--seed={SEED}", "--num=2", "--top=1"]
    result = rlt("teach", str(run), *options)
    assert result.returncode == 0, result.stderr
    text, rows = result.stdout, taught["rows"]
    best = max(range(2), key=lambda i: rows[i]["reward"])
    assert f"Question: {rows[0]['question']}\n  A last-digit chain: of every result only the last" in text
    assert f"\nSolution: {rows[0]['solution']}\n" in text
    for number, row in enumerate(rows):
        mark = "; largest reward" if number == best else ""
        line = rf"Sample {number + 1} of 2{mark} \(reward {re.escape(format(row['reward'], '+.4f'))}, .*:"
        assert re.search(line, text), line
        assert row["reasoning_trace"] in text
    chosen = rows[best]
    log_probs = [chosen[f"student_log_prob_{name}"] for name in ("before", "after")]
    for figures, words in (
        ([format_probability(value) for value in log_probs], "product over 3 tokens"),
        ([f"{value:.4f}" for value in log_probs], "its logarithm, nats"),
        (
            [f"{chosen[f'student_prob_{name}']:.4f}" for name in ("before", "after")],
            "geometric mean of a token",
        ),
    ):
        assert f"  {figures[0]:>9} -> {figures[1]:<9}  {words}\n" in text
    assert f"reward      {chosen['reward']:+.4f}\n" in text
    place = max(range(len(chosen["thought_kl"])), key=chosen["thought_kl"].__getitem__)
    assert f'{chosen["thought_kl"][place]:.4f}  "{chosen["thought_tokens"][place]}"' in text
    assert "\x1b" not in text  # no terminal


# Without a student, and with other rewards


REWARD = """
import torch
from rlt_lightning.modules.text_reward import TextReward
from rlt_lightning.types import RewardTerms

class Short(TextReward):
    def __call__(self, rollouts, tags):
        return RewardTerms(torch.tensor([-float(len(r.text)) for r in rollouts]))
"""


@pytest.mark.full
def test_a_teacher_explains_without_a_student(run: Path, tmp_path: Path) -> None:
    own = ["--row=1", f"--seed={SEED}", "--model.student=null"]
    first = read((run / "traces.jsonl").read_text())[0]
    files = [f"--html={tmp_path / 'page.html'}", f"--json={tmp_path / 'row.jsonl'}"]
    result = rlt("teach", str(run), *own, *files)
    assert result.returncode == 0, result.stderr
    assert "frozen student" not in result.stderr
    assert "Without a student (model.student null) there is no reward." in result.stdout
    assert first["reasoning_trace"] in result.stdout
    [row] = read((tmp_path / "row.jsonl").read_text())
    assert row["reasoning_trace"] == first["reasoning_trace"]
    assert "reward" not in row
    assert data_of(tmp_path / "page.html")["completions"]["text"] == [first["reasoning_trace"]]
    assert rlt("teach", str(run), *own, files[1]).returncode == 0
    assert len(read((tmp_path / "row.jsonl").read_text())) == 2  # added, nothing lost
    # A reward of the user's own that asks no student.
    (tmp_path / "short.py").write_text(REWARD)
    result = rlt("teach", str(run), *own, "--model.reward=short.Short", PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert f"reward  -{len(first['reasoning_trace'])}.0000" in result.stdout


# What may be piped in, and mistakes


class Pipe(io.StringIO):
    """Standard input; a terminal that holds text fails if it is read."""

    def __init__(self, text: str, terminal: bool = False) -> None:
        super().__init__(text)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


OBJECT = {"question": "1 + 1?", "solution": "2"}


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({}, json.dumps(OBJECT), OBJECT),
        ({}, json.dumps(OBJECT | {"answer": "2"}), OBJECT | {"answer": "2"}),
        ({"solution": "3"}, json.dumps(OBJECT), OBJECT | {"solution": "3"}),
        ({"solution": "2"}, " 1 + 1?\n", OBJECT),
        ({"question": "1 + 1?"}, "2\n", OBJECT),  # JSON too, but no object
        ({"question": "1 + 1?"}, "{a}", OBJECT | {"solution": "{a}"}),
        (OBJECT, "not read", OBJECT),
    ],
)
def test_standard_input_is_an_object_or_what_is_missing(
    options: dict[str, str], text: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(text))
    assert read_problem(TeachOptions(**options), DATA) == (1, expected)


@pytest.mark.parametrize(
    ("options", "text", "terminal", "message"),
    [
        (
            {},
            "",
            True,
            "has no question. Give --question '…' --solution '…', or --file FILE --row N, or pipe",
        ),
        ({"question": "Why?"}, "", True, "has no solution. Give --question"),
        ({"question": "Why?"}, " \n", False, "has no solution"),
        ({}, "2 + 2?", False, "JSON object with question and solution, or plain text beside"),
        ({}, "[1]", False, r"must be a JSON object with question and solution, but is \[1\]"),
        ({}, '{"question": "Why?"}', False, "the row lacks solution"),
        ({}, '{"question": 3, "solution": "2"}', False, "question must be text, but is int"),
        ({"question": " ", "solution": "2"}, "", True, "the question has no text"),
        ({"question": "Why?", "solution": "\udcff"}, "", True, "half a surrogate pair"),
        ({"file": "chains", "row": 6}, "", True, "1 to 5, but is 6"),
        ({"file": "no/such.jsonl"}, "", True, "'no/such.jsonl' must exist, but does not"),
    ],
)
def test_a_problem_that_is_missing_is_one_clear_line(
    options: dict[str, Any], text: str, terminal: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe("must not be read" if terminal else text, terminal))
    data = DATA | ({"source": options["file"]} if "file" in options else {})
    with pytest.raises(InputError, match=message):
        read_problem(TeachOptions(**options), data)


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(InputError, match="Either --file and --row name the problem"):
        TeachOptions(question="Why?", file="rows.jsonl")
    with pytest.raises(InputError, match="--num must be at least 1, but is 0"):
        TeachOptions(num=0)
    with pytest.raises(InputError, match="--url must be an address"):
        TeachOptions(url="localhost:8000")


def test_run_of_a_script_explains_and_names_what_it_lacks(
    miniature: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(miniature, tmp_path / "model")
    write_format(ModelFormat("teacher", R1, ""), tmp_path / "model")
    (tmp_path / "metrics.csv").write_text("step\n1\n")
    settings = find_settings(str(tmp_path))
    assert settings["model"]["init_args"] == {"teacher": str(tmp_path / "model"), "student": None}
    assert "has no config.yaml, since a script made it" in capsys.readouterr().err
    [row] = teach(
        str(tmp_path), "--model.student=miniature", "--question=1?", "--solution=1", "--max_tokens=4"
    )
    assert row["reward"] < 0


def test_a_teacher_that_is_none_is_one_clear_line(run: Path, tmp_path: Path) -> None:
    for name, message in (
        (tmp_path / "nothing", "folder '.*nothing' must exist, but does not"),
        (tmp_path, "must be a run, with config.yaml and model/, or a model folder, with config.json"),
    ):
        with pytest.raises(InputError, match=message):
            find_settings(str(name))
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(InputError, match=r"must be the config.yaml of a run of rlt fit, but is not"):
        find_settings(str(tmp_path))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(InputError, match=r"must have a model/, but has none. .* rlt export --ckpt_path"):
        find_settings(str(tmp_path))
    for task in ("student_rl", "student_opd"):
        settings["data"]["init_args"]["task"] = task
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        with pytest.raises(InputError, match=r"has trained a student, .* To ask it: vllm serve"):
            find_settings(str(tmp_path))


def test_words_without_an_option_are_told_from_values() -> None:
    words = ["RUN", "--question", "Why?", "--solution=-x + 1", "--row", "-1"]
    options = [("--question", "Why?"), ("--solution=-x + 1",), ("--row", "-1")]
    assert split_words(words) == (["RUN"], options)


@pytest.mark.full
def test_mistakes_of_the_command_line_are_one_line(run: Path, tmp_path: Path) -> None:
    own = ["--question=Why?", "--solution=null"]  # a text, not YAML's null
    long = tmp_path / "rows.jsonl"
    long.write_text("\n" + json.dumps({"question": "add 1, " * 400, "solution": "4"}) + "\n{}\n")
    sft = "--config=configs/student_sft.yaml"
    for options, message in (
        (own, "rlt teach needs a teacher: rlt teach RUN_OR_FOLDER --question '…' --solution '…'. It is a"),
        ([str(run), "Why?"], "takes one teacher, but got"),
        ([str(run), f"--file={long}", "--row=2"], "leave room for an explanation, but with their prompts"),
        (
            [str(run), f"--file={long}", "--row=3"],
            "Row 3 of .*rows.jsonl must have question and solution, or conv.* but lacks q",
        ),
        ([str(run), *own, "--data.max_prompt_length=5"], r"The problem cannot be used: \d+ tokens, limit 5"),
        ([str(run), *own, "--url=http://127.0.0.1:1"], "http://127.0.0.1:1: GET /v1/models failed"),
        ([str(run), *own, f"--html={run / 'config.yaml'}"], "config.yaml is there and is no report"),
        ([str(run), *own, f"--json={tmp_path / 'no' / 'row'}"], "must lie in a folder that exists"),
        ([sft, *own], "needs model.class_path rlt_lightning.modules.RLTModule, but it is"),
    ):
        result = rlt("teach", *options)
        assert result.returncode == 2, options
        assert re.search(message, result.stderr.splitlines()[-1]), (options, result.stderr)
        assert "Traceback" not in result.stderr
    assert rlt("teach", "--help").stdout.startswith("usage: rlt teach RUN_OR_FOLDER ")


# The terminal


def test_lines_are_folded_at_spaces_and_keep_their_tokens() -> None:
    tokens = ["one two", " three", " four", "\nfive sixsevenseven", " e"]
    found = fold_texts(tokens, Terminal(columns=9))
    assert "".join(found) == "one two\nthree\nfour\nfive\nsixsevenseven\ne"
    assert [len(text) for text in found] == [len(text) for text in tokens]
    assert fold_texts(tokens, Terminal()) == tokens
    assert shade_tokens(["a b", " c"], [3.0, 0.0], Terminal(True, 3)) == "\x1b[30m\x1b[48;5;215ma b\x1b[0m\nc"


def test_words_hang_below_their_label() -> None:
    assert fold_after("ab: ", "one two three", Terminal(columns=20)) == ["ab: one two three"]
    assert fold_after("ab: ", "one two three four", Terminal(columns=20)) == ["ab: one two three", "    four"]
    assert fold_after("ab: ", "one two three four", Terminal()) == ["ab: one two three four"]


def test_headings_and_probabilities_read_well() -> None:
    row = {"num_tokens": 3, "finish_reason": "length", "explanation": "a", "reward": -1.0}
    row |= {"student_log_prob_before": math.log(4.2e-7), "student_log_prob_after": math.log(0.25)}
    assert build_heading(row, [0], 1, True) == "Explanation (3 tokens, not closed):"
    figures = "reward -1.0000, the student's probability of the solution 4.2e-07 -> 0.2500, not closed"
    assert build_heading(row, [1], 3, True) == f"Sample 2 of 3; largest reward ({figures}):"
    assert build_heading(row, [0, 2], 3, False) == f"2 of 3 samples: 1, 3 ({figures}):"
    assert build_heading(row, [0, 1, 2], 3, True) == f"All 3 samples ({figures}):"
    rows = [{"explanation": text, "finish_reason": "stop", "num_tokens": 1} for text in "abaa"]
    assert group_copies([*rows, rows[0] | {"finish_reason": "length"}]) == [[0, 2, 3], [1], [4]]
    shown = [format_probability(log_prob) for log_prob in (0.0, -math.inf, math.log(1e-3), -7.0, -2000.0)]
    assert shown == ["1.0000", "0", "0.0010", "9.1e-04", "2.6e-869"]
    assert ExplainedProblem([{"reward": -2.0}, {"reward": -1.0}], None, [], None, "", None).best == 1  # type: ignore[arg-type]


# From a server


def test_a_server_that_reports_log_probs_needs_no_teacher_here(tiny_model: str) -> None:
    with FakeWorker(dev_mode=False) as worker:
        own = ["--question=Why?", "--solution=4", "--max_tokens=6", f"--url={worker.url}", f"--seed={SEED}"]
        result = rlt("teach", tiny_model, *FORMAT, *own, "--json=true")
    assert result.returncode == 0, result.stderr
    loading = f"loading {tiny_model} ({size(tiny_model)}) as float32: the frozen student"
    assert result.stderr.splitlines() == [loading, "cut after 6 tokens: --max_tokens"]
    [row] = read(result.stdout)
    [body] = worker.bodies
    assert body["seed"] == row["seed"]
    assert body["max_tokens"] == 6
    # The fake's log-probs are about -8.5 nats per token, so they are in the KL.
    assert row["kl_mean"] < 3


def size(model: str) -> str:
    return f"{(Path(model) / 'model.safetensors').stat().st_size / 1e6:.1f} MB"


@pytest.mark.full
def test_a_server_without_log_probs_has_the_teacher_loaded_if_it_is_needed(tiny_model: str) -> None:
    with worker_of(tiny_model, dev_mode=False, raw_log_probs=True) as worker:
        own = ["--question=Why?", "--solution=4", "--max_tokens=6", f"--url={worker.url}", *FORMAT]
        result = rlt("teach", tiny_model, *own)
        assert result.returncode == 0, result.stderr
        assert "since the server was not started with --logprobs-mode processed_logprobs" in result.stderr
        assert "the trained model" in result.stderr
        result = rlt("teach", tiny_model, *own, "--model.student=null")
        assert result.returncode == 0, result.stderr
        assert result.stderr.splitlines() == ["cut after 6 tokens: --max_tokens"]
    with FakeWorker(dev_mode=False) as worker:
        own[3] = f"--url={worker.url}"
        exact = rlt("teach", tiny_model, *own, "--model.reward.kl_estimator=exact")
        # It is verified, and made-up scores are not the teacher's.
        assert "reward.kl_estimator is exact" in exact.stderr
        assert "It serves another model" in exact.stderr


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vllm serve FOLDER --logprobs-mode processed_logprobs`, with no other route or extension: its URL."""
    port, folder = find_free_port(), tmp_path_factory.mktemp("server")
    launch = Launch(**LAUNCH | {"executable": forked_vllm(folder)})
    command = [launch.executable, "serve", tiny_model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs"]
    local = LocalServer(command, launch.environment, folder / "worker.log", dev_mode=False)
    local.start()
    yield f"http://127.0.0.1:{port}"
    local.stop()


@pytest.mark.vllm
@pytest.mark.skipif(not EXECUTABLE.exists(), reason="needs .venv-vllm: make setup-vllm")
def test_a_vllm_worker_gives_what_predict_gives_through_it(
    server: str, source: Path, tiny_model: str, tmp_path: Path
) -> None:
    models = [f"--model.teacher={tiny_model}", f"--model.student={tiny_model}", f"--seed={SEED}"]
    options = ["--config=configs/miniature_generate.yaml", *models, "--rollouts.num_traces=2"]
    options += ["--rollouts.engine=rlt_lightning.engines.VLLMEngine", f"--rollouts.engine.urls=[{server}]"]
    options += ["--rollouts.engine.push=rlt_lightning.engines.NoPush"]
    result = rlt("predict", *options, f"--data.source={source}", f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    expected = [row for row in read((tmp_path / "run" / "traces.jsonl").read_text()) if row["row"] == NUMBER]
    shutil.copytree(tiny_model, tmp_path / "run" / "model")
    asked = ["--num=2", f"--file={source}", f"--row={NUMBER}", f"--seed={SEED}", "--json=true"]
    result = rlt("teach", str(tmp_path / "run"), f"--url={server}", *asked)
    assert result.returncode == 0, result.stderr
    assert "the trained model" not in result.stderr  # its weights are at the server only
    found = read(result.stdout)
    assert len(found) == len(expected) == 2
    assert expected[0]["reasoning_trace"] != expected[1]["reasoning_trace"]
    for row, other in zip(found, expected, strict=True):
        for name in ("reasoning_trace", "num_tokens", "student_tokens", "seed", "finish_reason"):
            assert row[name] == other[name]
        assert row["reward"] == pytest.approx(other["reward"], abs=1e-4)
