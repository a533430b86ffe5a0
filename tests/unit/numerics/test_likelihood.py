"""Likelihood rewards: values worked by hand, slow versions, and the gradient over all thoughts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import log
from typing import Any

import pytest
import torch
from cases import GOLDEN_FOLDER
from torch import Tensor, nn

from rlt_lightning.modules.rlt import choose_answer_weight
from rlt_lightning.numerics import DrGRPOLoss, LeaveOneOutAdvantages
from rlt_lightning.numerics.rewards import reduce_tokens
from rlt_lightning.rewards import (
    LikelihoodReward,
    LogProbReward,
    NOVERReward,
    RLPRReward,
    RLTReward,
    SolutionScores,
    VeriFreeReward,
)
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import REWARD, Level, Log, Term
from rlt_lightning.types import InputError


def scores_of(log_probs: Tensor, token_mask: Tensor, **options: Any) -> SolutionScores:
    """Thoughts of one problem, of ten tokens each, which are closed, with these scores of the solution."""
    number = len(log_probs)
    fields: dict[str, Any] = {
        "closed": torch.ones(number, dtype=torch.bool),
        "lengths": torch.full((number,), 10),
        "groups": torch.zeros(number, dtype=torch.long),
    }
    return SolutionScores(log_probs, token_mask, **fields | options)


def scores(*probs: list[float], closed: list[bool] | None = None) -> SolutionScores:
    """The same by probabilities; 5 is padding."""
    columns = torch.tensor(probs, dtype=torch.float64)
    return scores_of(columns.log(), columns < 5, closed=torch.tensor(closed or [True] * len(probs)))


def equals(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype))


def test_log_prob_is_the_sum_or_the_mean() -> None:
    # ln(1/2 * 1/8) = -4 ln 2, a mean of -2 ln 2; the second is not closed: ln(1/4) - 1.
    given = scores([1 / 2, 1 / 8], [1 / 4, 5], closed=[True, False])
    equals(LogProbReward()(given)[REWARD], [-4 * log(2), -2 * log(2) - 1])
    mean = LogProbReward(reduction="mean", format_penalty=0)(given)
    equals(mean[REWARD], [-2 * log(2), -2 * log(2)])
    equals(mean[Log("student/solution_log_prob_min")], [-3 * log(2), -2 * log(2)])


def test_rlpr_is_the_gain_in_mean_probability() -> None:
    # B = (1/2 + 1/4) / 2 = 3/8, A = 1/8: 0.9 * 1/4 + 0.1. The second is below A, the third is not closed.
    empty = torch.full((3, 2), 1 / 8, dtype=torch.float64).log()
    given = scores([1 / 2, 1 / 4], [1 / 16, 1 / 16], [1 / 2, 1 / 2], closed=[True, True, False])
    terms = RLPRReward()(replace(given, empty_log_probs=empty))
    equals(terms[REWARD], [0.9 / 4 + 0.1, 0.1, 0.0])
    equals(terms[Level("baseline")], [1 / 8] * 3)


def test_verifree_is_the_probability_of_the_whole_solution() -> None:
    given = scores([1 / 2, 1 / 8], [1 / 4, 5], [1 / 2, 1 / 2], closed=[True, True, False])
    equals(VeriFreeReward()(given)[REWARD], [1 / 16, 1 / 4, 0.0])


def test_nover_is_rank_and_efficiency_within_the_group() -> None:
    # All have 10 tokens, so N = 2 and PPL = p^(-1/2): 2, 4, 3. The fourth is not closed, the fifth elsewhere.
    given = scores([1 / 4], [1 / 16], [1 / 9], [1 / 2], [1 / 99], closed=[True, True, True, False, True])
    given = replace(given, groups=torch.tensor([7, 7, 7, 7, 8]))
    nats = NOVERReward().nats(given)
    equals(nats[:3].exp(), [2.0, 4.0, 3.0])
    terms = NOVERReward()(given)
    equals(terms[Term("solution")], [1.0, 1 / 3, 2 / 3, 0.0, 1.0])
    equals(terms[REWARD], [2.0, 4 / 3, 5 / 3, 0.0, 2.0])
    # Of 1, 100 and 10 tokens N is 1, 3 and 2. p = 1/8: PPL 8, 2, 2.83. The last is shorter, but not better.
    given = replace(scores([1 / 8], [1 / 8], [1 / 8]), lengths=torch.tensor([1, 100, 10]))
    equals(NOVERReward().nats(given), [log(8), log(8) / 3, log(8) / 2])
    equals(NOVERReward()(given)[Term("efficiency")], [0.0, 0.0, 0.0])
    # The first is the shortest and the best: it beats both others, and the second one of two.
    given = replace(scores([1 / 2], [1 / 64], [1 / 4096]), lengths=torch.tensor([1, 2, 3]))
    equals(NOVERReward(efficiency_weight=4)(given)[Term("efficiency")], [4.0, 2.0, 0.0])


def test_equal_perplexities_are_ranked_in_order() -> None:
    given = scores([1 / 4], [1 / 2], [1 / 4], [1 / 4])
    equals(NOVERReward()(given)[Term("solution")], [3 / 4, 1.0, 2 / 4, 1 / 4])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        *(("mean", -3.75), ("sum", -15.0), ("min", -8.0), ("max", -1.0), ("median", -4.0)),
        # Sorted -8, -4, -2, -1: a quarter of the way is 0.75 steps from the first.
        *(("first_quartile", -8 + 0.75 * 4), ("last_quartile", -2 + 0.25)),
    ],
)
def test_reductions_are_those_of_the_released_code(reduction: Any, expected: float) -> None:
    values = torch.tensor([[-1.0, -8.0, -2.0, -4.0, 99.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    equals(reduce_tokens(values, mask, reduction), [expected])
    equals(LogProbReward(reduction=reduction).score_solution(scores_of(values, mask)), [expected])
    # RLT's r_SS with it, and r_KL of the same values.
    rlt = RLTReward(reduction=reduction, kl_reduction=reduction, min_coef=0, max_coef=0, kl_weight=2)
    terms = rlt(values, mask, values, mask, torch.tensor([True]))
    equals(terms[Term("solution")], [expected])
    # An empty row gets one 0 in r_KL; a row with tokens is as it is.
    equals(terms[Term("kl")], [-2 * expected])


def test_the_answer_term_needs_policy_and_reward() -> None:
    policy, reference = (Student.of(student) for student in ("policy", "reference"))
    assert choose_answer_weight(None, LogProbReward(), policy) == 1
    assert choose_answer_weight(0.5, VeriFreeReward(), policy) == 0.5
    for reward, student in (
        (NOVERReward(), policy),
        (RLTReward(), policy),
        (VeriFreeReward(), reference),
        (LogProbReward(), Student.of("miniature")),
    ):
        assert choose_answer_weight(None, reward, student) == 0
        with pytest.raises(InputError, match=r"model\.answer_weight must be 0 or"):
            choose_answer_weight(1.0, reward, student)
    with pytest.raises(InputError, match="it is -1, with student policy and LogProbReward"):
        choose_answer_weight(-1, LogProbReward(), policy)


# The gradient, over all thoughts

NUM_WORDS, THOUGHT, SOLUTION = 5, 3, [1, 4]


class Recurrent(nn.Module):
    """A model of five words: an embedding, a recurrence, a head. Not causal in any other way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(NUM_WORDS, 4)
        self.step = nn.RNN(4, 4, batch_first=True)
        self.head = nn.Linear(4, NUM_WORDS)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        """Log-probs of all tokens but the first, (N, T - 1)."""
        states, _ = self.step(self.words(tokens))
        found = (2 * self.head(states)).log_softmax(-1)[:, :-1]
        return found.gather(2, tokens[:, 1:, None]).squeeze(2)


