"""RLT's reward for TRL's GRPOTrainer: an entry of `reward_funcs`, which is also one of its callbacks.

TRL hands a reward function prompts, token ids and the columns of the data set, but no model. transformers
hands its callbacks the model that is trained. So one object is both:

    GRPOTrainer(...)  ── on_init_end, on_train_begin ──▶ keep the trained model and its tokenizer
    trainer.train()
      sample N completions
      reward_funcs    ── prompts, token ids, columns ──▶ N rewards: the frozen student and the trained model
      loss, step                                         read all completions of this process, packed

Written for TRL 1.16 (`GRPOTrainer._calculate_rewards`). TRL itself is not imported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from rlt_lightning.models.attention import SEGMENT_ATTENTION, register_segment_attention
from rlt_lightning.pretrained import can_replace_attention
from rlt_lightning.scoring.one_problem import ExplanationScorer
from rlt_lightning.strategies.sharding import Entry
from rlt_lightning.tags import decode, find_eos_token_ids
from rlt_lightning.types import Completion, InputError, Problem

HOW = (
    "Pass the reward twice: GRPOTrainer(reward_funcs=[reward], callbacks=[reward], ...). transformers then "
    "shows it the model."
)


class RLTRewardFunction(ExplanationScorer, TrainerCallback):
    """The RLT reward of TRL's completions; the teacher's log-probs are those of the model that is trained.

    It reads the sampled token ids, so nothing is tokenised again. The end of an explanation is the first
    closing tag: what a model writes after it is neither scored nor punished, but TRL trains on it.

    Example:
        `reward = RLTRewardFunction(student, teacher)`, then
        `GRPOTrainer(teacher, reward_funcs=[reward], callbacks=[reward], train_dataset=...)` with a data set
        of `reward.dataset(rows)`.
    """

    # What TRL's metrics call it: rewards/rlt/mean.
    __name__ = "rlt"
    model: Any = None
    processing_class: Any = None
    bf16 = False

    def dataset(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows for `datasets.Dataset.from_list`: those given, with the teacher's `prompt` as text.

        Args:
            rows: Rows with question and solution, or Bespoke-Stratos rows.

        Raises:
            InputError: If a row cannot be used; it names the number, from 1, and the reason.
        """
        problems = [self.build_problem(number, row) for number, row in enumerate(rows, start=1)]
        return [p.columns | {"question": p.question, "prompt": self.build_prompt(p)} for p in problems]

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the model that is trained, and the tokenizer that made the prompts."""
        self.model, self.processing_class = kwargs["model"], kwargs["processing_class"]
        self.bf16 = args.bf16

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the model again, which may have been wrapped since."""
        self.on_init_end(args, state, control, **kwargs)

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return the reward of each completion of this process; TRL calls this.

        Args:
            prompts: N texts that end after the opening explanation tag, as `dataset` makes them.
            completions: Their texts, not read: the token ids say more.
            completion_ids: N completions as they were sampled, end-of-sequence included.
            log_metric: Logs the mean of a term.
            columns: The columns of the data set, N values each, and further arguments of TRL.

        Raises:
            InputError: If a row, a prompt or the trained model is not as it must be.
        """
        model = self._trained_model()
        problems = self._build_problems(prompts, columns)
        ends = find_eos_token_ids(model, self.tokenizer)
        rollouts = [
            self.build_rollout(problem, self._cut_completion(ids, ends))
            for problem, ids in zip(problems, completion_ids, strict=True)
        ]
        device = next(model.parameters()).device
        with prepare_to_score(model), torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            terms = self.score(rollouts, Entry(model), device)
        if log_metric is not None:
            for name, values in terms.parts().items():
                log_metric(f"rlt/{name}", values.mean().item())
        return terms.reward.tolist()

    def _trained_model(self) -> Any:
        """Return the model that is trained, without the wrapper of an adapter."""
        if self.model is None:
            raise InputError(f"r_KL needs the model that is trained, but the reward was not shown one. {HOW}")
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        parts = [
            p for p in model.parameters() if isinstance(p, DTensor) or hasattr(p, "ds_id") or not p.numel()
        ]
        if parts:
            raise InputError(
                "The trained weights must be whole on every process, but are in shards (FSDP, or ZeRO-3). "
                "Train with one process, DDP, or ZeRO-1 or 2; rlt fit trains with shards."
            )
        return model

    def _build_problems(self, prompts: list[Any], columns: dict[str, Any]) -> list[Problem]:
        """Return the problem of each completion; completions of one prompt share it, and its number."""
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}
        rows = ({name: values[place] for name, values in lists.items()} for place in range(len(prompts)))
        found: dict[tuple[int, str], Problem] = {}
        keys = []
        for problem, prompt in zip(self.build_problems(rows), prompts, strict=True):
            keys.append(key := (problem.row, str(prompt)))
            if key not in found:
                found[key] = replace(self._replace_prompt(problem, prompt), row=len(found) + 1)
        return [found[key] for key in keys]

    def _replace_prompt(self, problem: Problem, prompt: Any) -> Problem:
        """Return the problem with the teacher's prompt as TRL has tokenised it."""
        opening = self.format.tags.explanation_open + self.format.tags.separator
        if not isinstance(prompt, str) or not prompt.endswith(opening):
            found = repr(prompt[-40:]) if isinstance(prompt, str) else type(prompt).__name__
            raise InputError(
                f"A prompt must be a text that ends in {opening!r}, but is {found}. Make the data set with "
                "reward.dataset(rows)."
            )
        ids = self.processing_class(text=prompt)["input_ids"]
        given = problem.think_prefix
        if ids[len(ids) - len(given) :] == given:
            return replace(problem, teacher_prefix=ids[: len(ids) - len(given)])
        # Without the text that follows, the last newlines became other tokens.
        student = problem.student_prefix + given
        return replace(problem, teacher_prefix=ids, think_prefix=[], student_prefix=student)

    def _cut_completion(self, ids: list[int], ends: set[int]) -> Completion:
        """Return a completion through its first end tag, or whole if it has none."""
        tag = self.format.end_tag

        def holds_tag(length: int) -> bool:
            return tag in decode(self.tokenizer, ids[:length])

        if holds_tag(len(ids)):
            length = bisect_left(range(len(ids)), True, key=holds_tag)
            return Completion(ids[:length], None, "stop")
        return Completion(ids, None, "eos" if ids and ids[-1] in ends else "length")


@contextmanager
def prepare_to_score(model: Any) -> Iterator[None]:
    """Let a model read packed rows in the block: without dropout, and with our attention where it fits."""
    was_training, attention = model.training, model.config._attn_implementation
    model.eval()
    if can_replace_attention(model.config):
        register_segment_attention()
        model.config._attn_implementation = SEGMENT_ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = attention
        model.train(was_training)
