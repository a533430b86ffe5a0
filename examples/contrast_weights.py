"""RLCSD: a token counts more where a right hint makes it likelier than wrong hints do (arXiv:2606.11709).

A hint is another completion of the problem in one template, so what every hint changes cancels out.

    e = log p(y_t | right hint) - log mean_k p(y_t | wrong hint k)                 Eq. 7; p is the policy
    r = LAMBDA tanh(e / TAU);  A~ = A + r, but 0 where that turns the sign of A    Eqs. 9 to 11
    maximised: (mean of A where |r| <= DELTA) + ETA * (mean of A~ elsewhere),      Eq. 15
               clipped as the policy loss does, of each completion, then over completions

We only read the authors' code (github.com/THU-BPM/RLCSD). It differs: means are over a micro-batch, hints are
drawn and read by a policy up to 10 steps old, and completions without both kinds of hints are left out.
Run: PYTHONPATH=examples rlt fit --config laptop/grpo --model contrast_weights.ContrastModule
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.losses import LossInputs, LossTerm, PolicyGradient
from rlt_lightning.rollouts.step import POLICY, ScoringPass, StepBatch
from rlt_lightning.types import Rollout

LAMBDA, TAU, DELTA, ETA, NUM_WRONG = 0.5, 0.02, 0.02, 1.0, 4
TEMPLATE = "{}\n\nHere is a reference solution:\n{}\n\nNow solve the problem in your own words."


class ContrastLoss(PolicyGradient):
    """The policy loss with advantages of tokens."""

    def advantages(self, inputs: LossInputs) -> Tensor:
        """Return the advantages of tokens, (n, T): their mean over a completion is Eq. 15."""
        columns = [inputs.step.tokens.get(f"hint{k}", {}) for k in range(1 + NUM_WRONG)]
        values = [torch.stack([c[row] for c in columns if row in c]) for row in inputs.micro.rows]
        contrasts = pad_sequence([-(v[1:] - v[0]).exp().mean(dim=0).log() for v in values], True)  # (n, T)
        shifts, plain = LAMBDA * torch.tanh(contrasts / TAU), inputs.advantages.unsqueeze(1)
        moved = inputs.token_mask & (shifts.abs() > DELTA)
        num_moved, length = moved.sum(1, True), inputs.token_mask.sum(1, True)  # tokens, (n, 1)
        weights = torch.where(moved, ETA / num_moved.clamp(min=1), 1 / (length - num_moved).clamp(min=1))
        return length * weights * plain.sign() * (plain.sign() * (plain + moved * shifts)).clamp(min=0)


class ContrastModule(RLTModule):
    """RL from right answers, whose loss reads after the reward: hints are judged completions."""

    divides_again = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Forget the last step's hints: by problem the tokens, whether they are right, the prompt."""
        super().on_train_batch_start(batch, batch_idx)
        self.hints: dict[int, list[Any]] = defaultdict(list)

    def collect(self, request: Any) -> StepBatch:
        """Make each completion a hint."""
        step, build = super().collect(request), self.trainer.datamodule.format.build_student_problem
        for row, correct in enumerate(step.table["level/correct"].tolist()):
            text, problem = step.rollout(row).text, step.rollout(row).problem
            shown = build(row, TEMPLATE.format(problem.question, text), "", problem.student_system_prompt)
            self.hints[problem.row].append((step.token_ids(row), correct == 1, shown.teacher_prompt))
        return step

    def list_loss_passes(self, rollout: Rollout) -> dict[str, ScoringPass]:
        """Add the completion after each hint; none is a hint for itself."""
        ids, prompt = rollout.completion.token_ids, rollout.problem.teacher_prompt
        hints = [hint for hint in self.hints[rollout.problem.row] if hint[0] != ids]
        right, wrong = ([hint[2] for hint in hints if hint[1] is kind] for kind in (True, False))
        # Without both: twice the same, no contrast.
        shown = [right[0], *wrong[:NUM_WRONG]] if right and wrong else [prompt] * 2
        passes = [ScoringPass(POLICY, p, ids, (len(p), len(p) + len(ids)), tuple(p)) for p in shown]
        return super().list_loss_passes(rollout) | {f"hint{k}": scoring for k, scoring in enumerate(passes)}

    @property
    def losses(self) -> list[LossTerm]:
        """Return the loss."""
        return [ContrastLoss(self.policy_loss, self.importance_weights, self.num_updates > 1)]