def exact_gradient(model: Recurrent, rows: Tensor, reward: LikelihoodReward) -> Tensor:
    """Autograd's gradient of E r(z), every thought weighed by its probability."""
    found = model(rows)
    value = reward.score_solution(scores_of(found[:, THOUGHT:], torch.ones(len(rows), len(SOLUTION)).bool()))
    return flat_gradient(model, (found[:, :THOUGHT].sum(1).exp() * value).sum())


def flat_gradient(model: nn.Module, objective: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(objective, list(model.parameters()))])


def estimate(model: Recurrent, rows: Tensor, reward: LikelihoodReward, answer_weight: float) -> Tensor:
    """The mean of the estimator over all groups of two thoughts, each with its probability."""
    number = len(rows)
    first, second = (one.flatten() for one in torch.meshgrid(*[torch.arange(number)] * 2, indexing="ij"))
    members = torch.stack([first, second], dim=1).flatten()  # groups of two in adjacent rows
    found = model(rows)
    sampled, solution = found[:, :THOUGHT], found[:, THOUGHT:]
    prob = sampled.sum(1).exp().detach()
    score = reward.score_solution(scores_of(solution, torch.ones_like(solution, dtype=torch.bool)))
    advantages = LeaveOneOutAdvantages()(score.detach()[members], 2)
    of_group = (prob[first] * prob[second]).repeat_interleave(2)
    loss, _ = DrGRPOLoss(kl_coef=0.0, max_completion_length=1)(
        log_probs=sampled[members],
        advantages=advantages,
        token_mask=torch.ones(len(members), THOUGHT, dtype=torch.bool),
        importance_weights=of_group.unsqueeze(1).expand(-1, THOUGHT),
        num_sequences=2,  # the mean over a group; groups are weighed by their probability
        num_tokens=1,
    )
    answers = -(of_group * score[members]).sum() / 2
    return -flat_gradient(model, loss + answer_weight * answers)


