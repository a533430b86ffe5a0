"""Several frozen students: their rewards, single and combined, by hand and with real models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cases import full
from lightning.pytorch import Callback, Trainer
from miniatures import QWEN2, SEED1
from ranks import run
from safetensors.torch import load_file
from trainers import bare_trainer

from rlt_lightning import Teacher
from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.datamodules import TeacherRLData
from rlt_lightning.engines import Sampling
from rlt_lightning.models.format import ModelFormat, write_format
from rlt_lightning.modules import RLTModule, base
from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics.students import combine_tables
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards.students import Students
from rlt_lightning.rollouts.step import StepBatch, columns_of, columns_of_student
from rlt_lightning.tags import STRATOS
from rlt_lightning.types import InputError, PromptBatch

CHAINS: dict[str, Any] = {
    "source": "chains",
    "num_embedded_rows": 4,
    "prompts_per_step": 2,
    "tags": "r1",
    "teacher_system_prompt": "",
    "student_system_prompt": "",
}


def terms_of(solution: list[float], kl: list[float], closed: bool = True) -> dict[str, torch.Tensor]:
    """Return the terms of one completion: a solution token and a think token for each number."""
    log_probs, values = torch.tensor([solution], dtype=torch.float32), torch.tensor([kl])
    masks = torch.ones_like(log_probs, dtype=torch.bool), torch.ones_like(values, dtype=torch.bool)
    return RLTReward()(log_probs, masks[0], values, masks[1], torch.tensor([closed]))


def test_mean_weighted_mean_and_min_by_hand() -> None:
    # Student a: r_SS = (-1 - 3)/2 + 0.01 * -3 = -2.03, r_KL = (0.2 + 0.4)/2 + 0.01 * 0.4 = 0.304.
    # r_a = -2.03 - 3 * 0.304 - 1 (not closed) = -3.942.
    # Student b reads three solution tokens of its own: r_SS = (-0.5 - 1 - 1.5)/3 + 0.01 * -1.5 = -1.015,
    # r_KL = (0.5 + 1.5)/2 + 0.01 * 1.5 = 1.015, r_b = -1.015 - 3.045 - 1 = -5.06.
    both = [terms_of([-1, -3], [0.2, 0.4], False), terms_of([-0.5, -1, -1.5], [0.5, 1.5], False)]
    assert [one["reward"].item() for one in both] == pytest.approx([-3.942, -5.06])
    # mean: (-3.942 - 5.06)/2; with weights 1 and 0.5: (-3.942 - 2.53)/1.5; min: student b's.
    found = [combine_tables(both, [1, 1], "mean"), combine_tables(both, [1, 0.5], "mean")]
    found.append(combine_tables(both, [1, 1], "min"))
    assert [one["reward"].item() for one in found] == pytest.approx([-4.501, -4.314666, -5.06])
    # The terms add up, with the format term once: (-2.03 - 1.015)/2, -3 * (0.304 + 1.015)/2, -1.
    parts = [{name: value.item() for name, value in columns_of(one, "term").items()} for one in found]
    assert parts[0] == pytest.approx({"solution": -1.5225, "kl": -1.9785, "format": -1.0})
    assert parts[1] == pytest.approx({"solution": -1.691666, "kl": -1.623, "format": -1.0})
    assert parts[2] == pytest.approx({"solution": -1.015, "kl": -3.045, "format": -1.0})
    assert found[2]["log/student/kl_max"].item() == pytest.approx(1.5)


def test_the_smallest_reward_is_found_for_each_completion() -> None:
    # The first completion is hard for b, the second for a; of the third both earn the same: a's terms count.
    a = terms_of([-1.0], [0.0]) | {"reward": torch.tensor([-1.0, -5.0, -2.0])}
    b = terms_of([-1.0], [0.0]) | {"reward": torch.tensor([-3.0, -4.0, -2.0])}
    a, b = (
        {name: torch.full((3,), value) for name in one} | {"reward": one["reward"]}
        for one, value in ((a, 1.0), (b, 2.0))
    )
    found = combine_tables([a, b], [1, 1], "min")
    assert found["reward"].tolist() == [-3.0, -5.0, -2.0]
    assert found["record/kl_mean"].tolist() == [2.0, 1.0, 1.0]


class Keeper(Callback):
    """Keeps the batches of a run and the figures of its steps."""

    def __init__(self) -> None:
        self.batches: list[PromptBatch] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.batches.append(batch)
        self.metrics.append({name: float(value) for name, value in pl_module.step_metrics.items()})


def fit(folder: Path, module: RLTModule, steps: int = 1, length: int = 24, **data: Any) -> Keeper:
    keeper = Keeper()
    rollouts = RolloutCallback(sampling=Sampling(temperature=0.7, max_completion_length=length))
    bare_trainer(folder, keeper, rollouts, steps=steps).fit(module, datamodule=TeacherRLData(**CHAINS | data))
    return keeper


def scores_of(
    folder: Path, length: int = 24, steps: int = 1, **options: Any
) -> tuple[StepBatch, dict[str, float]]:
    """Return the scores of a step's completions, the same ones for any students, and its metrics."""
    options = {"student": None, "optimizer": OptimizerConfig(lr=1e-3)} | options
    keeper = fit(folder, RLTModule("miniature", group_size=4, **options), steps, length)
    return keeper.batches[-1].step, keeper.metrics[-1]


