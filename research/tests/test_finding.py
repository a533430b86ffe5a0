"""The finding at the smallest size that shows it: learning works, and planted faults break it."""

from __future__ import annotations

import csv
import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import driver
import finding
import planted_faults
import pytest
import torch
from arms import Arms, Setting, read
from finding import Finding
from make_miniature import draw_sheet
from stages import Stages
from trace_kinds import CHAIN_QUESTION, parse_chain

from rlt_lightning.models.embedded import MINIATURES
from rlt_lightning.models.load import load_model, load_tokenizer

SMALL = Setting("small", num_iterations=20, num_traces=256, num_test=256)


def accuracy(one: Finding, arm: str) -> float:
    """Train an arm's student at small size; its accuracy in percent."""
    one.run_arm(arm)
    return one.read_accuracy(f"{arm}/sampled")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Finding:
    """Arms that share one seed, and their warm-up teacher."""
    stages = Stages(tmp_path_factory.mktemp("arms"))
    stages.start()
    one = Finding(stages, SMALL, seed=0)
    one.prepare()
    return one


def students(one: Finding, *names: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Train the students of two arms at once; their accuracy, and their teachers' traces by kind."""
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(names, pool.map(lambda arm: accuracy(one, arm), names), strict=True))
    return found, {arm: one.measure_kinds(read(one.make_traces(arm))) for arm in names}


def metric(one: Finding, arm: str, name: str, stage: str = "teacher") -> list[float]:
    """A metric of an arm's RL, by iteration."""
    with (one.folder / arm / stage / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file)]


def shows_learning(one: Finding, found: dict[str, float], arm: str = "rlt") -> bool:
    """Return whether students gain by RLT, which sampled with the weights that it trained."""
    gains = found[arm] > found["warmup"] + 20
    return gains and max(metric(one, arm, "rollout/mismatch_max")) < 1e-3  # nats


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_that_rlt_trained(one: Finding) -> None:
    found, kinds = students(one, "rlt", "warmup")
    print(f"figure: accuracy in percent {found}")
    assert shows_learning(one, found), (found, kinds)
    assert kinds["rlt"]["steps"] > kinds["warmup"]["steps"] + 20


@pytest.mark.slow
def test_without_the_kl_the_teacher_tells_the_solution_and_students_learn_less(one: Finding) -> None:
    found, kinds = students(one, "solution_only", "warmup")
    assert found["solution_only"] < found["warmup"], (found, kinds)
    assert kinds["solution_only"]["leap"] > 50


def unglued(folder: Path) -> Path:
    """The miniature with a tokenizer that keeps a tag and the line break behind it apart."""
    shutil.copytree(MINIATURES["miniature"], folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace(r"</?[a-z]+>\\n?|", r"</?[a-z]+>|"))
    return folder


def stranger_to_its_tag(folder: Path) -> Path:
    """Let a model take the tag that opens an explanation for a word that no line break follows."""
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    tag, word = (tokenizer(text)["input_ids"] for text in ("<explanation>", " add"))
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[tag] = weight[word]
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_token_that_was_given_teaches_nobody_to_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(finding.TRAINED, "score_given", {"model__reward__score_given": "true"})
    stages = Stages(tmp_path)
    stages.start()
    # The student learns to write the line break; no teacher does, since its prompt ends with it.
    base = stages(
        "student",
        "fit",
        "laptop/sft",
        model__pretrained=unglued(tmp_path / "unglued"),
        data__source="chains",
    )
    setting = dataclasses.replace(SMALL, base=str(stranger_to_its_tag(base / "model")))
    one = Finding(stages, setting, seed=0)
    Arms.prepare(one)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one.train_teacher, ("rlt", "score_given")))
    collapsed, sound = (metric(one, arm, "rollout/length_mean") for arm in ("score_given", "rlt"))
    assert collapsed[-1] < collapsed[0] / 3
    assert sound[-1] > sound[0] / 2


