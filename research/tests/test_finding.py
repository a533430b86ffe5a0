"""The finding at the smallest size that shows it: learning works, and planted faults break it."""

from __future__ import annotations

import csv
import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import arms
import figures
import planted_faults
import pytest
import tables
import torch
from arms import Arms, Setting
from make_miniature import draw_sheet
from stages import Stages
from trace_kinds import CHAIN_QUESTION, parse_chain

from rlt_lightning.models.embedded import MINIATURES
from rlt_lightning.models.load import load_model, load_tokenizer

SMALL = Setting("small", num_iterations=20, num_traces=256, num_test=256)


def accuracy(one: Arms, arm: str) -> float:
    """Train an arm's student at small size; its accuracy in percent."""
    one.train_student(arm, one.make_traces(arm), greedy=False)
    return figures.read_accuracy(one, arm)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Arms:
    """Arms that share one seed, and their warm-up teacher."""
    stages = Stages(tmp_path_factory.mktemp("arms"))
    stages.start()
    one = Arms(stages, SMALL, seed=0)
    one.prepare()
    return one


def students(one: Arms, *names: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Train the students of two arms at once; their accuracy, and their teachers' traces by kind."""
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(names, pool.map(lambda arm: accuracy(one, arm), names), strict=True))
    return found, {arm: figures.measure_kinds(figures.read_traces(one, arm)) for arm in names}


def metric(one: Arms, arm: str, name: str) -> list[float]:
    """A metric of an arm's RLT, by iteration."""
    with (one.folder / arm / "teacher" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file)]


def shows_learning(one: Arms, found: dict[str, float], arm: str = "rlt") -> bool:
    """Return whether students gain by RLT, which sampled with the weights that it trained."""
    gains = found[arm] > found["warmup"] + 20
    return gains and max(metric(one, arm, "rollout/mismatch_max")) < 1e-3  # nats


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_that_rlt_trained(one: Arms) -> None:
    found, kinds = students(one, "rlt", "warmup")
    print(f"figure: accuracy in percent {found}")
    assert shows_learning(one, found), (found, kinds)
    assert kinds["rlt"]["steps"] > kinds["warmup"]["steps"] + 20


@pytest.mark.slow
def test_without_the_kl_the_teacher_tells_the_solution_and_students_learn_less(one: Arms) -> None:
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
    monkeypatch.setitem(arms.TRAINED, "score_given", {"model__reward__score_given": "true"})
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
    one = Arms(stages, setting, seed=0)
    one.prepare()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one.train_teacher, ("rlt", "score_given")))
    collapsed, sound = (metric(one, arm, "rollout/length_mean") for arm in ("score_given", "rlt"))
    rise = {arm: figures.measure_rise(one, arm)["reward/mean"] for arm in ("rlt", "score_given")}
    assert collapsed[-1] < collapsed[0] / 3
    assert sound[-1] > sound[0] / 2
    assert rise["score_given"] > 3 > rise["rlt"]
    alarms = {arm: (one.folder / arm / "teacher.log").read_text() for arm in rise}
    assert "alarm: The KL is negative" in alarms["score_given"]
    assert "alarm: The KL" not in alarms["rlt"]


FAULTS = ("sign_of_kl", "shuffled_advantages", "spans_off_by_one", "stale_weights")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_learning_test_fails_with_a_fault(fault: str, one: Arms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arms.TRAINED, fault, {})  # an arm as RLT's, but for the fault
    found = {"warmup": accuracy(one, "warmup")}  # once: its stages have nothing that a fault breaks
    monkeypatch.setattr(one.stages, "target", getattr(planted_faults, fault))
    found[fault] = accuracy(one, fault)
    print(f"figure: accuracy in percent {found}")
    assert not shows_learning(one, found, fault), found


def test_an_interval_is_students_t_over_seeds() -> None:
    # Mean 5, standard deviation 1, t = 4.303 for two degrees of freedom.
    assert figures.compute_interval([4.0, 5.0, 6.0]) == pytest.approx(4.303 / 3**0.5)
    # One seed: 1.96 standard errors of 256 right answers to 512 problems.
    assert figures.compute_interval([50.0]) == pytest.approx(196 * (0.25 / 512) ** 0.5)


def arm(*accuracy: float, rises: float = 0.0, greedy: tuple[float, ...] = ()) -> dict[str, Any]:
    rise = [{"reward/mean": rises + place / 10} for place in (-1, 0, 1)]
    return {"accuracy": accuracy, "greedy": greedy or accuracy, "rise": rise}


def test_the_best_and_the_most_frequent_are_chosen_among_the_first_traces_of_a_problem() -> None:
    written = {0: [("a", 1.0), ("b", 2.0), ("a", 1.5), ("c", 9.0)], 1: [("d", 0.0), ("e", -1.0), ("e", -2.0)]}
    rows = [
        {"row": row, "reasoning_trace": text, "reward": reward}
        for row, traces in written.items()
        for text, reward in traces
    ]
    best, frequent = (arms.select(rows, 3, by_count) for by_count in (False, True))
    assert [row["reasoning_trace"] for row in best] == ["b", "d"]
    assert [row["reasoning_trace"] for row in frequent] == ["a", "e"]
    assert arms.select(rows, 4, by_count=False)[0]["reasoning_trace"] == "c"


