"""`rlt explain`: the reward of one explanation, given or sampled, by term and by token."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from browser import SCORED
from cases import full
from commands import rlt

from rlt_lightning.commands import explain as command
from rlt_lightning.commands.explain import (
    ExplainOptions,
    describe_worth,
    find_row,
    find_settings,
    list_caveats,
)
from rlt_lightning.datamodules import StudentOPDData, StudentRLData
from rlt_lightning.models.format import ModelFormat, write_format
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.rewards import CorrectnessReward, RLTReward
from rlt_lightning.tags import R1
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.types import InputError

DATA: dict[str, Any] = {"source": "arithmetic", "split": "train", "num_embedded_rows": 5, "seed": 0}
DATA |= {"max_rows": None, "trace_columns": ["reasoning_trace"]}
PROBLEM = EMBEDDED["chains"](4, 9, "train")[2]
SEED = 5


def explain(*options: str) -> str:
    result = rlt("explain", *options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def models(model: str) -> list[str]:
    return ["--config=tests/rlt.yaml", f"--model.teacher={model}", f"--model.student={model}"]


def numbers(text: str) -> dict[str, float]:
    """Reward and terms."""
    return {name: float(value) for name, value in re.findall(r"^ *(\w+) +([+-]\d+\.\d+)", text, re.M)}


def values(text: str) -> list[list[float]]:
    """The numbers of a table, by place of the token."""
    rows = re.findall(r"^ +(\d+)((?: +-?\d+\.\d+)+)  \"", text, re.M)
    return [list(map(float, cells.split())) for _, cells in sorted(rows, key=lambda row: int(row[0]))]


def explanation_in(text: str) -> str:
    return re.search(r"^Explanation: KL .*?\n(.*?)\n\n  token ", text, re.M | re.S)[1]  # type: ignore[index]


# A given explanation


@pytest.mark.parametrize("score_given", [full("true"), "false"])
def test_terms_and_tokens_are_those_of_predict(score_given: str, tiny_model: str, tmp_path: Path) -> None:
    reward = f"--model.reward.score_given={score_given}"
    prompts = ["--data.teacher_system_prompt=T", "--data.student_system_prompt=S"]
    scoring = [
        "--config=configs/recipe_7b/score.yaml",
        "--data.source=arithmetic",
        "--data.num_embedded_rows=3",
    ]
    scoring += ["--data.tags=r1", *prompts, "--scores.per_token=true", "--trainer.accelerator=cpu"]
    scoring += [f"--model.teacher={tiny_model}", f"--model.student={tiny_model}"]
    result = rlt("predict", *scoring, reward, f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    row = json.loads((tmp_path / "run" / "scores.jsonl").read_text().splitlines()[2])
    assert (row["thought_tokens"][0] == "\n") == (score_given == "true")
    text = explain(*models(tiny_model), reward, *prompts, "--row=3", "--top=0")
    found = numbers(text)
    assert found["reward"] == pytest.approx(row["reward"], abs=1e-4)
    assert found["solution"] == pytest.approx(row["solution_log_prob_reward"], abs=1e-4)
    assert found["kl"] == pytest.approx(row["kl_reward"], abs=1e-4)
    assert found["reward"] == pytest.approx(found["solution"] + found["kl"] + found["format"], abs=2e-4)
    explanation, solution = text.split("\nSolution: the student")
    kl = [cells[0] for cells in values(explanation)]
    assert kl == pytest.approx(row["thought_kl"], abs=1e-4)
    # The terms are those of the tokens: a mean, and a hundredth of the extreme one.
    assert found["kl"] == pytest.approx(-3 * (sum(kl) / len(kl) + 0.01 * max(kl)), abs=1e-3)
    log_probs = [cells[0] for cells in values(solution)]
    assert log_probs == pytest.approx(row["solution_log_probs"], abs=1e-4)
    mean = sum(log_probs) / len(log_probs)
    assert found["solution"] == pytest.approx(mean + 0.01 * min(log_probs), abs=1e-3)


def test_texts_need_no_row_and_leave_no_folder(tiny_model: str) -> None:
    own = ["--question=What is 2 + 2?", "--solution=null", "--explanation=Two and two."]  # not YAML's null
    before = set(Path("runs").glob("*"))
    text = explain(*models(tiny_model), *own, "--top=2")
    shown = f"teacher {tiny_model}, student {tiny_model}\n\nQuestion: What is 2 + 2?\nSolution: null\n"
    assert text.startswith(shown)
    assert explanation_in(text) == "Two and two."
    assert len(values(text.split("\nSolution: the student")[0])) == 2
    assert set(Path("runs").glob("*")) == before


def test_a_term_says_what_it_is_made_of() -> None:
    empty = SCORED | {"solution_log_prob_reward": -3.02, "solution_log_probs": [-4.0, -2.0]}
    parts = {"solution": -1.02, "kl": -1.48, "format": 0.0, "repetition": -0.25}
    plain = "\n".join(describe_worth(SCORED, empty, parts, RLTReward(), 1))
    # exp(-6) and exp(-2)
    assert "  0.002479 -> 0.1353 (-6.0000 -> -2.0000 nats), at temperature 0.7" in plain
    assert re.search(r"^  solution +-1\.0200  \S", plain, re.M)
    assert "  repetition  -0.2500" in plain
    assert '      2    1.5000  "a"' in plain
    assert "-0.2000" not in plain  # top 1
    assert "\x1b" not in plain  # a text cannot command the terminal


def test_caveats_stand_in_the_text_and_on_the_page(tiny_model: str, tmp_path: Path) -> None:
    caveats = list_caveats(RLTReward(clip_kl=1000.0), sampled=False)
    assert len(caveats) == 2
    options = [f"--html={tmp_path / 'page.html'}", "--model.reward.clip_kl=1000", "--row=1"]
    text = explain(*models(tiny_model), *options)
    page = (tmp_path / "page.html").read_text()
    for caveat in caveats:
        assert caveat in text
        assert caveat.replace("'", "&#x27;") in page


# An explanation that a teacher writes


@pytest.fixture(scope="module")
def run(miniature: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `rlt predict` wrote about a row, with the teacher's folder beside it, as after `rlt fit`."""
    folder = tmp_path_factory.mktemp("run")
    row = {name: PROBLEM[name] for name in ("question", "solution")}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    options = ["--config=configs/laptop/generate.yaml", f"--data.source={folder / 'rows.jsonl'}"]
    options += [f"--model.teacher={miniature}", f"--seed={SEED}", f"--output_dir={folder / 'run'}"]
    result = rlt("predict", *options)
    assert result.returncode == 0, result.stderr
    shutil.copytree(miniature, folder / "run" / "model")
    return folder / "run"


