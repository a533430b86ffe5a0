"""The RLT reward against hand-worked numbers and against what the paper authors' code returned."""

import json
import math

import pytest
import torch
from cases import GOLDEN_FOLDER

from rlt_lightning.numerics.divergence import log_ratio_kl, schulman_kl
from rlt_lightning.numerics.finite import FiniteChecks, NonFiniteError, require_finite
from rlt_lightning.numerics.rewards import mean_of_tokens, student_kl_penalty, student_solution_reward
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rollouts.columns import REWARD, Log, Record, Term

LN2 = math.log(2)
GOLDEN = GOLDEN_FOLDER / "rlt_reward.jsonl"


def test_mean_of_tokens_ignores_what_padding_holds():
    values = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.inf, -math.inf]], requires_grad=True)
    mean = mean_of_tokens(values, torch.tensor([[True, True, False], [True, False, False]]))
    mean.sum().backward()
    assert mean.tolist() == [2.0, 5.0]
    assert values.grad.tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]


def test_rows_without_tokens_are_named():
    token_mask = torch.tensor([[True], [False], [False]])
    with pytest.raises(ValueError, match=r"solution token, but row\(s\) \[1, 2\]"):
        student_solution_reward(torch.zeros(3, 1), token_mask)


def test_reward_is_mean_plus_weighted_hardest_token():
    # p = 1/2 and 1/8: mean log p = (-1 - 3)/2 ln 2 = -2 ln 2; min log p = -3 ln 2; third is padding.
    log_probs = torch.tensor([[1 / 2, 1 / 8, 1 / 99]]).log()
    reward = student_solution_reward(log_probs, torch.tensor([[True, True, False]]), min_coef=0.01)
    torch.testing.assert_close(reward, torch.tensor([-2.03 * LN2]))