OTHERS = [SEED1, QWEN2]


@pytest.mark.parametrize(
    "options",
    [
        {},
        full({"reward": RLTReward(kl_estimator="exact", score_given=True)}),
        full({"teacher_log_probs": "recompute", "reward": RLTReward(score_given=True)}),
    ],
)
def test_real_students_combine_as_single_runs_do_by_hand(options: dict[str, Any], tmp_path: Path) -> None:
    single = [scores_of(tmp_path, students=[name], **options)[0] for name in OTHERS]
    hand = {
        "mean": ([1.0, 1.0], (single[0].rewards + single[1].rewards) / 2),
        "weighted": ([1.0, 0.5], (single[0].rewards + 0.5 * single[1].rewards) / 1.5),
        "min": ([1.0, 1.0], torch.minimum(single[0].rewards, single[1].rewards)),
    }
    for name, (weights, expected) in hand.items():
        several = dict(zip(OTHERS, weights, strict=True))
        reduction = "min" if name == "min" else "mean"
        scores, metrics = scores_of(tmp_path, students=several, student_reduction=reduction, **options)
        torch.testing.assert_close(scores.rewards, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            sum(columns_of(scores.table, "term").values()), expected, atol=1e-5, rtol=1e-5
        )
        for label, terms in zip(scores.labels, single, strict=True):
            torch.testing.assert_close(
                scores.table[f"of/{label}/reward"], terms.rewards, atol=1e-6, rtol=1e-6
            )
        assert metrics["reward/mean"] == pytest.approx(expected.mean().item(), abs=1e-6)
        for label, terms in zip(("miniature_seed1", "miniature_qwen2"), single, strict=True):
            assert metrics[f"reward/mean/{label}"] == pytest.approx(terms.rewards.mean().item(), abs=1e-6)
            for part in ("solution", "kl"):
                value = terms.table[f"term/{part}"].mean().item()
                assert metrics[f"reward/{part}/{label}"] == pytest.approx(value, abs=1e-6)


def test_the_same_student_twice_gives_todays_figures_exactly(tmp_path: Path) -> None:
    one, metrics = scores_of(tmp_path, student=SEED1, steps=2)
    for number, reduction in ((1, "mean"), (2, "mean"), (2, "min")):
        several = [SEED1] * number
        both, figures = scores_of(tmp_path, students=several, student_reduction=reduction, steps=2)
        assert torch.equal(both.rewards, one.rewards)
        own = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
        assert {name: figures[name] for name in own} == own
    assert [*both.labels] == ["miniature_seed1", "miniature_seed1_2"]


@pytest.mark.parametrize(("place", "estimator"), [(0, "k1"), (1, "k3"), full(0, "k3"), full(1, "k1")])
def test_a_student_in_other_tokens_reads_a_view_of_its_own(
    place: int, estimator: Any, miniature: str, renumbered: str, tmp_path: Path
) -> None:
    # The same model with its words numbered otherwise: it must say the same, as the first or the second.
    options = {"reward": RLTReward(kl_estimator=estimator), "length": 40}
    single, _ = scores_of(tmp_path, student=miniature, **options)
    names = [SEED1]
    names.insert(place, renumbered)
    both, _ = scores_of(tmp_path, students=names, student_reduction="min", **options)
    label = next(label for label in both.labels if label.startswith("renumbered"))
    assert [*both.labels].index(label) == place
    own = both.table[f"of/{label}/reward"]
    ours = columns_of_student(both.table, label)
    assert ours.keys() == single.table.keys()
    for name, values in single.table.items():
        torch.testing.assert_close(ours[name], values, atol=1e-4, rtol=1e-4)
    other = next(both.table[f"of/{name}/reward"] for name in both.labels if name != label)
    torch.testing.assert_close(both.rewards, torch.minimum(own, other))


