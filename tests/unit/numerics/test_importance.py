"""Importance weights and the mismatch of engine and trainer, by hand; the weighted losses, by a loop."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.callbacks.rollout_checks import announce_weights
from rlt_lightning.engines import Engine, HFEngine, Sampling, VLLMEngine
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.credits import pad_engine_log_probs
from rlt_lightning.modules.losses import compare_with_engine
from rlt_lightning.modules.step_metrics import mismatch_metrics
from rlt_lightning.numerics import TruncatedImportanceSampling
from rlt_lightning.numerics.importance import Mismatch

ENGINE = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]])
# Ratios 3/2, 1/2 and 4; then 3/2, and 2 on the second token.
LOG_PROBS = ENGINE + torch.tensor([[3 / 2, 1 / 2, 4.0], [3 / 2, 2.0, 1.0]]).log()
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_token_weights_are_the_ratios_up_to_the_cap() -> None:
    weights = TruncatedImportanceSampling("token", cap=2.5)(LOG_PROBS, ENGINE, MASK)
    torch.testing.assert_close(weights, torch.tensor([[1.5, 0.5, 2.5], [1.5, 2.0, 1.0]]))


def test_sequence_weights_are_the_product_of_all_ratios_up_to_the_cap() -> None:
    # 3/2 * 1/2 * 4 = 3 and 3/2 * 2 = 3; the cap is put on the product, not on its factors.
    weights = TruncatedImportanceSampling("sequence", cap=10.0)(LOG_PROBS, ENGINE, MASK)
    torch.testing.assert_close(weights, torch.tensor([[3.0, 3.0, 3.0], [3.0, 3.0, 1.0]]))
    capped = TruncatedImportanceSampling("sequence", cap=2.5)(LOG_PROBS, ENGINE, MASK)
    torch.testing.assert_close(capped, torch.tensor([[2.5, 2.5, 2.5], [2.5, 2.5, 1.0]]))


def test_means_of_a_sequence_are_arithmetic_and_geometric() -> None:
    # (3/2 + 1/2 + 4) / 3 = 2 and (3/2 + 2) / 2 = 7/4; the cube root of 3 and the square root of 3.
    arithmetic = TruncatedImportanceSampling("arithmetic")(LOG_PROBS, ENGINE, MASK)
    torch.testing.assert_close(arithmetic, torch.tensor([[2.0, 2.0, 2.0], [1.75, 1.75, 1.0]]))
    geometric = TruncatedImportanceSampling("geometric")(LOG_PROBS, ENGINE, MASK)
    third, half = 3 ** (1 / 3), 3 ** (1 / 2)
    torch.testing.assert_close(geometric, torch.tensor([[third, third, third], [half, half, 1.0]]))


def test_outside_the_bounds_weights_are_truncated_or_masked() -> None:
    # Ratios 3/2, 1/2 and 4; 3/2 and 2. Products 3 and 3, geometric means 1.44 and 1.73. A bound is within.
    def weigh(level: Any, mode: Any, floor: float, cap: float) -> list[list[float]]:
        return TruncatedImportanceSampling(level, cap, floor, mode)(LOG_PROBS, ENGINE, MASK).tolist()

    approx = pytest.approx
    assert weigh("token", "truncate", 0.75, 2.5) == [approx([1.5, 0.75, 2.5]), approx([1.5, 2.0, 1.0])]
    assert weigh("token", "mask", 0.75, 2.5) == [approx([1.5, 0.0, 0.0]), approx([1.5, 2.0, 1.0])]
    assert weigh("token", "mask", 0.0, 2.5) == [approx([1.5, 0.5, 0.0]), approx([1.5, 2.0, 1.0])]
    assert weigh("sequence", "mask", 0.5, 2.5) == [[0, 0, 0], [0, 0, 1]]
    assert weigh("geometric", "mask", 0.5, 1.5) == [approx([3 ** (1 / 3)] * 3), [0, 0, 1]]
    exact = torch.tensor([[2.0]])
    for cap, kept in ((2.0, 2.0), (1.9, 0.0)):
        bounded = TruncatedImportanceSampling(cap=cap, mode="mask")
        assert bounded(exact.log(), 0 * exact, exact > 0).item() == approx(kept)


LEVELS = ["token", "sequence", "arithmetic", "geometric"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_padding_reaches_neither_weights_nor_mismatch(level: Any, garbage: float) -> None:
    dirty = [values.masked_fill(~MASK, garbage) for values in (LOG_PROBS, ENGINE)]
    weigh = TruncatedImportanceSampling(level)
    assert torch.equal(weigh(*dirty, MASK), weigh(LOG_PROBS, ENGINE, MASK))
    assert Mismatch.between(*dirty, MASK) == Mismatch.between(LOG_PROBS, ENGINE, MASK)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_one_on_policy_and_have_no_gradient(level: Any) -> None:
    log_probs = ENGINE.clone().requires_grad_()
    weights = TruncatedImportanceSampling(level, cap=1.0, floor=1.0, mode="mask")(log_probs, ENGINE, MASK)
    assert torch.equal(weights, torch.ones(2, 3))
    assert not weights.requires_grad


def test_masked_tokens_are_counted_and_a_step_without_others_warns() -> None:
    masks = TruncatedImportanceSampling("token", cap=1.5, floor=0.75, mode="mask")
    rows: Any = [
        SimpleNamespace(
            completion=SimpleNamespace(log_probs=ENGINE[i, : MASK[i].sum()].tolist(), worker=name)
        )
        for i, name in enumerate(("a", "b"))
    ]
    inputs: Any = SimpleNamespace(
        rollouts=rows,
        old_log_probs=LOG_PROBS,
        engine_log_probs=pad_engine_log_probs(rows, LOG_PROBS),
        token_mask=MASK,
        stale=False,
    )
    # Ratios 3/2, 1/2 and 4; then 3/2 and 2: three of the five tokens are outside of the bounds.
    _, _, measured = compare_with_engine(inputs, masks)
    by_worker = {worker: Mismatch.read([own]) for worker, own in measured.items()}
    counts = {worker: (own.num_masked, own.num_tokens) for worker, own in by_worker.items()}
    assert counts == {"a": (2, 3), "b": (1, 2)}
    metrics = mismatch_metrics(by_worker, step=1, masks=True)
    assert metrics["rollout/masked_frac"] == pytest.approx(3 / 5)
    assert "rollout/masked_frac" not in mismatch_metrics(by_worker, step=1)


def test_mismatch_by_hand() -> None:
    # Ratios 2, 1/2 and 1: |d| = ln 2, ln 2, 0; k3 = 2 - 1 - ln 2, 1/2 - 1 + ln 2, 0, which sum to 1/2.
    # Effective sample size (7/2)^2 / (4 + 1/4 + 1) = 12.25 / 5.25 = 7/3 of 3 tokens: 7/9.
    ratios, mask = torch.tensor([[2.0, 0.5], [1.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    mismatch = Mismatch.between(ratios.log() - 1, -torch.ones(2, 2), mask)
    assert mismatch.num_tokens == 3
    assert mismatch.largest == pytest.approx(math.log(2))
    assert mismatch.mean == pytest.approx(2 * math.log(2) / 3)
    assert mismatch.mean_kl == pytest.approx(1 / 6)
    assert mismatch.effective_sample_frac == pytest.approx(7 / 9)


def test_unexplained_variance_by_hand() -> None:
    # 40 log-probs of -1 and -3, whose variance is 1; d is 0.5 on half of them: mean d^2 is 1/8.
    log_probs = torch.tensor([[-1.0, -3.0] * 20]).double()
    off = torch.tensor([[0.5, 0.0] * 20])
    mask = torch.ones(1, 40, dtype=torch.bool)
    assert Mismatch.between(log_probs, log_probs - off, mask).unexplained_frac == pytest.approx(1 / 8)
    constant = torch.full_like(log_probs, -2.0)
    assert Mismatch.between(log_probs, constant, mask).unexplained_frac == pytest.approx(1)
    # One token of -1, off by 0.5, as if 31 others agreed: 1/4 / 32, against the least variance 0.01.
    one = Mismatch.between(log_probs[:, :1], log_probs[:, :1] - 0.5, mask[:, :1])
    assert one.unexplained_frac == pytest.approx(0.25 / 32 / 0.01)


def test_mismatches_of_parts_add_up_to_the_whole() -> None:
    whole = Mismatch.between(LOG_PROBS, ENGINE, MASK)
    parts = [Mismatch.between(LOG_PROBS[i : i + 1], ENGINE[i : i + 1], MASK[i : i + 1]) for i in range(2)]
    for total in (Mismatch() + parts[0] + parts[1], parts[1] + parts[0] + Mismatch()):
        assert total.sums() == pytest.approx(whole.sums())
        assert total.largest == whole.largest == pytest.approx(math.log(4))


OUTSIDE = VLLMEngine(["http://127.0.0.1:9"])


def attached(rlt: RLTModule, engine: Engine, *settings: Any, **options: Any) -> RLTModule:
    """A module whose completions come from this engine."""
    rlt.attach(RolloutCallback(engine, *settings, **options).sampler)
    return rlt


@pytest.mark.parametrize(
    ("engine", "asynchronous", "expected"),
    [(HFEngine(), False, None), (OUTSIDE, False, "level token, cap 2"), (OUTSIDE, True, None)],
)
def test_auto_weighs_what_another_process_samples(
    engine: Engine, asynchronous: bool, expected: str | None
) -> None:
    rlt = attached(RLTModule(), engine, asynchronous=asynchronous)
    found = None if rlt.importance_weights is None else str(rlt.importance_weights)
    assert found == expected


@pytest.mark.parametrize(
    ("sampling", "engine"),
    [(Sampling(top_p=0.9), OUTSIDE), (Sampling(), VLLMEngine(["http://127.0.0.1:9"], log_probs="trainer"))],
)
def test_auto_warns_where_it_cannot_weigh(sampling: Sampling, engine: Engine) -> None:
    rlt = attached(RLTModule(), engine, sampling)
    assert rlt.sampler is not None
    with pytest.warns(UserWarning, match="auto: none, since VLLMEngine does not report the log-probs"):
        announce_weights(rlt.sampler, rlt)
    assert rlt.importance_weights is None


def test_an_explicit_setting_wins_over_the_engine() -> None:
    for setting in (None, TruncatedImportanceSampling("sequence", cap=4.0)):
        for engine in (HFEngine(), OUTSIDE):
            rlt = attached(RLTModule(importance_sampling=setting), engine)
            assert rlt.importance_weights is setting
