"""Update the frozen student while its teacher trains, within one run: a prototype (research/rounds.md).

Every few iterations the student takes some SFT steps on the best of the teacher's recent explanations. They
are undone if the best held-out explanations then earn less under it, or have become much shorter. It works
in one process, for a student with the teacher's tokenizer. A resumed run starts with the config's student.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from rlt_lightning.types import ModelView, Rollout, Rollouts


class StudentSync(Callback):
    """Let the frozen student learn from its teacher's best explanations.

    Args:
        every_n_steps: Optimizer steps of the teacher between two syncs.
        num_updates: SFT steps of the student at each sync.
        batch_size: Explanations of an SFT step.
        lr: Learning rate of AdamW, constant.
        min_length: A sync is undone if explanations have become shorter than this part of the first ones.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        num_updates: int = 15,
        batch_size: int = 16,
        lr: float = 1e-4,
        min_length: float = 0.7,
    ) -> None:
        self.every_n_steps, self.num_updates, self.batch_size = every_n_steps, num_updates, batch_size
        self.lr, self.min_length = lr, min_length
        self.best: list[Rollout] = []
        self.held_out: list[Rollouts] = []
        self.first_length = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the best explanation of each problem, those of the step's last two held out; sync in time."""
        module: Any = pl_module
        size = batch.rollouts.group_size
        rows, rewards = batch.rollouts.rollouts, batch.step.rewards.view(-1, size)  # (P, G)
        best = rewards.argmax(1).tolist()
        found = [rows[number * size + place] for number, place in enumerate(best)]
        self.best += found[:-2]
        self.held_out.append(replace(batch.rollouts, rollouts=found[-2:], group_size=1))
        if trainer.global_step % self.every_n_steps:
            return
        self.sync(module, trainer.global_step)
        self.best, self.held_out = [], []

    def sync(self, module: Any, step: int) -> None:
        """Train the student, and take the training back if held-out reward or length has fallen."""
        [student] = module.models.values()
        before = copy.deepcopy(student.model.state_dict())
        reward = self.measure_reward(module)
        length = sum(len(row.completion.token_ids) for row in self.best) / len(self.best)
        self.first_length = self.first_length or length
        self.train(student.model, step)
        after = self.measure_reward(module)
        keep = after >= reward and length >= self.min_length * self.first_length
        if not keep:
            student.model.load_state_dict(before)
        print(
            f"step {step}: held-out reward {reward:.3f} → {after:.3f}, {length:.1f} tokens, "
            f"{'kept' if keep else 'undone'}",
            flush=True,
        )

    def measure_reward(self, module: Any) -> float:
        """Return the mean reward of the best held-out explanations under the student as it is."""
        rewards = [module.score(some).rewards for some in self.held_out]
        return float(torch.cat(rewards).mean())

    def train(self, model: Any, step: int) -> None:
        """Take SFT steps on the best explanations, drawn at random."""
        generator = torch.Generator().manual_seed(step)
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr)
        with torch.enable_grad():
            for _ in range(self.num_updates):
                chosen = torch.randperm(len(self.best), generator=generator)[: self.batch_size].tolist()
                loss = compute_sft_loss(model, [self.best[number].require_view() for number in chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.requires_grad_(False)


def compute_sft_loss(model: Any, views: list[ModelView]) -> torch.Tensor:
    """Return the mean negative log-prob of thought and solution in the student's context, nats, ()."""
    ids, labels = [], []
    for view in views:
        problem = view.problem
        given = problem.student_prefix + problem.think_prefix
        answer = view.token_ids + problem.student_suffix + problem.solution_ids
        ids.append(torch.tensor(given + answer))
        labels.append(torch.tensor([-100] * len(given) + answer))
    tokens = pad_sequence(ids, batch_first=True)  # (n, T); what follows a sequence changes nothing before it
    targets = pad_sequence(labels, batch_first=True, padding_value=-100)
    logits = model(input_ids=tokens).logits[:, :-1]  # (n, T - 1, V)
    return cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
