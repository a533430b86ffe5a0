"""`rlt explain`: the reward of one explanation, term by term and token by token."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import full
from commands import ROOT, rlt

from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.scoring.explain import ExplainOptions, describe_explanation, find_explanation
from rlt_lightning.scoring.text import Terminal, list_caveats
from rlt_lightning.tags import R1
from rlt_lightning.types import InputError

DATA = {"source": "arithmetic", "split": "train", "num_embedded_rows": 5, "seed": 0, "max_rows": None}
DATA |= {"trace_columns": ["reasoning_trace"]}
ROW = {
    "finish_reason": "stop",
    "explanation": "ab",
    "reward": -2.5,
    "solution_log_prob_reward": -1.02,
    "solution_log_prob_mean": -1.0,
    "solution_log_prob_min": -2.0,
    "kl_reward": -1.48,
    "kl_mean": 1.4 / 3,
    "kl_max": 1.5,
    "format_reward": 0.0,
    "thought_tokens": ["\n", "a", "\x1b[31mb"],
    "thought_kl": [0.1, 1.5, -0.2],
    "solution_tokens": ["4", "2"],
    "solution_log_probs": [-2.0, 0.0],
    "student_log_prob_before": -6.0,
    "student_log_prob_after": -2.1,
}


def explain(model: str, *options: str) -> str:
    models = [f"--model.teacher={model}", f"--model.student={model}"]
    result = rlt("explain", "--config=tests/rlt.yaml", *models, *options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def numbers(text: str) -> dict[str, float]:
    """Reward and terms at the top of a page."""
    return {name: float(value) for name, value in re.findall(r"^ *(\w+) +([+-]\d+\.\d+)", text, re.M)}


def values(text: str) -> list[list[float]]:
    """The numbers of a table, by place of the token."""
    rows = re.findall(r"^ +(\d+)((?: +-?\d+\.\d+)+)  \"", text, re.M)
    return [list(map(float, cells.split())) for _, cells in sorted(rows, key=lambda row: int(row[0]))]


@pytest.mark.parametrize("score_given", [full("true"), "false"])
def test_the_terms_and_tokens_are_those_that_predict_scores(
    score_given: str, tiny_model: str, tmp_path: Path
) -> None:
    reward = f"--model.reward.score_given={score_given}"
    scoring = ["--config=configs/score.yaml", "--data.source=arithmetic", "--data.num_embedded_rows=3"]
    scoring += ["--data.tags=r1", "--data.teacher_system_prompt=T", "--data.student_system_prompt=S"]
    scoring += [f"--model.teacher={tiny_model}", f"--model.student={tiny_model}", "--scores.per_token=true"]
    result = rlt("predict", *scoring, reward, "--trainer.accelerator=cpu", f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    row = json.loads((tmp_path / "run" / "scores.jsonl").read_text().splitlines()[2])
    assert len(row["thought_tokens"]) == len(row["thought_kl"])
    assert (row["thought_tokens"][0] == "\n") == (score_given == "true")
    text = explain(
        tiny_model,
        reward,
        "--data.teacher_system_prompt=T",
        "--data.student_system_prompt=S",
        "--explain.row=3",
        "--explain.top=0",
    )
    found = numbers(text)
    assert found["reward"] == pytest.approx(row["reward"], abs=1e-4)
    assert found["solution"] == pytest.approx(row["solution_log_prob_reward"], abs=1e-4)
    assert found["kl"] == pytest.approx(row["kl_reward"], abs=1e-4)
    assert found["reward"] == pytest.approx(found["solution"] + found["kl"] + found["format"], abs=2e-4)
    explanation, solution = text.split("\nSolution: the student")
    kl = [cells[0] for cells in values(explanation)]
    assert kl == pytest.approx(row["thought_kl"], abs=1e-4)
    log_probs = values(solution)
    assert [cells[0] for cells in log_probs] == pytest.approx(row["solution_log_probs"], abs=1e-4)
    assert any(after != pytest.approx(empty, abs=1e-4) for after, empty in log_probs)


def test_texts_of_ones_own_need_no_row_and_leave_no_folder(tiny_model: str, tmp_path: Path) -> None:
    own = ["--explain.question=What is 2 + 2?", "--explain.solution=4", "--explain.explanation=Two and two."]
    before = set(Path("runs").glob("*"))
    text = explain(tiny_model, *own, "--explain.top=2")
    assert f"teacher {tiny_model}, student {tiny_model}\n\nQuestion: What is 2 + 2?\nSolution: 4\n" in text
    assert "Two and two." in text
    assert len(values(text.split("\nSolution: the student")[0])) == 2
    assert set(Path("runs").glob("*")) == before


def test_a_recorded_completion_is_explained_as_it_was_scored(finished_run: Path, tmp_path: Path) -> None:
    recorded = [json.loads(line) for line in (finished_run / "rollouts.jsonl").open()]
    row = next(row for row in recorded if (row["step"], row["completion"]) == (1, 1))  # of the first weights
    config = tmp_path / "config.yaml"  # as that of a run that went on
    written = (finished_run / "config.yaml").read_text()
    config.write_text(written.replace("ckpt_path: null", "ckpt_path: gone.ckpt"))
    options = [f"--explain.rollouts={finished_run / 'rollouts.jsonl'}", f"--explain.row={row['row']}"]
    options += [f"--explain.html={tmp_path / 'page.html'}", "--model.reward.clip_kl=1000"]
    result = rlt("explain", f"--config={config}", *options, "--explain.step=1", "--explain.completion=2")
    assert result.returncode == 0, result.stderr
    found = numbers(result.stdout)
    assert found["reward"] == pytest.approx(row["reward"], abs=2e-3)  # sampled log-probs against a forward's
    assert found["format"] == row["format_reward"]
    caveats = list_caveats(RLTReward(clip_kl=1000.0), any_text=True)
    assert len(caveats) == 2
    page = (tmp_path / "page.html").read_text()
    for caveat in caveats:  # the page has what the terminal says
        assert caveat in result.stdout
        assert caveat in page


def test_a_page_shows_what_the_terms_are_made_of() -> None:
    empty = ROW | {"solution_log_prob_reward": -3.02, "solution_log_probs": [-4.0, -2.0]}
    parts = {"solution": -1.02, "kl": -1.48, "format": 0.0, "repetition": -0.25}
    plain = describe_explanation(ROW, empty, parts, RLTReward(), top=1, terminal=Terminal())
    assert "solution    -1.0200  1 x (mean -1.0000 + 0.01 x min -2.0000)" in plain
    # exp(-6) = 0.0025 and exp(-2.1) = 0.1225; of two tokens the geometric means are exp(-3) and exp(-1.05).
    assert "     0.0025 -> 0.1225     product over 2 tokens\n" in plain
    assert "     0.0498 -> 0.3499     geometric mean of a token\n" in plain
    assert 'hardest token is "4" (token 1); +2.0000 against an empty explanation' in plain
    assert 'least natural token is "a" (token 2)' in plain
    assert "  repetition  -0.2500" in plain
    assert '      2    1.5000  "a"' in plain
    assert "    1.5000" in plain
    assert "-0.2000" not in plain  # top 1
    assert "\x1b" not in plain  # a text cannot command the terminal
    coloured = describe_explanation(ROW, empty, parts, RLTReward(), top=1, terminal=Terminal(colours=True))
    assert "\x1b[48;5;222ma\x1b[0m" in coloured  # 1 to 2 nats
    assert "\x1b[31m" not in coloured
    unpunished = describe_explanation(
        ROW | {"finish_reason": "length"}, empty, parts, RLTReward(format_penalty=0.0), 1, Terminal()
    )
    assert "format      +0.0000  not closed\n" in unpunished
    clipped = describe_explanation(ROW, empty, parts, RLTReward(clip_kl=1.0), top=1, terminal=Terminal())
    assert "before clipping" in clipped
    assert "before clipping" not in plain
    reward = RLTReward(reduction="max", kl_reduction="median")
    reduced = describe_explanation(ROW, empty, parts, reward, top=1, terminal=Terminal())
    assert f"1 x (max {max(ROW['solution_log_probs']):.4f} + 0.01 x min -2.0000)" in reduced
    assert f"(median {sorted(ROW['thought_kl'])[(len(ROW['thought_kl']) - 1) // 2]:.4f} + " in reduced


def test_rows_are_numbered_through_and_own_words_replace_theirs() -> None:
    data = DATA | {"source": ["arithmetic:addition", "arithmetic"], "num_embedded_rows": 2}
    given = find_explanation(ExplainOptions(row=3, explanation=" So. "), data, R1)
    first = find_explanation(ExplainOptions(row=1), DATA | {"num_embedded_rows": 2}, R1)
    assert given["question"] == first["question"]
    assert given["completion"] == "So.\n</explanation>"
    assert first["completion"].endswith("\n</explanation>")
    assert len(first["completion"]) > 30


@pytest.mark.full
def test_a_reader_who_has_enough_gets_no_traceback(tiny_model: str) -> None:
    own = ["--explain.question=Why?", "--explain.solution=4", "--explain.explanation=Two and two."]
    models = [f"--model.teacher={tiny_model}", f"--model.student={tiny_model}"]
    words = [
        sys.executable,
        "-m",
        "rlt_lightning",
        "explain",
        "--config=tests/rlt.yaml",
        *models,
        *own,
    ]
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(words, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=570)
    os.close(writing)
    assert result.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def recording(tmp_path: Path, **changes: object) -> ExplainOptions:
    """Of a rollouts.jsonl with one completion of row 1."""
    given = find_explanation(ExplainOptions(explanation="So."), DATA, R1)
    row = {"step": 1, "row": 1, "completion": 0, "question": given["question"]}
    row |= {"solution": f"\n{given['solution']}\n", "explanation": "So.", "finish_reason": "stop"}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(row | changes) + "\n")
    return ExplainOptions(rollouts=str(tmp_path / "rollouts.jsonl"))


def test_a_completion_without_text_is_not_taken_for_the_rows_trace(tmp_path: Path) -> None:
    given = find_explanation(recording(tmp_path, explanation=" ", finish_reason="length"), DATA, R1)
    assert given["reasoning_trace"]
    assert given["completion"] == "\n"  # '' would be no completion


@pytest.mark.parametrize("score_given", [True, False])
def test_white_space_that_was_sampled_is_kept(score_given: bool, tmp_path: Path) -> None:
    given = ["\n"] if score_given else []
    options = recording(tmp_path, thought_tokens=[*given, "\n", "So."])
    assert find_explanation(options, DATA, R1, score_given)["completion"] == "\nSo.\n</explanation>"


def test_an_explanation_of_no_tokens_has_a_page() -> None:
    row = ROW | {"explanation": "", "thought_tokens": [], "thought_kl": [], "kl_mean": 0.0, "kl_max": 0.0}
    text = describe_explanation(row, ROW, {"kl": 0.0}, RLTReward(), top=0, terminal=Terminal(colours=True))
    assert "no token counts" in text


def test_a_completion_of_another_problem_is_refused(tmp_path: Path) -> None:
    assert find_explanation(recording(tmp_path), DATA, R1)["completion"] == "So.\n</explanation>"
    for change in ({"question": "Why?"}, {"solution": "\n5\n"}):
        with pytest.raises(InputError, match="has another problem as row 1"):
            find_explanation(recording(tmp_path, **change), DATA, R1)


def test_a_solution_of_ones_own_is_not_lost_on_a_conversation(tmp_path: Path) -> None:
    answer = "<think>\nSo.\n</think>\n<solution>\n4\n</solution>"
    turns = [{"from": "user", "value": "2 + 2?"}, {"from": "assistant", "value": answer}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    data = DATA | {"source": str(tmp_path / "rows.jsonl")}
    assert find_explanation(ExplainOptions(), data, R1)["completion"] == "So.\n</explanation>"
    with pytest.raises(InputError, match="but row 1 is a conversation"):
        find_explanation(ExplainOptions(solution="5"), data, R1)


def test_bad_input_is_told_in_one_line(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"explain\.question needs explain\.solution"):
        ExplainOptions(question="Why?")
    with pytest.raises(InputError, match="counts samples from 1, as the report does, but is 0"):
        ExplainOptions(completion=0)
    with pytest.raises(InputError, match="1 to 5, but is 6"):
        find_explanation(ExplainOptions(row=6), DATA, R1)
    with pytest.raises(InputError, match=r"rollouts\.jsonl, but .*nothing is no file"):
        find_explanation(ExplainOptions(rollouts=str(tmp_path / "nothing")), DATA, R1)
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps({"row": 1, "step": 4, "completion": 0}) + "\n")
    with pytest.raises(InputError, match="sample 1 of row 1 at step 3, but has that row at steps 4"):
        find_explanation(ExplainOptions(rollouts=str(file), step=3), DATA, R1)
    file.write_text("{}\n")
    with pytest.raises(InputError, match="has that row at no step"):
        find_explanation(ExplainOptions(rollouts=str(file)), DATA, R1)
    file.write_text("[]\n")
    with pytest.raises(InputError, match="must be a JSON object"):
        find_explanation(ExplainOptions(rollouts=str(file)), DATA, R1)
    own = {"question": "Why?", "solution": "4"}
    with pytest.raises(InputError, match="half a surrogate pair"):
        find_explanation(ExplainOptions(explanation="\udcff", **own), DATA, R1)
    with pytest.raises(InputError, match="the solution has no text"):
        find_explanation(ExplainOptions(explanation="So.", **own | {"solution": " "}), DATA, R1)
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"question": "a", "solution": "b"}) + "\n")
    with pytest.raises(InputError, match=r"Row 1 must have an explanation .*--explain.explanation"):
        find_explanation(ExplainOptions(), DATA | {"source": str(source)}, R1)
    other = ["--config=configs/student_grpo.yaml", f"--model.teacher={tiny_model}"]
    judged = rlt("explain", *other, "--data.source=arithmetic", "--trainer.accelerator=cpu")
    assert judged.returncode == 2
    assert "asks no model" in judged.stderr
    other = ["--config=configs/teacher_sft.yaml", f"--model.pretrained={tiny_model}"]
    tuned = rlt("explain", *other, "--data.source=arithmetic", "--trainer.accelerator=cpu")
    assert tuned.returncode == 2
    assert "SFTModule, the model, has none" in tuned.stderr


def test_its_help_is_under_its_own_name() -> None:
    assert rlt("explain", "--help").stdout.startswith("usage: rlt explain ")