def test_kl_penalty_is_mean_plus_weighted_largest_and_0_without_tokens():
    kl = torch.tensor([[1.0, -3.0, 99.0], [math.nan, math.inf, 1.0], [-1.0, -2.0, -6.0]])
    token_mask = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    penalty = student_kl_penalty(kl, token_mask, max_coef=0.1)
    torch.testing.assert_close(penalty, torch.tensor([-1 + 0.1, 0.0, -3 - 0.1]))
    assert student_kl_penalty(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


def test_kl_estimators_by_hand():
    # p = 1/2, q = 1/4: k1 = ln 2; k3 = ln 2 - 1 + 1/2. p = q: 0.
    log_p, log_q = torch.tensor([0.5, 0.3]).log(), torch.tensor([0.25, 0.3]).log()
    torch.testing.assert_close(log_ratio_kl(log_p, log_q), torch.tensor([LN2, 0.0]))
    torch.testing.assert_close(schulman_kl(log_p, log_q), torch.tensor([LN2 - 0.5, 0.0]))


def inputs() -> dict[str, torch.Tensor]:
    """Two rows: p = (1/2, 1/8), KL (1, -3), well formed; p = (1/4), no think tokens, badly formed."""
    return {
        "solution_log_probs": torch.tensor([[1 / 2, 1 / 8], [1 / 4, math.nan]]).log(),
        "solution_mask": torch.tensor([[True, True], [True, False]]),
        "kl": torch.tensor([[1.0, -3.0], [math.nan, math.inf]]),
        "kl_mask": torch.tensor([[True, True], [False, False]]),
        "format_ok": torch.tensor([True, False]),
    }


def test_default_reward_by_hand():
    # Row 1: -2.03 ln 2 - 3 (-1 + 0.01). Row 2: -2.02 ln 2 - 0 - 1.
    terms = RLTReward()(**inputs())
    torch.testing.assert_close(terms[Term("solution")], torch.tensor([-2.03 * LN2, -2.02 * LN2]))
    torch.testing.assert_close(terms[Term("kl")], torch.tensor([2.97, 0.0]))
    assert terms[Term("format")].tolist() == [0, -1]
    torch.testing.assert_close(terms[REWARD], torch.tensor([-2.03 * LN2 + 2.97, -2.02 * LN2 - 1]))
    for kind, prefix in ((Log, "reward/"), (Log, "student/"), (Record, "")):
        mean, smallest = (terms[kind(f"{prefix}solution_log_prob_{name}")] for name in ("mean", "min"))
        torch.testing.assert_close(mean, torch.tensor([-2 * LN2, -2 * LN2]))
        torch.testing.assert_close(smallest, torch.tensor([-3 * LN2, -2 * LN2]))
        assert terms[kind(f"{prefix}kl_mean")].tolist() == [-1, 0]
        assert terms[kind(f"{prefix}kl_max")].tolist() == [1, 0]


def test_normalised_reward_by_hand():
    # Row 1: 5 ((1/2 + 1/8)/2 + 0.01/8); 1 - e^-x of 1 and -3: mean 1 - (1/e + e^3)/2, max 1 - 1/e.
    # Row 2: 5.05/4, and no KL.
    reward = RLTReward(
        solution_weight=5, kl_weight=2, max_coef=0.1, normalise_log_probs="exp", normalise_kl="one_minus_exp"
    )
    terms = reward(**inputs())
    torch.testing.assert_close(terms[Term("solution")], torch.tensor([5 * (0.3125 + 0.00125), 5.05 / 4]))
    kl_mean, kl_max = 1 - (math.exp(-1) + math.exp(3)) / 2, 1 - math.exp(-1)
    torch.testing.assert_close(terms[Term("kl")], torch.tensor([-2 * (kl_mean + 0.1 * kl_max), 0.0]))
    torch.testing.assert_close(terms[Record("solution_log_prob_min")], torch.tensor([1 / 8, 1 / 4]))
    raw = terms[Log("student/solution_log_prob_min")]
    torch.testing.assert_close(raw, torch.tensor([-3 * LN2, -2 * LN2]))
    torch.testing.assert_close(terms[Record("kl_mean")], torch.tensor([kl_mean, 0.0]))
    assert terms[Log("student/kl_mean")].tolist() == [-1, 0]


def test_clipping_comes_before_normalisation():
    # log p of (-1, -3) ln 2 is bounded by -2 ln 2; KL of (1, -3) by 2 in size.
    terms = RLTReward(clip_log_probs=-2 * LN2, clip_kl=2.0)(**inputs())
    torch.testing.assert_close(terms[Record("solution_log_prob_mean")], torch.tensor([-1.5 * LN2, -2 * LN2]))
    torch.testing.assert_close(terms[Record("kl_mean")], torch.tensor([-0.5, 0.0]))
    normalised = RLTReward(clip_log_probs=-2 * LN2, normalise_log_probs="exp")(**inputs())
    torch.testing.assert_close(normalised[Record("solution_log_prob_min")], torch.tensor([1 / 4, 1 / 4]))


def test_reward_equals_the_paper_authors_code():
    for line in GOLDEN.read_text().splitlines():
        paper = json.loads(line)["paper"]
        log_probs, kl = torch.tensor([paper["solution_log_probs"]]), torch.tensor([paper["thought_kl"]])
        terms = RLTReward()(
            log_probs, torch.ones_like(log_probs).bool(), kl, torch.ones_like(kl).bool(),
            format_ok=torch.tensor([paper["match_reward"] == 0]),
        )  # fmt: skip
        for name, expected in {
            REWARD: "reward",
            Term("solution"): "solution_log_prob_reward",
            Term("kl"): "kl_reward",
            Term("format"): "match_reward",
            Log("reward/solution_log_prob_mean"): "log_prob_mean",
            Log("reward/solution_log_prob_min"): "log_prob_min",
            Log("reward/kl_mean"): "kl_mean",
            Log("reward/kl_max"): "kl_max",
        }.items():
            assert terms[name].item() == pytest.approx(paper[expected], abs=1e-5), name


@pytest.mark.parametrize(
    "options",
    [
        {"solution_weight": -1.0},
        {"kl_weight": math.nan},
        {"format_penalty": 1.0},
        {"teacher_temperature": 0.0},
        {"kl_estimator": "k2"},
        {"normalise_log_probs": "softmax"},
        {"normalise_kl": "exp"},
        {"clip_log_probs": 2.0},
        {"clip_kl": 0.0},
    ],
)
def test_reward_options_are_checked(options):
    with pytest.raises(ValueError, match=rf"reward\.{next(iter(options))} must be"):
        RLTReward(**options)


def test_non_finite_values_are_named_with_their_rows():
    values = torch.tensor([[0.0, 1.0], [math.nan, 2.0], [3.0, -math.inf]])
    with pytest.raises(NonFiniteError, match=r"Every reward .* row\(s\) 11, 12 have -inf and nan"):
        require_finite(values, "reward", rows=[10, 12, 11])
    with pytest.raises(NonFiniteError, match=r"row\(s\) 7 have inf"):
        require_finite(torch.tensor([1.0, math.inf]), "reward", rows=[7, 7])
    require_finite(values[:1], "reward", rows=[10])
    require_finite(torch.zeros(0), "reward", rows=[])


def test_checks_together_name_the_first_bad_term_and_its_rows() -> None:
    checks = FiniteChecks()
    checks.add(torch.tensor([1.0, 2.0]), [2], "log-prob", [3])
    checks.require()
    checks.add(torch.tensor([1.0, 2.0, math.nan]), [0, 2, 1], "KL", [5, 6, 9])
    checks.add(torch.tensor([math.inf]), [1], "reward", [7])
    with pytest.raises(NonFiniteError, match=r"Every KL must be finite, but row\(s\) 9 have nan"):
        checks.require()
    checks.require()  # of nothing new
