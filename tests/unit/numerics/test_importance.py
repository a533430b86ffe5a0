"""Importance weights and the mismatch of engine and trainer, by hand; the weighted losses, by a loop."""

from __future__ import annotations

import ast
import math
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.callbacks.rollout_checks import announce_weights
from rlt_lightning.engines import Engine, HFEngine, Sampling, VLLMEngine
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.losses import compare_with_engine
from rlt_lightning.modules.passes import pad_engine_log_probs
from rlt_lightning.modules.step_metrics import mismatch_metrics
from rlt_lightning.numerics import GRPOLoss, TruncatedImportanceSampling
from rlt_lightning.numerics.importance import Mismatch

ENGINE = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]])
# Ratios 3/2, 1/2 and 4; then 3/2, and 2 on the second token.
LOG_PROBS = ENGINE + torch.tensor([[3 / 2, 1 / 2, 4.0], [3 / 2, 2.0, 1.0]]).log()
MASK = torch.tensor([[True, True, True], [True, True, False]])


# The products of the rows are both 3, so their geometric means are the cube and the square root of 3; the
# arithmetic ones are (3/2 + 1/2 + 4) / 3 = 2 and (3/2 + 2) / 2 = 7/4. Bounds are of products, not of factors.
@pytest.mark.parametrize(
    ("level", "mode", "floor", "cap", "first", "second"),
    [
        ("token", "truncate", 0.0, 2.5, [1.5, 0.5, 2.5], [1.5, 2.0]),
        ("token", "truncate", 0.75, 2.5, [1.5, 0.75, 2.5], [1.5, 2.0]),
        ("token", "mask", 0.75, 2.5, [1.5, 0.0, 0.0], [1.5, 2.0]),
        ("token", "mask", 0.0, 2.5, [1.5, 0.5, 0.0], [1.5, 2.0]),
        ("sequence", "truncate", 0.0, 10.0, [3.0] * 3, [3.0] * 2),
        ("sequence", "truncate", 0.0, 2.5, [2.5] * 3, [2.5] * 2),
        ("sequence", "mask", 0.5, 2.5, [0.0] * 3, [0.0] * 2),
        ("arithmetic", "truncate", 0.0, 2.5, [2.0] * 3, [1.75] * 2),
        ("geometric", "truncate", 0.0, 2.5, [3 ** (1 / 3)] * 3, [3 ** (1 / 2)] * 2),
        ("geometric", "mask", 0.5, 1.5, [3 ** (1 / 3)] * 3, [0.0] * 2),
    ],
)
def test_weights_by_hand(level: Any, mode: Any, floor: float, cap: float, first: Any, second: Any) -> None:
    weights = TruncatedImportanceSampling(level, cap, floor, mode)(LOG_PROBS, ENGINE, MASK)
    torch.testing.assert_close(weights, torch.tensor([first, [*second, 1.0]]))  # 1 on padding


def test_a_bound_is_within() -> None:
    exact = torch.tensor([[2.0]])
    for cap, kept in ((2.0, 2.0), (1.9, 0.0)):
        bounded = TruncatedImportanceSampling(cap=cap, mode="mask")
        assert bounded(exact.log(), 0 * exact, exact > 0).item() == pytest.approx(kept)


