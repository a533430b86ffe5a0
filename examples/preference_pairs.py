"""Train on pairs of a chosen and a rejected answer by DPO (arXiv:2305.18290): a stage of its own.

    pair ─▶ log-probs of policy and reference ─▶ margin ─▶ a weight for each answer ─▶ gradient
            chosen and rejected, without gradient          (how much DPO's loss depends on it)

The loss couples two rows, but a micro-batch may part them. So what couples them is computed first.

Run: PYTHONPATH=examples rlt fit --config laptop/warmup --model preference_pairs.DPOModule \\
    --data preference_pairs.PairData --data.source pairs.jsonl
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlt_lightning.datamodules.formats import encode
from rlt_lightning.datamodules.rows import ParsedRow
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.datamodules.token_cache import Item
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.modules.losses import OLD, LossInputs, LossOutput, LossTerm, build_sampled_pass
from rlt_lightning.modules.on_policy import OnPolicyModule
from rlt_lightning.rollouts.step import POLICY, REFERENCE, ScoringPass, StepBatch
from rlt_lightning.types import Completion, Problem, Rollout, Rollouts


class PairData(StratosDataModule):
    """Rows with the columns prompt, chosen and rejected; an item has both answers."""

    role = "student"
    samples = "answers"
    stop = ""

    def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return a row's columns."""
        return columns | {"question": columns["prompt"], "solution": columns["chosen"]}

    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        """Return the chosen answer as the problem's completion, and the rejected one among its columns."""
        system = self.find_row_prompt(row)
        problem = self.format.build_student_problem(number, row.question, row.solution, system)
        self.require_prompt(len(problem.teacher_prompt))
        chosen, rejected = (self.encode_turn(columns[name]) for name in ("chosen", "rejected"))
        completion = Completion(chosen, None, "eos")
        return [replace(problem, given_completion=completion, columns={"rejected": rejected})]

    def encode_turn(self, text: str) -> list[int]:
        """Return the tokens of an assistant's turn."""
        return [*encode(self.format.tokenizer, self.format.turn_opening + text), self.format.turn_end]

    def collate(self, items: list[Problem]) -> Rollouts:  # type: ignore[override]
        """Return both answers of each pair, as neighbours."""
        rollouts: list[Rollout] = []
        for problem in items:
            assert problem.given_completion is not None
            rejected = Completion(problem.columns["rejected"], None, "eos")
            for completion in (problem.given_completion, rejected):
                rollouts.append(self.format.build_student_rollout(problem, completion))
        return Rollouts(rollouts, group_size=2, policy_version=0, temperature=1.0)


class PairTerm(LossTerm):
    """The gradient of DPO's loss: each answer's log-prob times its weight."""

    def scoring_passes(self, rollout: Rollout) -> list[ScoringPass]:
        """Return the passes that the weights need."""
        reference = build_sampled_pass(rollout, REFERENCE, "reference")
        return [build_sampled_pass(rollout, POLICY, OLD), reference]

    def scoring_pass(self, rollout: Rollout) -> ScoringPass:
        """Return the answer."""
        return build_sampled_pass(rollout)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return a loss with the gradient of DPO's, a mean over pairs."""
        sums = inputs.log_probs.sum(1)  # (n,)
        return LossOutput(-(inputs.advantages * sums).sum() / (inputs.micro.num_sequences / 2), {})


class DPOModule(OnPolicyModule):
    """Train by loss = -log sigmoid(margin), margin = beta * (log p / p_ref (chosen) - the same (rejected)).

    Args:
        pretrained: The model, and as it is at the start the reference.
        beta: Weight of the margin.
        options: Those of `PolicyModule`.
    """

    data_classes = (PairData,)

    def __init__(self, pretrained: str = DEFAULT_MODEL, beta: float = 0.1, **options: Any) -> None:
        super().__init__(pretrained=pretrained, group_size=2, importance_sampling=None, **options)
        self.beta = beta

    def load_frozen_models(self) -> None:
        """Load the reference."""
        super().load_frozen_models()
        self.reference = self.load_frozen(self.pretrained, self.dtype_name, "the reference")

    def compute_margins(self, step: StepBatch) -> Tensor:
        """Return the margin of each pair, (P,)."""
        policy, reference = (
            torch.stack([step.tokens[name][row].sum() for row in step.shard]) for name in (OLD, "reference")
        )
        chosen, rejected = (policy - reference).view(-1, 2).unbind(1)
        return self.beta * (chosen - rejected)

    def training_step(self, batch: Rollouts, batch_idx: int) -> None:
        """Take one optimizer step over the pairs of a batch."""
        term, step, runner = PairTerm(), StepBatch.of_rollouts(batch), self.build_runner()
        with self.phase("score") as stats:
            runner.run(step, step.shard, term.scoring_passes, stats)
            margins = self.compute_margins(step)
            weights = self.beta * torch.sigmoid(-margins)  # the derivative of the loss by the margin
            step.advantages = torch.stack([weights, -weights], dim=1).flatten()  # (2P,)
        with self.phase("train") as stats:
            # Forward, loss and backward of each micro-batch.
            self.forward_backward(runner.updates(step, step.shard, [term], stats))
            metrics = self.finish_update(step)
        metrics |= {"policy/loss": -logsigmoid(margins).mean(), "policy/margin": margins.mean()}
        metrics |= self.speed_metrics(sum(len(row.completion.token_ids) for row in batch.rollouts))
        self.log_step(metrics, len(margins))