def test_students_of_three_formats_score_as_each_does_by_itself(
    miniature: str, tiny_model: str, tmp_path: Path
) -> None:
    # One asks under other tags and a prompt of its own, one has another tokenizer.
    other = tmp_path / "other"
    shutil.copytree(miniature, other)
    write_format(ModelFormat("student", STRATOS, "Be brief."), other)
    names = [miniature, str(other), tiny_model]
    prompts = {"student_system_prompt": None}
    several = RLTModule(tiny_model, None, students=names, group_size=4, reward=RLTReward(score_given=True))
    batch = fit(tmp_path, several, **prompts).batches[0]
    assert batch.rollouts is not None
    reads = [
        row.views[number].spans is not None for row in batch.rollouts.rollouts[:1] for number in range(3)
    ]
    assert reads == [True, True, False]
    for name, other in zip(names, batch.step.labels, strict=True):
        module = RLTModule(tiny_model, name, group_size=4, reward=RLTReward(score_given=True))
        single = fit(tmp_path, module, **prompts).batches[0].step
        torch.testing.assert_close(
            batch.step.table[f"of/{other}/reward"], single.rewards, atol=1e-5, rtol=1e-5
        )
        label = several.students.labels[names.index(name)]
        ours, theirs = batch.step.tokens[f"kl/{label}"], single.tokens["kl"]
        assert [len(ours[i]) for i in range(4)] == [len(theirs[i]) for i in range(4)]


class Visits(Model):
    """Counts how many students are on the device."""

    now: ClassVar[int] = 0
    most: ClassVar[int] = 0

    @contextmanager
    def loaded_on(self, device: torch.device) -> Iterator[Any]:
        Visits.now += 1
        Visits.most = max(Visits.most, Visits.now)
        with super().loaded_on(device) as run:
            yield run
        Visits.now -= 1


def test_offloaded_students_are_on_the_device_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stay, _ = scores_of(tmp_path, students=OTHERS)
    monkeypatch.setattr(base, "Model", Visits)
    back, _ = scores_of(tmp_path, students=OTHERS, offload_frozen=True)
    assert torch.equal(back.rewards, stay.rewards)
    assert Visits.most == 1


def test_every_student_is_checked_before_a_model_is_loaded(
    miniature: str, renumbered: str, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    shutil.copytree(miniature, small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    with pytest.raises(InputError, match=f"the student {small}'s context of 40 tokens, but row 1"):
        scores_of(tmp_path, students=[miniature, str(small)])
    with pytest.raises(InputError, match=f"the tokenizer of the student {renumbered} is not the teacher's"):
        scores_of(tmp_path, students=[miniature, renumbered], reward=RLTReward(kl_estimator="exact"))


def test_short_names_tell_students_apart() -> None:
    def labels(*names: str) -> list[str]:
        return Students.of(None, [*names]).labels

    assert labels("org/Qwen2.5-7B", "/data/llama 3") == ["Qwen2_5_7B", "llama_3"]
    assert labels("runs/a/model", "runs/b/model") == ["a_model", "b_model"]
    assert labels("miniature", "miniature") == ["miniature", "miniature_2"]


def trained(folder: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Return the final weights and the metrics of a run of strategy_run."""
    return load_file(folder.with_suffix(".safetensors")), json.loads(folder.with_suffix(".json").read_text())


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        full("zero3", {}),
        full("fsdp2", {"early": True, "uneven": True}),
        full("ddp", {"dynamic": 2, "rows": 16}),
    ],
)
def test_two_processes_train_as_one(
    strategy: str, options: dict[str, Any], tiny_model: str, tmp_path: Path
) -> None:
    # A student of the teacher's tokenizer and one of another, which the teacher is asked for once.
    options = options | {"students": [tiny_model, "miniature"], "steps": 2}
    options["tokens"] = 100 if "early" in options else 280
    run(tiny_model, tmp_path / "one", "single", **options)
    run(tiny_model, tmp_path / "two", strategy, **options)
    (single, expected), (both, found) = trained(tmp_path / "one"), trained(tmp_path / "two")
    for name, weight in single.items():
        assert float((both[name] - weight).norm() / weight.norm()) < 1e-5
    labels = Students.of(None, [tiny_model, "miniature"]).labels
    for ours, theirs in zip(found, expected, strict=True):
        for label in labels:
            for name in ("reward/mean", "reward/solution", "reward/kl", "student/kl_mean"):
                assert ours[f"{name}/{label}"] == pytest.approx(theirs[f"{name}/{label}"], rel=1e-5, abs=1e-6)
        means = [theirs[f"reward/mean/{label}"] for label in labels]
        if "dynamic" not in options:  # its reward is no plain sum
            assert theirs["reward/mean"] == pytest.approx(sum(means) / 2, abs=1e-5)


def test_each_student_has_a_baseline_of_its_own(tmp_path: Path) -> None:
    texts = {"tags": "r1", "teacher_system_prompt": "", "student_system_prompt": ""}
    problem = {"question": "start 3. add 4.", "solution": "7", "reasoning_trace": "3 add 4 is 7."}
    reward, names = RLTReward(baseline="empty"), ["miniature", SEED1]
    [score] = Teacher("miniature", names, reward=reward, **texts).score([problem])  # type: ignore[arg-type]
    for name, own in zip(names, score.by_student.values(), strict=True):
        [by_itself] = Teacher("miniature", name, reward=reward, **texts).score([problem])  # type: ignore[arg-type]
        assert own.r_ss == pytest.approx(by_itself.r_ss, abs=1e-5)
        assert own.reward == pytest.approx(by_itself.reward, abs=1e-5)
