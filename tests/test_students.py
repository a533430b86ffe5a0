"""Several frozen students: their rewards, one by one and combined, on paper and with real models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.datamodules import StratosDataModule
from rlt_lightning.engines import Sampling
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics.rewards import RLTReward, RLTRewardTerms
from rlt_lightning.numerics.students import combined_terms
from rlt_lightning.records.catalogue import registry
from rlt_lightning.types import PromptBatch, Scores

CHAINS: dict[str, Any] = {
    "source": "chains",
    "num_embedded_rows": 4,
    "prompts_per_step": 2,
    "tags": "r1",
    "teacher_system_prompt": "",
    "student_system_prompt": "",
}


# Terms that a student computes, beside the reward.
NAMES = (
    "solution_log_prob_reward",
    "kl_reward",
    "solution_log_prob_mean",
    "solution_log_prob_min",
    "kl_mean",
    "kl_max",
    "raw_solution_log_prob_mean",
    "raw_solution_log_prob_min",
    "raw_kl_mean",
    "raw_kl_max",
)


@pytest.fixture(autouse=True)
def _own_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the entries of these students out of the pages that other tests of this process read."""
    monkeypatch.setattr(registry, "entries", dict(registry.entries))


def terms_of(solution: list[float], kl: list[float], closed: bool = True) -> RLTRewardTerms:
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
    assert [one.reward.item() for one in both] == pytest.approx([-3.942, -5.06])
    # mean: (-3.942 - 5.06)/2; with weights 1 and 0.5: (-3.942 - 2.53)/1.5; min: student b's.
    found = [combined_terms(both, [1, 1], "mean"), combined_terms(both, [1, 0.5], "mean")]
    found.append(combined_terms(both, [1, 1], "min"))
    assert [one.reward.item() for one in found] == pytest.approx([-4.501, -4.314666, -5.06])
    # The terms add up, with the format term once: (-2.03 - 1.015)/2, -3 * (0.304 + 1.015)/2, -1.
    parts = [{name: value.item() for name, value in one.parts().items()} for one in found]
    assert parts[0] == pytest.approx({"solution": -1.5225, "kl": -1.9785, "format": -1.0})
    assert parts[1] == pytest.approx({"solution": -1.691666, "kl": -1.623, "format": -1.0})
    assert parts[2] == pytest.approx({"solution": -1.015, "kl": -3.045, "format": -1.0})
    assert found[2].raw_kl_max.item() == pytest.approx(1.5)


def test_the_smallest_reward_is_found_for_each_completion() -> None:
    # The first completion is hard for b, the second for a; of the third both earn the same: a's terms count.
    a = replace(terms_of([-1.0], [0.0]), reward=torch.tensor([-1.0, -5.0, -2.0]))
    b = replace(terms_of([-1.0], [0.0]), reward=torch.tensor([-3.0, -4.0, -2.0]))
    a, b = (
        replace(one, **{name: torch.full((3,), value) for name in NAMES})
        for one, value in ((a, 1.0), (b, 2.0))
    )
    found = combined_terms([a, b], [1, 1], "min")
    assert found.reward.tolist() == [-3.0, -5.0, -2.0]
    assert found.kl_mean.tolist() == [2.0, 1.0, 1.0]


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
    Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[keeper, RolloutCallback(sampling=Sampling(temperature=0.7, max_completion_length=length))],
    ).fit(module, datamodule=StratosDataModule(**CHAINS | data))
    return keeper


def scores_of(
    folder: Path, length: int = 24, steps: int = 1, **options: Any
) -> tuple[Scores, dict[str, float]]:
    """Return the scores of a step's completions, the same ones for any students, and its metrics."""
    options = {"student": None, "optimizer": OptimizerConfig(lr=1e-3)} | options
    keeper = fit(folder, RLTModule("miniature", group_size=4, **options), steps, length)
    assert keeper.batches[-1].scores is not None
    return keeper.batches[-1].scores, keeper.metrics[-1]


OTHERS = ["miniature-seed1", "miniature-qwen2"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reward": RLTReward(kl_estimator="exact", score_given=True)},
        {"teacher_log_probs": "recompute", "reward": RLTReward(score_given=True)},
    ],
)
def test_real_students_combine_as_single_runs_do_by_hand(options: dict[str, Any], tmp_path: Path) -> None:
    single = [scores_of(tmp_path, students=[name], **options)[0].terms for name in OTHERS]
    hand = {
        "mean": ([1.0, 1.0], (single[0].reward + single[1].reward) / 2),
        "weighted": ([1.0, 0.5], (single[0].reward + 0.5 * single[1].reward) / 1.5),
        "min": ([1.0, 1.0], torch.minimum(single[0].reward, single[1].reward)),
    }
    for name, (weights, expected) in hand.items():
        several = dict(zip(OTHERS, weights, strict=True))
        reduction = "min" if name == "min" else "mean"
        scores, metrics = scores_of(tmp_path, students=several, student_reduction=reduction, **options)
        torch.testing.assert_close(scores.terms.reward, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(sum(scores.terms.parts().values()), expected, atol=1e-5, rtol=1e-5)
        for own, terms in zip(scores.by_student.values(), single, strict=True):
            torch.testing.assert_close(own.terms.reward, terms.reward, atol=1e-6, rtol=1e-6)
        assert metrics["reward/mean"] == pytest.approx(expected.mean().item(), abs=1e-6)
        for label, terms in zip(("miniature_seed1", "miniature_qwen2"), single, strict=True):
            assert metrics[f"reward/mean/{label}"] == pytest.approx(terms.reward.mean().item(), abs=1e-6)
            for part in ("solution", "kl"):
                value = terms.parts()[part].mean().item()
                assert metrics[f"reward/{part}/{label}"] == pytest.approx(value, abs=1e-6)


def test_the_same_student_twice_gives_todays_figures_exactly(tmp_path: Path) -> None:
    one, metrics = scores_of(tmp_path, student="miniature-seed1", steps=2)
    for several in (["miniature-seed1"], ["miniature-seed1", "miniature-seed1"]):
        for reduction in ("mean", "min"):
            both, figures = scores_of(tmp_path, students=several, student_reduction=reduction, steps=2)
            assert torch.equal(both.terms.reward, one.terms.reward)
            own = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
            assert {name: figures[name] for name in own} == own
    assert [*both.by_student] == ["miniature_seed1", "miniature_seed1_2"]
