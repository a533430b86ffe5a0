"""The paper's evaluation protocol: prompts, limits, its table and what is comparable; a user's own sets.

The expected user turns are those of SkyThought at 4bb8f3e, whose tasks `recipe_7b/evaluate_paper` repeats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, rlt
from fake_worker import FakeWorker
from rows_of import write_rows

from rlt_lightning.datamodules.evaluation_sets import SETS, build_set, read_set
from rlt_lightning.models.load import load_tokenizer

Row = dict[str, Any]
PAPER = ROOT / "configs" / "recipe_7b" / "evaluate_paper.yaml"
BOXED = "Return your final response within \\boxed{}. "
LETTERED = (
    "Return your final response within \\boxed{} and only include the letter choice (A, B, C, or D) as "
)
LETTERED += "your final response. "
# Rows in the columns in which the sets are published, with white space at the ends that the protocol keeps.
AIME = [
    {"id": 59, "problem": "Of 2023.", "solution": "7", "answer": "7", "url": "https://x/2023_AIME_II_1"},
    {"id": 60, "problem": " Find $n+{1}$.\n", "answer": "8", "url": "https://x/2024_AIME_I_1"},
]
MATH = [{"problem": "Is {question} in $\\{1\\}$? ", "answer": "2", "unique_id": "test/algebra/1.json"}]
GPQA = [
    {
        "Question": f"Which of {i}?\n",
        "Correct Answer": f"quokka {i}\n",
        "Incorrect Answer 1": f"wombat {i}",
        "Incorrect Answer 2": f" numbat {i}",
        "Incorrect Answer 3": f"dingo, {i}",
        "Record ID": f"rec{i}",
    }
    for i in range(6)
]
# random.shuffle orders options by 2, 0, 1, 3 and then by 0, 2, 3, 1 after random.seed(41).
TURNS = {
    "aime24": [BOXED + " Find $n+{1}$.\n"],
    "math500": [BOXED + "Is {question} in $\\{1\\}$? "],
    "gpqa_diamond": [
        LETTERED + "Which of 0?\n\nA)  numbat 0, B) quokka 0\n, C) wombat 0, D) dingo, 0",
        LETTERED + "Which of 1?\n\nA) quokka 1\n, B)  numbat 1, C) dingo, 1, D) wombat 1",
    ],
}
ROWS = {"aime24": AIME, "math500": MATH, "gpqa_diamond": GPQA}


def settings_of(name: str, source: str) -> Row:
    """A set of the shipped config, read from a file."""
    config = yaml.safe_load(PAPER.read_text())
    return config["data"]["init_args"]["sets"][name] | {"source": source}


# Prompts


@pytest.mark.parametrize("name", list(ROWS))
def test_the_user_turns_are_the_protocols(name: str, tmp_path: Path) -> None:
    questions = read_set(name, settings_of(name, write_rows(tmp_path / "rows.jsonl", ROWS[name])), None, 0)
    turns = TURNS[name]
    assert [question.question for question in questions[: len(turns)]] == turns
    if name == "gpqa_diamond":
        assert [q.reference["answer"] for q in questions[:2]] == ["B", "A"]


@pytest.mark.parametrize("name", ["aime24", "math500"])
def test_real_rows_are_asked_unchanged(name: str, shared: Path) -> None:
    path = shared / "data" / name / "test.jsonl"
    rows = [json.loads(line) for line in path.open()]
    questions = read_set(name, settings_of(name, str(path)), None, 0)
    assert [question.question for question in questions] == [BOXED + row["problem"] for row in rows]


# Runs


@pytest.fixture(scope="module")
def paper_run(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row], str]:
    """The shipped config with rows of files and a worker whose context is shorter than 32,768 tokens."""
    folder = tmp_path_factory.mktemp("protocol")
    config = yaml.safe_load(PAPER.read_text())
    sets = config["data"]["init_args"]["sets"]
    for name, rows in ROWS.items():
        sets[name]["source"] = write_rows(folder / f"{name}.jsonl", rows)
    (folder / "paper.yaml").write_text(yaml.safe_dump(config))
    with FakeWorker(dev_mode=False, endings=("length",)) as worker:
        init = f"{{urls: [{worker.url}], push: rlt_lightning.engines.NoPush}}"
        engine = f"{{class_path: rlt_lightning.engines.VLLMEngine, init_args: {init}}}"
        words = [f"--config={folder / 'paper.yaml'}", f"--model.pretrained={tiny_model}"]
        words += [f"--rollouts.engine={engine}", "--trainer.accelerator=cpu"]
        result = rlt("test", *words, f"--output_dir={folder / 'run'}")
    assert result.returncode == 0, result.stderr
    return folder / "run", worker.bodies, result.stdout + result.stderr


def test_the_paper_config_is_greedy_and_fills_the_context(paper_run: tuple[Path, list[Row], str]) -> None:
    folder, bodies, _ = paper_run
    rollouts = yaml.safe_load((folder / "config.yaml").read_text())["rollouts"]
    sampling = rollouts["sampling"]
    assert (sampling["temperature"], sampling["top_p"], rollouts["num_samples"]) == (0, 1, 1)
    assert sampling["max_completion_length"] == 32768
    assert len(bodies) == 1 + len(MATH) + len(GPQA)
    assert {body["temperature"] for body in bodies} == {0}
    assert {len(body["prompt"]) + body["max_tokens"] for body in bodies} == {2048}  # the worker's context


def test_what_the_model_reads_is_the_protocols_turn(paper_run: tuple[Path, list[Row], str]) -> None:
    sets = json.loads((paper_run[0] / "evaluation.json").read_text())["sets"]
    for name in ("aime24", "math500"):
        assert f"user\n{TURNS[name][0]}<|im_end|>" in sets[name]["prompt"]
    assert sets["gpqa_diamond"]["prompt"] is None


def test_a_response_ends_where_the_context_does(tiny_model: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    question = "one " * (2048 - 96)
    rows = [{"question": question, "answer": 1}, {"question": "one", "answer": 1}]
    words = ["--config=configs/recipe_7b/evaluate.yaml", f"--model.pretrained={tiny_model}"]
    words += [f"--data.sets={{mine: {write_rows(tmp_path / 'rows.jsonl', rows)}}}"]
    words += ["--data.student_system_prompt=", "--rollouts.sampling.max_completion_length=100"]
    words += ["--rollouts.fit_context=true", "--trainer.accelerator=cpu"]
    result = rlt("test", *words, f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert summary["rollouts"]["fit_context"]
    prompt = tokenizer(summary["sets"]["mine"]["prompt"], add_special_tokens=False)["input_ids"]
    records = [json.loads(line) for line in (tmp_path / "run" / "responses.jsonl").open()]
    assert [record["num_tokens"] for record in records] == [2048 - len(prompt), 100]
    assert [record["finish_reason"] for record in records] == ["length"] * 2


# Sets of one's own


def test_choices_and_countdown_of_ones_own(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GPQA)
    settings = {"source": path, "judge": "choice", "template": "{question} {options}!"}
    question = read_set("zoo", settings | {"separator": " / "}, None, 0)[0]
    letter = question.reference["answer"]
    assert question.question.startswith("Which of 0? A) ")
    assert f"{letter}) quokka 0" in question.question
    assert question.question.count(" / ") == 3
    assert not build_set("zoo", settings).private
    assert build_set("zoo", settings | {"private": True}).private
    # Without a template, the options are there all the same.
    assert "A) " in read_set("zoo", {"source": path, "judge": "choice"}, 1, 0)[0].question
    rows = [{"question": "Make 7.", "numbers": [3, 4], "target": 7}]
    source = write_rows(tmp_path / "numbers.jsonl", rows)
    own = {"source": source, "judge": "countdown", "template": "Go: {question}"}
    [question] = read_set("numbers", own, None, 0)
    assert question.question == "Go: Make 7."
    assert question.reference == {"kind": "countdown", "numbers": [3, 4], "target": 7}


def test_a_mapping_changes_only_the_fields_that_it_names(tmp_path: Path) -> None:
    changed = build_set("math500", {"template": "{question} Box it."})
    assert (changed.source, changed.title) == (SETS["math500"].source, "MATH-500")
    assert build_set("aime24", {"title": "AIME"}).split == "train"
    # The published split is that of the published source.
    assert build_set("aime24", {"source": "rows"}) == build_set("aime24", "rows")
    assert build_set("aime24", {"source": "rows"}).split == "test"


def test_gpqa_is_private_under_any_name() -> None:
    for name in ("gpqa_diamond", "science"):
        settings = {"source": "Idavidrein/gpqa:gpqa_main", "judge": "choice"}
        assert build_set(name, settings).private
    assert build_set("gpqa_diamond", "rows.jsonl").private


def test_where_comes_before_max_rows(tmp_path: Path) -> None:
    rows = [{"problem": f"{i}?", "answer": i, "level": i % 3} for i in range(12)]
    settings = {"source": write_rows(tmp_path / "rows.jsonl", rows), "where": {"level": "2"}}
    questions = read_set("levels", settings, 3, 0)
    assert [question.id for question in questions] == ["levels/3", "levels/6", "levels/9"]