@cache
def lines_of_trl() -> CodeType:
    """The lines of TRL's GRPOTrainer that make `vllm_importance_sampling_ratio`, found by their condition."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs trl")
    source = (Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    [block] = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "invalid_mis_mask" in ast.unparse(node)
    ]
    return compile(ast.Module([block], []), "grpo_trainer.py", "exec")


def weights_of_trl(mode: str, low: float | None, high: float | None, batch: dict[str, Tensor]) -> Tensor:
    options = {"mode": mode, "clip_min": low, "clip_max": high, "correction": True}
    trainer = SimpleNamespace(
        use_vllm=True, **{f"vllm_importance_sampling_{name}": value for name, value in options.items()}
    )
    names = {"self": trainer, "torch": torch, "math": math, "tool_mask": None, **batch}
    exec(lines_of_trl(), names)
    return names["vllm_importance_sampling_ratio"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("level", "mode", "low", "high"),
    [
        (level, mode, *bounds)
        for level, mode in product(("token", "sequence"), ("truncate", "mask"))
        for bounds in ((None, 3.0), (0.5, 1.5), (0.8, None))
    ],
)
def test_weights_equal_those_of_trl(level: Any, mode: Any, low: float | None, high: float | None) -> None:
    generator = torch.Generator().manual_seed(5)
    engine = -torch.rand(64, 12, generator=generator, dtype=torch.float64)
    log_probs = engine + 0.6 * torch.randn(64, 12, generator=generator, dtype=torch.float64)
    mask = torch.arange(12) < torch.randint(1, 13, (64, 1), generator=generator)
    batch = {"old_per_token_logps": log_probs, "sampling_per_token_logps": engine}
    batch["completion_mask"] = mask.long()
    theirs = weights_of_trl(f"{level}_{mode}", low, high, batch).expand(64, 12)
    weigh = TruncatedImportanceSampling(level, math.inf if high is None else high, low or 0.0, mode)
    ours = weigh(log_probs, engine, mask)
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=0, atol=1e-7)
    outside = (ours[mask] == 0) if mode == "mask" else (ours[mask] == high) | (ours[mask] == low)
    assert 0 < outside.double().mean() < 1  # both sides of the bounds came


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
    completions = [
        SimpleNamespace(log_probs=ENGINE[i, : MASK[i].sum()].tolist(), worker="ab"[i]) for i in (0, 1)
    ]
    rows: Any = [SimpleNamespace(completion=completion) for completion in completions]
    of_engine = pad_engine_log_probs(rows, LOG_PROBS)
    tensors = {"old_log_probs": LOG_PROBS, "engine_log_probs": of_engine, "token_mask": MASK}
    inputs: Any = SimpleNamespace(rollouts=rows, stale=False, **tensors)
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


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_only_log_probs_of_another_draw_exceed_a_ratio_of_one(temperature: float) -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(20_000, 50)
    coarse = logits + 0.5 * torch.randn(20_000, 50)  # an engine in few bits

    def mismatch(drawn: Tensor, told: Tensor, trainer: Tensor) -> Mismatch:
        tokens = torch.multinomial(drawn.softmax(-1), 1)
        engine, ours = (values.log_softmax(-1).gather(1, tokens).T for values in (told, trainer))
        return Mismatch.between(ours, engine, torch.ones_like(ours, dtype=torch.bool))

    ours = logits / temperature
    assert mismatch(ours, ours, ours).excess_ratio == 0
    assert mismatch(coarse / temperature, coarse / temperature, ours).excess_ratio == 0
    assert mismatch(logits / 2, logits / 2, ours).excess_ratio == 0  # drawn otherwise, and told so
    for other in (0.8 * temperature, 1.25 * temperature):
        # E[p / q] - 1 is the chi-squared divergence, the mean over positions.
        p, q = ours.softmax(-1), (logits / other).softmax(-1)
        excess = mismatch(ours, logits / other, ours).excess_ratio
        assert excess == pytest.approx(((p**2 / q).sum(-1) - 1).mean().item(), rel=0.3)


def test_mismatches_of_parts_add_up_to_the_whole() -> None:
    whole = Mismatch.between(LOG_PROBS, ENGINE, MASK)
    parts = [Mismatch.between(LOG_PROBS[i : i + 1], ENGINE[i : i + 1], MASK[i : i + 1]) for i in range(2)]
    for total in (Mismatch() + parts[0] + parts[1], parts[1] + parts[0] + Mismatch()):
        assert total.sums() == pytest.approx(whole.sums())
        assert total.largest == whole.largest == pytest.approx(math.log(4))


def test_on_policy_every_sample_is_effective_and_nothing_differs() -> None:
    mismatch = Mismatch.between(ENGINE, ENGINE, MASK)
    assert (mismatch.mean, mismatch.largest, mismatch.mean_kl) == (0, 0, 0)
    assert mismatch.effective_sample_frac == 1


def test_a_part_without_tokens_adds_nothing() -> None:
    empty = Mismatch.between(LOG_PROBS, ENGINE, torch.zeros_like(MASK))
    assert empty == Mismatch()


def test_weighing_by_the_ratio_to_the_sampler_is_reinforce_of_the_trainer_in_the_mean() -> None:
    # Three words sampled by q, weighted by p / q: the mean gradient over q is that of E_p[A].
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    log_p, q = logits.log_softmax(dim=0), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (expected,) = torch.autograd.grad(-(log_p.exp() * advantages).sum(), logits, retain_graph=True)
    mask = torch.ones(3, 1, dtype=torch.bool)
    weights = TruncatedImportanceSampling(cap=100.0)(log_p[:, None], q.log()[:, None], mask)
    columns = {"log_probs": log_p[:, None], "advantages": advantages, "token_mask": mask}
    columns["importance_weights"] = weights
    losses = [
        GRPOLoss(kl_coef=0)(**{name: column[[word]] for name, column in columns.items()})[0]
        for word in range(3)
    ]
    (grad,) = torch.autograd.grad(torch.stack(losses) @ q, logits)
    torch.testing.assert_close(grad, expected)


OUTSIDE = VLLMEngine(["http://127.0.0.1:9"])


def attached(rlt: RLTModule, engine: Engine, *settings: Any, **options: Any) -> RLTModule:
    """A module whose completions come from this engine."""
    rlt.attach(RolloutCallback(engine, *settings, **options).sampler)
    return rlt


@pytest.mark.parametrize(
    ("engine", "asynchronous", "expected"),
    [(HFEngine(), False, None), (OUTSIDE, False, "level token, cap 2"), (OUTSIDE, True, None)],
)
def test_auto_weighs_what_others_sample(engine: Engine, asynchronous: bool, expected: str | None) -> None:
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