@pytest.mark.parametrize("reward", [LogProbReward(), LogProbReward(reduction="mean"), VeriFreeReward()])
def test_the_gradient_over_all_thoughts_needs_the_answer_term(reward: LikelihoodReward) -> None:
    model = Recurrent()
    rows = torch.tensor([[0, *z, *SOLUTION] for z in product(range(NUM_WORDS), repeat=THOUGHT)])
    exact = exact_gradient(model, rows, reward)
    found = estimate(model, rows, reward, answer_weight=1)
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=0)
    without = estimate(model, rows, reward, answer_weight=0)
    size = float(exact.abs().max())
    assert float((without - exact).abs().max()) > 0.1 * size > 1e-4
    print(f"figure: the gradient, up to {size:.2g}, is met to {float((found - exact).abs().max()):.1e}")


# Parity with what the authors released

GOLDEN = json.loads((GOLDEN_FOLDER / "likelihood.json").read_text())


def golden_scores(scale: float = 1.0) -> SolutionScores:
    """Six thoughts of one problem, as the authors' code had SmolLM2 score them."""
    log_probs = torch.tensor(GOLDEN["log_probs"])
    fields = {name: torch.tensor(GOLDEN[name]) for name in ("closed", "lengths")}
    fields["empty_log_probs"] = torch.tensor(GOLDEN["empty_log_probs"]).expand_as(log_probs)
    return scores_of(scale * log_probs, torch.ones_like(log_probs, dtype=torch.bool), **fields)


def is_near(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


def test_rlpr_equals_the_released_code() -> None:
    rlpr = RLPRReward()
    after = rlpr.mean_prob(golden_scores().log_probs, golden_scores().token_mask)
    # The code rounds B to bfloat16, by up to 0.2 %, and only B.
    rounded = after.bfloat16().float().masked_fill(~golden_scores().closed, 0.0)
    is_near(rounded, GOLDEN["rlpr"]["after"])
    exact = rlpr(golden_scores())[REWARD]
    torch.testing.assert_close(exact, torch.tensor(GOLDEN["rlpr"]["reward"]), atol=0.9 * 2**-9, rtol=0)
    assert exact.std() > 0.01


def test_verifree_equals_the_released_code_with_its_gradient() -> None:
    golden = GOLDEN["verifree"]
    given = golden_scores(golden["scale_of_log_probs"])
    is_near(VeriFreeReward()(given)[REWARD], golden["reward"])
    log_probs = given.log_probs.clone().requires_grad_()
    rewards = VeriFreeReward().score_solution(replace(given, log_probs=log_probs))
    # The code's answer loss is -r(z) log p(y | z), r without gradient, of one thought at a time.
    rewards.sum().backward()
    assert log_probs.grad is not None
    is_near(-log_probs.grad, golden["answer_gradient"])
    sampled = torch.full((6, 3), 0.5).log().requires_grad_()
    mask = torch.ones(6, 3, dtype=torch.bool)
    advantages = LeaveOneOutAdvantages()(rewards.detach(), 6)
    loss = DrGRPOLoss(kl_coef=0.0, max_completion_length=1)
    loss(log_probs=sampled, advantages=advantages, token_mask=mask, num_sequences=1)[0].backward()
    assert sampled.grad is not None
    is_near(sampled.grad, golden["thought_gradient"])
    assert min(float(found.abs().max()) for found in (sampled.grad, log_probs.grad)) > 0.01


def test_nover_equals_the_released_code() -> None:
    terms = NOVERReward()(golden_scores())
    is_near(terms[Term("solution")], GOLDEN["nover"]["rank"])
    is_near(terms[Term("efficiency")], GOLDEN["nover"]["efficiency"])
    is_near(terms[Term("format")], GOLDEN["nover"]["format"])
    assert len(set(GOLDEN["nover"]["rank"])) == 6
    assert max(GOLDEN["nover"]["efficiency"]) > 0