@pytest.fixture(scope="module")
def sampled(run: Path) -> str:
    return explain(str(run), "--row=1", f"--seed={SEED}", "--top=0", f"--html={run / 'page.html'}")


def test_a_teacher_samples_what_predict_samples(sampled: str, run: Path) -> None:
    [row] = [json.loads(line) for line in (run / "traces.jsonl").open()]
    assert explanation_in(sampled) == row["reasoning_trace"]
    assert numbers(sampled)["reward"] == pytest.approx(row["reward"], abs=1e-4)
    assert row["reasoning_trace"] in re.sub("<.*?>", "", (run / "page.html").read_text())


def test_sampled_equals_given_on_the_same_tokens(sampled: str, run: Path) -> None:
    texts = [f"--question={PROBLEM['question']}", f"--solution={PROBLEM['solution']}"]
    given = explain(str(run), *texts, f"--explanation={explanation_in(sampled)}", "--top=0")
    assert numbers(given) == pytest.approx(numbers(sampled), abs=2e-4)
    for one, other in zip(values(given), values(sampled), strict=True):
        assert one == pytest.approx(other, abs=2e-4)
    again = explain(str(run), *texts, f"--seed={SEED}", "--top=0")
    assert sampled.startswith(again)


def slow_log_probs(miniature: str, thought: str) -> torch.Tensor:
    """The student's log-probs of the solution at temperature 0.7, from the text as a student writes it."""
    model, tokenizer = load_model(miniature, attn_implementation="eager"), load_tokenizer(miniature)
    question = [{"role": "user", "content": PROBLEM["question"]}]
    chat = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    before = f"{chat}<think>\n{thought}\n</think>\n\n<solution>\n"
    start = len(tokenizer(before, add_special_tokens=False).input_ids)
    ids = torch.tensor([tokenizer(before + PROBLEM["solution"], add_special_tokens=False).input_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, start - 1 : -1]
    return (logits / 0.7).log_softmax(-1).gather(1, ids[0, start:, None]).squeeze(1)


def test_probabilities_are_those_of_a_slow_computation(sampled: str, miniature: str) -> None:
    after, before = slow_log_probs(miniature, explanation_in(sampled)), slow_log_probs(miniature, "")
    table = values(sampled.split("\nSolution: the student")[1])
    assert [row[0] for row in table] == pytest.approx(after.tolist(), abs=1e-4)
    assert [row[1] for row in table] == pytest.approx(before.tolist(), abs=1e-4)
    found = re.search(r"\((-[\d.]+) -> (-[\d.]+) nats\)", sampled)
    assert found is not None
    assert [float(value) for value in found.groups()] == pytest.approx(
        [before.sum().item(), after.sum().item()], abs=3e-4
    )


@pytest.mark.full
def test_a_trained_run_brings_its_settings(tmp_path: Path) -> None:
    """Of stage 1 and of stage 2, as `rlt fit` leaves them."""
    warmed, trained = tmp_path / "warm", tmp_path / "trained"
    few = ["--trainer.max_steps=1", "--data.num_embedded_rows=64", "--data.prompts_per_step=2"]
    result = rlt("fit", "--config=configs/laptop/warmup.yaml", *few, f"--output_dir={warmed}")
    assert result.returncode == 0, result.stderr
    config = ["--config=configs/laptop/rlt.yaml", f"--model.teacher={warmed / 'model'}"]
    result = rlt("fit", *config, *few, "--rollouts.seed=4", f"--output_dir={trained}")
    assert result.returncode == 0, result.stderr
    for folder, seed in ((warmed, 0), (trained, 4)):
        source = ["--data.source=chains", "--data.num_embedded_rows=64", "--data.seed=1"]
        options = [f"--model.teacher={folder / 'model'}", "--model.student=miniature", *source]
        config = ["--config=configs/laptop/generate.yaml", f"--rollouts.seed={seed}", *options]
        result = rlt("predict", *config, f"--output_dir={folder / 'predicted'}", "--data.max_rows=2")
        assert result.returncode == 0, result.stderr
        expected = json.loads((folder / "predicted" / "traces.jsonl").read_text().splitlines()[1])
        limit = "--rollouts.sampling.max_completion_length=48"
        text = explain(str(folder), "--row=2", limit, *source)
        assert explanation_in(text) == expected["reasoning_trace"]
        assert numbers(text)["reward"] == pytest.approx(expected["reward"], abs=1e-4)
    shutil.rmtree(trained / "model")
    with pytest.raises(InputError, match=r"has none\. Make it from a checkpoint: rlt export --ckpt_path"):
        find_settings(str(trained))


def test_a_recorded_teacher_without_its_run_needs_a_student(
    miniature: str, run: Path, tmp_path: Path
) -> None:
    # A folder model/ in a run is that run's.
    assert find_settings(str(run / "model"))["data"] == find_settings(str(run))["data"]
    folder = tmp_path / "moved"
    shutil.copytree(miniature, folder)
    assert find_settings(str(folder))["model"]["init_args"]["student"] == str(folder)
    write_format(ModelFormat("teacher", R1, ""), folder)
    assert find_settings(str(folder))["model"]["init_args"]["student"] is None
    result = rlt("explain", str(folder), "--question=1?", "--solution=1")
    assert result.returncode == 2
    assert "student" in result.stderr


def test_a_teacher_that_is_none_is_one_clear_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"folder '.*nothing' must exist, but does not"):
        find_settings(str(tmp_path / "nothing"))
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(InputError, match=r"must be the config.yaml of a run of rlt fit, but is not"):
        find_settings(str(tmp_path))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for stage in (StudentRLData, StudentOPDData):
        settings["data"]["class_path"] = f"rlt_lightning.datamodules.{stage.__name__}"
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        with pytest.raises(InputError, match="has trained a student"):
            find_settings(str(tmp_path))