def test_as_many_traces_are_chosen_from_as_rlt_samples() -> None:
    # 40 iterations of 8 problems with 8 explanations, and one for each problem of the student.
    numbers = {name: setting.num_equal for name, setting in arms.MAINS.items()}
    assert numbers == {"main": 6, "filler": 2, "steps_only": 2}


@pytest.mark.full
def test_each_way_of_decoding_runs_at_tiny_size(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    stages.start()
    tiny = {"num_warmup": 64, "num_traces": 32, "num_test": 8, "num_iterations": 4, "student_epochs": 1}
    tiny["num_votes"] = 4
    one = Arms(stages, dataclasses.replace(arms.MAINS["filler"], **tiny), seed=0)
    one.prepare()
    decoded = ["warmup_t0", "best_of_4", "best_of_equal", "majority_of_16", "rlt_best_of_16"]
    alone = ["own_right_8", "grpo", "warm_grpo"]
    names = ["warmup", "rlt", *decoded, *alone]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one.run_arm, names))
    found = figures.collect([one], [], names, whole=False, seconds=0)
    assert list(found["arms"]) == names
    for arm in decoded:
        decoding, rows = arms.DECODED[arm], figures.read_traces(one, arm)
        assert [row["row"] for row in rows] == sorted({row["row"] for row in rows}), arm
        teacher = one.folder / decoding.teacher
        if decoding.num_traces == 1:
            continue
        number = decoding.num_traces or one.setting.num_equal
        most = arms.NUM_SAMPLED if decoding.num_traces else number
        sampled = arms.read(teacher / f"traces_{most}_t{decoding.temperature:g}/traces.jsonl")
        assert len(sampled) == most * one.setting.num_traces
        assert len(rows) == one.setting.num_traces
    assert one.setting.num_equal == 9  # 4 x 64 of the iterations and 32, of 32 problems
    for row in figures.read_traces(one, "own_right_8"):
        assert f"\\boxed{{{parse_chain(row['question']).answer}}}" in row["solution"]
    for name in ("grpo", "warm_grpo"):  # as many answers as RLT samples, but for a part of an iteration
        with (one.folder / name / "rewarded" / "metrics.csv").open() as file:
            assert len([*csv.DictReader(file)]) * 64 == 256
    greedy, again = (figures.read_traces(one, "warmup_t0"), figures.read_traces(one, "warmup"))
    assert [row["reasoning_trace"] for row in greedy] != [row["reasoning_trace"] for row in again]
    voted = found["arms"]["rlt"]
    [sampled], [best] = voted["accuracy"], voted["pass_at_k"]
    assert 0 <= voted["maj_at_k"][0] <= 100
    assert best >= sampled
    # Nats a token, of a vocabulary of some dozens; only RLT's and the warm-up's teachers are measured.
    assert 0 < voted["student_entropy"][0] < 3
    assert 0 < voted["teacher_entropy"][0] < 3
    assert "teacher_entropy" not in found["arms"]["warmup_t0"]
    assert "greedy traces" in tables.build_tables(found)


@pytest.mark.full
def test_all_seeds_share_one_base_that_never_composed(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    stages.start()
    tiny = {"num_warmup": 16, "num_traces": 16, "num_test": 8, "num_warmup_epochs": 1}
    pretraining = "--corpus sheets --stop_after 2"
    setting = dataclasses.replace(arms.MAINS["steps_only"], pretraining=pretraining, **tiny)
    ones = [Arms(stages, setting, seed) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Arms.prepare, ones))
    assert len((tmp_path / "base" / "pretraining.jsonl").read_text().splitlines()) == 2
    assert {one.student_base for one in ones} == {str(tmp_path / "base")}


def test_no_step_of_a_sheet_needs_the_result_of_another() -> None:
    for sheet in (draw_sheet(Random(seed), 5) for seed in range(20)):
        asked = sheet.question.rstrip("?").split(", ")
        assert [step.partition(" is ")[0] for step in sheet.steps] == asked
        assert CHAIN_QUESTION.fullmatch(sheet.question) is None
        wrong = sheet.derail(2, Random(0))
        assert wrong[0] != sheet.steps[2]
        assert wrong[1:] == sheet.steps[3:]


def test_what_contradicts_the_finding_is_named() -> None:
    fine = {"warmup": arm(40, 41, 42), "rlt": arm(90, 92, 93), "shuffled": arm(39, 40, 44)}
    assert figures.list_failures({"arms": fine}) == []
    [fault] = figures.list_failures({"arms": fine | {"rlt": arm(40, 90, 41)}})
    assert "touches 0" in fault
    [fault] = figures.list_failures({"arms": fine | {"shuffled": arm(60, 61, 62)}})
    assert "control" in fault
    [fault] = figures.list_failures({"arms": fine | {"shuffled": arm(39, 40, 44, rises=1)}})
    assert "control" in fault
    [fault] = figures.list_failures({"arms": fine | {"kl_only": arm(90, 93, 92)}})
    assert "one term of the reward reaches RLT (r_KL only)" in fault
    # Greedy traces and selection must stay behind where the setting claims it, in greedy answers, too.
    selected = {"best_of_equal": arm(30, 31, 32, greedy=(90, 92, 94))}
    assert figures.list_failures({"setting": "main", "arms": fine | selected}) == []
    [fault] = figures.list_failures({"setting": "filler", "arms": fine | selected})
    assert "not above" in fault
    assert "(greedy)" in fault
