"""RLT's and likelihood rewards for TRL's GRPOTrainer: entries of `reward_funcs` that are also callbacks.

TRL passes prompts, token ids and the data set's columns to a reward function, but no model. transformers
passes the trained model to its callbacks. So one object is both:

    GRPOTrainer(...)  ── on_init_end, on_train_begin ──▶ keep the trained model and its tokenizer
    trainer.train()
      sample N completions
      reward_funcs    ── prompts, token ids, columns ──▶ N rewards: the frozen student, if there is one, and
      loss, step                                         the trained model read this process's completions

Written for TRL 1.16 (`GRPOTrainer._calculate_rewards`). TRL itself is not imported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from explanation_scorer import ExplanationScorer  # beside this file
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from rlt_lightning.datamodules import StudentLikelihoodData
from rlt_lightning.models.attention import SEGMENT_ATTENTION, register_segment_attention
from rlt_lightning.models.load import Dtype, can_replace_attention
from rlt_lightning.models.template import find_eos_token_ids
from rlt_lightning.numerics.packing import Layout
from rlt_lightning.rewards import LikelihoodReward, LogProbReward
from rlt_lightning.rollouts.columns import Term, columns_of
from rlt_lightning.rollouts.step import POLICY
from rlt_lightning.strategies.sharding import ModelEntry
from rlt_lightning.tags import TagStyle, decode
from rlt_lightning.types import Completion, InputError, Problem, Rollout

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
    # TRL's GRPOConfig.
    args: Any = None

    def dataset(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows for `datasets.Dataset.from_list`: those given, with the model's `prompt` as text.

        Args:
            rows: Rows with question and solution, or Bespoke-Stratos rows.

        Raises:
            InputError: If a row cannot be used; it names the number, from 1, and the reason.
        """
        problems = [self.build_problem(number, row) for number, row in enumerate(rows, start=1)]
        default = self.format.student_system_prompt
        prompts = (p.student_system_prompt for p in problems)
        self.data.chosen.check_rows(Counter(default if prompt is None else prompt for prompt in prompts))
        return [p.columns | {"question": p.question, "prompt": self.build_prompt(p)} for p in problems]

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the model that is trained, the tokenizer that made the prompts, and the settings."""
        self.model, self.processing_class, self.args = kwargs["model"], kwargs["processing_class"], args

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
            prompts: N texts that end after the opening tag, as `dataset` makes them.
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
        group_size = self.find_group_size(rollouts, model.training)
        with prepare_to_score(model), torch.autocast(device.type, torch.bfloat16, enabled=self.args.bf16):
            step = self.score(rollouts, ModelEntry(model), device, group_size)
        if log_metric is not None:
            for name, values in columns_of(step.table, Term).items():
                log_metric(f"{self.__name__}/{name}", values.mean().item())
        return step.rewards.tolist()

    def find_group_size(self, rollouts: Sequence[Rollout], training: bool) -> int:
        """Return how many completions in adjacent places are compared; 1 where none are."""
        return 1

    def _trained_model(self) -> Any:
        """Return the model that is trained, without the wrapper of an adapter."""
        if self.model is None:
            raise InputError(f"The reward needs the model that is trained, but was not shown one. {HOW}")
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
        """Return the problem with the prompt as TRL has tokenised it."""
        opening = self.format.opening_tag + self.format.tags.separator
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


class LikelihoodRewardFunction(RLTRewardFunction):
    """A likelihood reward of TRL's completions: how probable the reference solution becomes after a thought.

    The thought ends at the first closing tag. TRL has no answer term: it trains what was sampled only.

    Args:
        pretrained: The model that is trained, as it is when training starts: its tokenizer and its format.
        scorer: Who reads the solution: "policy", the model that is trained, as it is at this step; or the
            name of a frozen model, with any tokenizer.
        reward: LogProbReward, RLPRReward, VeriFreeReward, NOVERReward, or another LikelihoodReward.
        tags: See `ExplanationScorer`.
        student_system_prompt: See `ExplanationScorer`.
        force_format: See `ExplanationScorer`.
        scorer_dtype: Type of the weights of a scorer by name.
        micro_batch_tokens: See `ExplanationScorer`.
        layout: How sequences share a forward; see `PolicyModule`.
        trust_remote_code: Run code that comes with a model.

    Example:
        `reward = LikelihoodRewardFunction(model, reward=RLPRReward())`, then as `RLTRewardFunction`.

    Raises:
        InputError: See `ExplanationScorer`.
    """

    __name__ = "likelihood"
    data_type = StudentLikelihoodData
    reward: LikelihoodReward

    def __init__(
        self,
        pretrained: str,
        scorer: str = POLICY,
        reward: LikelihoodReward = LogProbReward(),
        tags: str | TagStyle | None = None,
        student_system_prompt: str | None = None,
        force_format: bool = False,
        scorer_dtype: Dtype = "float32",
        micro_batch_tokens: int = 16384,
        layout: Layout = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(
            student=pretrained if scorer == POLICY else scorer,
            teacher=pretrained,
            reward=reward,
            tags=tags,
            student_system_prompt=student_system_prompt,
            force_format=force_format,
            student_dtype=scorer_dtype,
            micro_batch_tokens=micro_batch_tokens,
            layout=layout,
            trust_remote_code=trust_remote_code,
        )
        if reward.find_kl(temperature=1.0) is not None:
            raise InputError(
                "A reward must have no KL term for TRL, but this one has. Set its kl_weight to 0; "
                "TRL's own KL penalty is GRPOConfig.beta."
            )
        if scorer == POLICY:
            self.student.model = POLICY

    @property
    def temperature(self) -> float:
        """See `ExplanationScorer.temperature`."""
        return self.args.temperature

    def find_group_size(self, rollouts: Sequence[Rollout], training: bool) -> int:
        """See `RLTRewardFunction.find_group_size`.

        Raises:
            InputError: If a group is divided over processes.
        """
        if not self.reward.compares:
            return 1
        size = self.args.num_generations
        if not training:
            size = self.args.num_generations_eval or size
        rows = [rollout.problem.row for rollout in rollouts]
        if len(rows) % size or any(len(set(rows[i : i + size])) > 1 for i in range(0, len(rows), size)):
            raise InputError(
                f"{type(self.reward).__name__} compares the {size} completions of a prompt, so a process "
                f"must sample whole groups at once, but it has {len(rows)} completions that are not. Make "
                "per_device_train_batch_size a multiple of num_generations, and the one of evaluation too."
            )
        return size

    def _replace_prompt(self, problem: Problem, prompt: Any) -> Problem:
        """See `RLTRewardFunction._replace_prompt`; the scorer reads the prompt too: it must be the row's."""
        if isinstance(prompt, str) and prompt != self.build_prompt(problem):
            raise InputError(
                f"A prompt must be that of its row, which the scorer reads, but is {prompt[-40:]!r}. "
                "Make the data set with reward.dataset(rows)."
            )
        return super()._replace_prompt(problem, prompt)


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