# The row


def test_rows_are_numbered_through_all_sources() -> None:
    data = DATA | {"source": ["arithmetic:addition", "arithmetic"], "num_embedded_rows": 2}
    given = find_row(ExplainOptions(row=3, explanation=" So. "), data, R1, sample=False)
    first = find_row(ExplainOptions(row=1), DATA | {"num_embedded_rows": 2}, R1, sample=False)
    assert given["question"] == first["question"]
    assert given["completion"] == "So.\n</explanation>"
    assert first["completion"] == f"{first['reasoning_trace'].strip()}\n</explanation>"
    assert "completion" not in find_row(ExplainOptions(row=1), DATA, R1, sample=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"question": "Why?"}, "--question and --solution need each other"),
        ({"row": 6}, "1 to 5, but is 6"),
        ({"question": "Why?", "solution": "4"}, "lacks reasoning_trace.*a teacher that is named writes"),
        ({"question": "Why?", "solution": "4", "explanation": "\udcff"}, "half a surrogate pair"),
        ({"question": "Why?", "solution": " ", "explanation": "So."}, "the solution has no text"),
    ],
)
def test_what_cannot_be_explained_is_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_row(ExplainOptions(**options), DATA, R1, sample=False)


def test_only_a_reward_of_students_is_explained() -> None:
    one: Any = type("Module", (), {"reward": CorrectnessReward()})()
    with pytest.raises(InputError, match=r"model\.reward must be an RLTReward, but is CorrectnessReward"):
        command.explain(one, one, one, ExplainOptions())


# The command line


@pytest.mark.full
def test_mistakes_of_the_command_line_are_one_line(run: Path, tmp_path: Path) -> None:
    own = ["--question=Why?", "--solution=4"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "add 1, " * 400, "solution": "4"}) + "\n")
    for options, message in (
        ([str(run), f"--data.source={tmp_path / 'rows.jsonl'}"], "leave room for an explanation"),
        ([str(run), *own, f"--html={run / 'config.yaml'}"], "config.yaml exists and is no page"),
        (["--config=configs/recipe_7b/sft.yaml", *own, "--explanation=So."], "must be an RLTReward"),
    ):
        result = rlt("explain", *options)
        assert result.returncode == 2, (options, result.stderr)
        assert re.search(message, result.stderr.splitlines()[-1]), (options, result.stderr)
        assert "Traceback" not in result.stderr
