"""The runner of scoring passes: which sequences go through which model, and where their values go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlt_lightning.engines import Sampling
from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.passes import PassKey, PassRunner
from rlt_lightning.modules.ranks import Ranks
from rlt_lightning.numerics.finite import NonFiniteError
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.rollouts.step import POLICY, ScoringPass, Shards, StepBatch
from rlt_lightning.types import Completion, Problem, Rollout, Rollouts

PROMPT = [1, 2]
COMPLETIONS = ([5, 6, 7], [5, 8])


class Fake:
    """A model whose log-prob of token t at temperature T is -t / T; it notes what it scores."""

    def __init__(self, name: str, calls: list[tuple[str, list[int]]]) -> None:
        self.name = name
        self.calls = calls

    def __call__(self, function: Any, packed: Any, temperature: float, *rest: Any) -> Any:
        self.calls.append((self.name, packed.targets.tolist()))
        return -packed.targets.float() / temperature, None


class Sharded(Ranks):
    """This rank among others that have these keys, and whose flags are this one."""

    def __init__(self, others: list[PassKey] | None = None, flag: bool = False) -> None:
        super().__init__()
        self.sharded, self.others, self.flag, self.asked = True, others, flag, list[bool]()

    def any(self, flag: bool) -> bool:
        self.asked.append(flag)
        return flag or self.flag

    def gather(self, value: Any) -> Any:
        return [value] if self.others is None else [value, self.others]


def read(
    reads: Callable[[Rollout], Sequence[ScoringPass]],
    log_probs: list[float] | None = None,
    step: StepBatch | None = None,
    rows: Any = range(2),
    ranks: Ranks | None = None,
    recompute: bool = False,
) -> tuple[StepBatch, list[tuple[str, list[int]]]]:
    """What a step has after it was read, and what models scored, pass by pass."""
    calls: list[tuple[str, list[int]]] = []
    problem = Problem(9, "?", "!", PROMPT, [], [], [], [])
    rollouts = [
        Rollout(problem, Completion(ids, log_probs and log_probs[: len(ids)], "stop"), "", True)
        for ids in COMPLETIONS
    ]
    step = step or StepBatch.of_rollouts(Rollouts(rollouts, 2, 0, 0.5))
    models = {name: Model(Fake(name, calls)) for name in (POLICY, "student")}
    device = torch.device("cpu")
    runner = PassRunner(models, device, micro_batch_tokens=100, layout="packed", ranks=ranks or Ranks())
    runner.run(step, rows, reads, recompute=recompute)
    return step, calls


def of_completion(
    name: str, rollout: Rollout, first: int = 0, end: int = 99, model: str = POLICY, **options: Any
) -> ScoringPass:
    tokens = rollout.completion.token_ids[:end]
    return ScoringPass(model, PROMPT, tokens, {name: (2 + first, 2 + len(tokens))}, 9, **options)


def test_equal_and_nested_reads_of_a_row_are_one_sequence() -> None:
    reads = {"begin": {"end": 2}, "whole": {}, "again": {"first": 1}}
    step, calls = read(lambda rollout: [of_completion(n, rollout, **options) for n, options in reads.items()])
    assert calls == [(POLICY, [5, 6, 7, 5, 8])]
    # At the temperature of sampling, 0.5.
    expected = {"whole": [-10, -12, -14], "begin": [-10, -12], "again": [-12, -14]}
    assert {name: rows[0].tolist() for name, rows in step.tokens.items()} == expected
    assert step.tokens["whole"][1].tolist() == [-10, -16]


def test_another_temperature_or_model_is_another_pass() -> None:
    step, calls = read(
        lambda rollout: [
            of_completion("policy", rollout),
            of_completion("student", rollout, model="student", temperature=1.0),
            of_completion("warm", rollout, temperature=1.0),
        ]
    )
    assert [name for name, _ in calls] == [POLICY, "student", POLICY]
    assert step.tokens["warm"][0].tolist() == [-5, -6, -7]


def test_what_rows_share_is_read_once_in_a_step() -> None:
    def reads(rollout: Rollout) -> list[ScoringPass]:
        return [ScoringPass("student", PROMPT, [3, 4], {"empty": (3, 4)}, 9, 1.0, once=("empty", 9))]

    step, calls = read(reads, rows=[0])
    assert calls == [("student", [4])]
    # In a later chunk it is known already.
    step, calls = read(reads, step=step, rows=[1])
    assert calls == []
    assert [values.tolist() for values in step.tokens["empty"].values()] == [[-4], [-4]]


@pytest.mark.parametrize(
    ("log_probs", "options", "asks"),
    [
        ([-0.1, -0.2, -0.3], {}, False),
        (None, {}, True),
        ([-0.1, -0.2, -0.3], {"recompute": True}, True),
        # Another rank lacks them, and all must run the policy together.
        ([-0.1, -0.2, -0.3], {"ranks": Sharded(flag=True)}, True),
    ],
    ids=["reported", "unknown", "recompute", "another rank"],
)
def test_the_engines_log_probs_serve_where_all_are_known(log_probs: Any, options: Any, asks: bool) -> None:
    step, calls = read(
        lambda rollout: [of_completion("teacher", rollout, first=1, asks_engine=True)], log_probs, **options
    )
    assert bool(calls) == asks
    expected = [-12, -14] if asks else [-0.2, -0.3]
    assert step.tokens["teacher"][0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("lacking", [False, True])
def test_ranks_that_share_a_step_serve_or_ask_alike(lacking: bool) -> None:
    # Rank 0's row has log-probs; whether rank 1's has them, both ranks know.
    problem = Problem(9, "?", "!", PROMPT, [], [], [], [])
    request = RolloutRequest([9], [PROMPT], [0], 0, Sampling(temperature=0.5), 2, "")
    request.problems, request.build = [problem], lambda problem, sampled: Rollout(problem, sampled, "", True)
    known = [[-0.1] * 3, None if lacking else [-0.1] * 2]
    request.completions = {i: Completion(COMPLETIONS[i], known[i], "stop") for i in (0, 1)}
    step = StepBatch.of_request(request, Shards(0, 2, 2, True))
    [row] = step.divide([0, 1])
    _, calls = read(
        lambda rollout: [of_completion("teacher", rollout, asks_engine=True)], step=step, rows=[row]
    )
    assert row == 0
    assert bool(calls) == lacking


def test_at_another_temperature_the_engines_do_not_serve() -> None:
    warm: Any = {"asks_engine": True, "temperature": 0.7}
    _, calls = read(lambda rollout: [of_completion("teacher", rollout, **warm)], [-0.1, -0.2, -0.3])
    assert len(calls) == 1


@pytest.mark.parametrize("rows", [[0], []], ids=["rows that read else", "no rows"])
def test_a_rank_without_a_read_that_others_have_runs_a_dummy(rows: list[int]) -> None:
    def reads(rollout: Rollout) -> list[ScoringPass]:
        return [of_completion("whole", rollout, model="student", temperature=1.0)]

    others = [PassKey(POLICY, 0.5), PassKey("student", 1.0)]
    step, calls = read(reads, rows=rows, ranks=Sharded(others))
    assert calls == [(POLICY, [0]), ("student", [5, 6, 7] if rows else [0])]
    assert list(step.tokens) == ["whole"][: len(rows)]


def test_a_rank_that_knows_a_read_runs_a_dummy_for_the_others() -> None:
    def reads(rollout: Rollout) -> list[ScoringPass]:
        return [
            of_completion("whole", rollout, model="student", temperature=1.0),
            ScoringPass(POLICY, [], PROMPT, {"given": (1, 2)}, 9, once=("given", 9)),
        ]

    together = {"ranks": Sharded([PassKey(POLICY, 0.5)])}
    step, calls = read(reads, rows=[0], **together)
    assert calls == [(POLICY, [2]), ("student", [5, 6, 7])]
    step, calls = read(reads, step=step, rows=[1], **together)
    assert calls == [(POLICY, [0]), ("student", [5, 8])]
    assert step.tokens["given"][1].tolist() == [-4]


def test_all_ranks_ask_who_lacks_log_probs_whatever_their_rows_declare() -> None:
    ranks = Sharded(flag=True)
    read(lambda rollout: [of_completion("student", rollout, model="student")], ranks=ranks)
    assert ranks.asked == [True]


def test_what_is_not_finite_is_named_with_its_row() -> None:
    with pytest.raises(NonFiniteError, match=r"log-prob 'cold' of policy .* row\(s\) 9 have -inf"):
        read(lambda rollout: [of_completion("cold", rollout, temperature=1e-45)])
