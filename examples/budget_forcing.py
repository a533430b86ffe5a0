r"""Force the budget of a thought in `rlt test`, as s1 does (arXiv:2501.19393, section 3.1).

    the thought ends, by its closing tag or with the turn   "Wait" takes its place, at most num_waits times
    the thought has max_thinking_tokens                     it is closed, and the answer opened
    the thought is closed                                   the answer is sampled, up to max_completion_length

A response depends only on its seed. A vLLM worker that is lost begins the responses of its batch again.
Run: PYTHONPATH=examples rlt test --config laptop/evaluate --rollouts.engine budget_forcing.HFBudgetForcing \
  --rollouts.engine.thought_close '</think>' --rollouts.engine.answer_opening $'\n</think>\n\n<solution>\n'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlt_lightning.engines import HFEngine, SampleRequest, Sampling, VLLMEngine
from rlt_lightning.numerics.seeds import mix_seed
from rlt_lightning.tags import start_of_tag
from rlt_lightning.types import Completion, FinishReason, InputError


@dataclass
class Draft:
    """A response while its parts are sampled: "length", its thought goes on; "stop", its answer is open."""

    prompt: list[int]
    seed: int
    limit: int
    token_ids: list[int] = field(default_factory=list)
    state: FinishReason = "length"


class BudgetForcing:
    """Ask the engine that follows it among a class's bases for each response in parts.

    Args:
        num_waits: How often a thought that would end goes on after "Wait".
        max_thinking_tokens: Most tokens of a thought, tags and waits included.
        thought_close: The closing tag of a thought.
        answer_opening: What ends a thought that is too long, through the beginning of the answer.
        kwargs: Arguments of the engine.
    """

    tokenizer: Any

    def __init__(
        self,
        num_waits: int = 2,
        max_thinking_tokens: int = 24576,
        thought_close: str = "<|end_of_thought|>",
        answer_opening: str = "\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_waits, self.max_thinking_tokens = num_waits, max_thinking_tokens
        self.thought_close, self.answer_opening = thought_close, answer_opening

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine.sample`. Ranks with a model in shards call it equally often, so also without drafts."""
        if stop:
            raise InputError("Budget forcing is for rlt test alone. Set rollouts.engine to another engine.")
        wait, opening = self.tokenizer(["Wait", self.answer_opening], add_special_tokens=False)["input_ids"]
        drafts = [Draft(r.prompt, seed, r.limit(sampling)) for r in requests for seed in r.seeds]
        for part in range(self.num_waits + 1):
            for draft in self.extend(drafts, sampling, self.thought_close, part):
                if part < self.num_waits and draft.state != "length":
                    ids, is_tag = draft.token_ids, draft.state == "stop"
                    end = start_of_tag(self.tokenizer, ids, self.thought_close) if is_tag else len(ids) - 1
                    draft.token_ids, draft.state = ids[:end] + wait, "length"
        for draft in drafts:
            if draft.state == "length" and len(draft.token_ids) + len(opening) < draft.limit:
                draft.token_ids, draft.state = draft.token_ids + opening, "stop"
        list(self.extend(drafts, sampling, "", self.num_waits + 1))
        for index, draft in enumerate(drafts):
            yield index, Completion(draft.token_ids, None, "eos" if draft.state == "eos" else "length")

    def extend(self, drafts: list[Draft], sampling: Sampling, stop: str, part: int) -> Iterator[Draft]:
        """Sample the next part of each draft that thinks or, without `stop`, has an open answer."""
        most = self.max_thinking_tokens if stop else sampling.max_completion_length
        state = "length" if stop else "stop"
        rooms = [(d, min(d.limit, most) - len(d.token_ids)) for d in drafts if d.state == state]
        asked = [(d, n) for d, n in rooms if n > 0]
        requests = [SampleRequest(d.prompt + d.token_ids, mix_seed(d.seed, part), 1, n) for d, n in asked]
        for index, completion in super().sample(requests, sampling, stop):  # type: ignore[misc]
            draft, _ = asked[index]
            draft.token_ids, draft.state = draft.token_ids + completion.token_ids, completion.finish_reason
            yield draft


class HFBudgetForcing(BudgetForcing, HFEngine):
    """In the process of `rlt test`."""


class VLLMBudgetForcing(BudgetForcing, VLLMEngine):
    """By vLLM workers."""