FAULTS = ("sign_of_kl", "shuffled_advantages", "spans_off_by_one", "stale_weights")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_learning_test_fails_with_a_fault(
    fault: str, one: Finding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(finding.TRAINED, fault, {})  # an arm as RLT's, but for the fault
    found = {"warmup": accuracy(one, "warmup")}  # once: its stages have nothing that a fault breaks
    monkeypatch.setattr(one.stages, "target", getattr(planted_faults, fault))
    found[fault] = accuracy(one, fault)
    print(f"figure: accuracy in percent {found}")
    assert not shows_learning(one, found, fault), found


def test_the_best_and_the_most_frequent_are_chosen_among_the_first_traces_of_a_problem() -> None:
    written = {0: [("a", 1.0), ("b", 2.0), ("a", 1.5), ("c", 9.0)], 1: [("d", 0.0), ("e", -1.0), ("e", -2.0)]}
    rows = [
        {"row": row, "reasoning_trace": text, "reward": reward}
        for row, traces in written.items()
        for text, reward in traces
    ]
    best, frequent = (finding.select(rows, 3, by_count) for by_count in (False, True))
    assert [row["reasoning_trace"] for row in best] == ["b", "d"]
    assert [row["reasoning_trace"] for row in frequent] == ["a", "e"]
    assert finding.select(rows, 4, by_count=False)[0]["reasoning_trace"] == "c"


def test_as_many_traces_are_chosen_from_as_rlt_samples() -> None:
    # 40 iterations of 8 problems with 8 explanations, and one for each problem of the student.
    numbers = {name: Finding.SETTINGS[name].num_equal for name in ("main", "filler", "steps_only")}
    assert numbers == {"main": 6, "filler": 2, "steps_only": 2}


@pytest.mark.full
def test_each_way_of_decoding_runs_at_tiny_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "CLOSED", 0)
    tiny = {"num_warmup": 64, "num_traces": 32, "num_test": 8, "num_iterations": 4, "student_epochs": 1}
    tiny |= {"num_votes": 4, "num_pool": 256}
    setting = dataclasses.replace(finding.FILLER, right_traces=(0, 1), **tiny)
    selected = {"best_of_equal": 9, "majority_of_16": 16, "rlt_best_of_4": 16}
    names = ["warmup", "rlt", "warmup_t0", *selected, "own_t0", "warm_grpo", "group_kl_16"]
    names += ["expert_t0"]
    stages = Stages(tmp_path)
    found = driver.run("finding", Finding, stages, [setting], [0], names)["settings"]["filler"]["arms"]
    one = Finding(stages, setting, seed=0)
    assert list(found) == names
    assert setting.num_equal == 9  # 4 x 64 of the iterations and 32, of 32 problems
    for arm, number in selected.items():
        rows = read(one.make_traces(arm))
        assert [row["row"] for row in rows] == sorted({row["row"] for row in rows}), arm
        sampled = one.folder / ("rlt" if arm.startswith("rlt") else "warmup") / f"traces_{number}_t0.7"
        assert len(read(sampled / "traces.jsonl")) == number * 32
        assert len(rows) == 32
    for row in read(
        one.answer("own_right_8/answers", "miniature", rollouts__num_traces=8) / "distillation.jsonl"
    ):
        assert f"\\boxed{{{parse_chain(row['question']).answer}}}" in row["solution"]
    # As many answers as RLT samples, but for a part of an iteration.
    assert len(metric(one, "warm_grpo", "reward/mean", "rewarded")) * 64 == 256
    greedy, again = (read(one.make_traces(arm)) for arm in ("warmup_t0", "warmup"))
    assert [row["reasoning_trace"] for row in greedy] != [row["reasoning_trace"] for row in again]
    assert found["group_kl_16"]["rows"] == [16]
    best = [row["reward"] for row in read(one.make_traces("quarter"))]
    assert len(best) == 8
    assert best == sorted(best, reverse=True)
    assert len(read(one.data_file("expert"))) == 8 * 32 // 8  # one explanation of each problem is left out
    assert found["rlt"]["pass_at_k"] >= found["rlt"]["accuracy"]
    # Nats a token, of a vocabulary of some dozens; only RLT's and the warm-up's teachers are measured.
    assert 0 < found["rlt"]["entropy"][0] < 3
    assert 0 < found["rlt"]["entropy of the teacher"][0] < 3
    assert "entropy of the teacher" not in found["warmup_t0"]


@pytest.mark.full
def test_all_seeds_share_one_base_that_never_composed(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    stages.start()
    tiny = {"num_warmup": 16, "num_traces": 16, "num_test": 8, "num_warmup_epochs": 1}
    pretraining = "--corpus sheets --stop_after 2"
    setting = dataclasses.replace(finding.STEPS_ONLY, pretraining=pretraining, **tiny)
    ones = [Arms(stages, setting, seed) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Arms.prepare, ones))
    assert len((tmp_path / "base" / "pretraining.jsonl").read_text().splitlines()) == 2
    assert {one.student_base for one in ones} == {str(tmp_path / "base")}


def test_the_highest_reward_is_in_the_first_group() -> None:
    rows = [{"reward": n, "solution_reward": -n, "kl_reward": n % 16, "format_reward": 0} for n in range(32)]
    for by, number, expected in ((None, 1, [31, 30]), ("kl", 1, [15, 31]), ("solution", 16, [30, 31])):
        assert [row["reward"] for row in finding.take_group(rows, by, number)] == expected


def test_no_step_of_a_sheet_needs_the_result_of_another() -> None:
    for sheet in (draw_sheet(Random(seed), 5) for seed in range(20)):
        asked = sheet.question.rstrip("?").split(", ")
        assert [step.partition(" is ")[0] for step in sheet.steps] == asked
        assert CHAIN_QUESTION.fullmatch(sheet.question) is None
        wrong = sheet.derail(2, Random(0))
        assert wrong[0] != sheet.steps[2]
        assert wrong[1:] == sheet.steps[3:]
