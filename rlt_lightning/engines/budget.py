"""Budget forcing (s1, arXiv:2501.19393, section 3): lengthen or cut a thought while it is sampled.

    thought ends too early   its closing tag becomes "Wait" ─▶ sample more of the thought
    thought is too long      cut, closed, solution opened ───▶ sample the answer
    thought ends in between  kept as it is ──────────────────▶ sample the answer

Appended text is added as token ids, so the sampled tokens are never tokenised again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlt_lightning.engines.base import SEED_MASK, Engine, SampleRequest, Sampling, sample_all
from rlt_lightning.tags import start_of_tag
from rlt_lightning.types import Completion, FinishReason, InputError, require_limits


@dataclass(frozen=True)
class BudgetForcing:
    """How many tokens a model thinks before it answers.

    Args:
        min_thinking_tokens: A thought that ends with fewer continues after `wait`; 0 lets every thought end.
        max_thinking_tokens: A thought of so many tokens is cut; None cuts none. Appended tokens count, too.
        wait: Text that is appended in place of the closing tag.
        max_waits: How often `wait` is appended to one thought, at most; then it may end, however short.
        min_answer_tokens: Tokens left for the answer of a thought that is cut; a thought that ends by itself
            may leave fewer.
    """

    min_thinking_tokens: int = 0
    max_thinking_tokens: int | None = None
    wait: str = "Wait"
    max_waits: int = 8
    min_answer_tokens: int = 256

    def __post_init__(self) -> None:
        longest = self.max_thinking_tokens
        limits = {
            "min_thinking_tokens >= 0": self.min_thinking_tokens >= 0,
            "max_thinking_tokens >= 1": longest is None or longest >= 1,
            "max_thinking_tokens >= min_thinking_tokens": longest is None
            or longest >= self.min_thinking_tokens,
            "a wait that has text": bool(self.wait),
            "max_waits >= 0": self.max_waits >= 0,
            "min_answer_tokens >= 1": self.min_answer_tokens >= 1,
        }
        require_limits(self, limits, "Budget forcing must satisfy", "Correct the budget")

    def require_room(self, sampling: Sampling, num_opening: int) -> None:
        """Check that a thought, the `num_opening` tokens that cut it and its answer fit.

        Raises:
            InputError: If they do not.
        """
        thought = self.max_thinking_tokens or self.min_thinking_tokens
        needed = thought + num_opening + self.min_answer_tokens
        if thought and needed > sampling.max_completion_length:
            raise InputError(
                f"A response must hold a thought of {thought} tokens, {num_opening} of tags and an answer of "
                f"{self.min_answer_tokens}, {needed} in all, but sampling.max_completion_length, or what the "
                f"context leaves of it, is {sampling.max_completion_length}. Raise it, or lower the budget."
            )

    def needs_wait(self, num_thinking_tokens: int, num_waits: int) -> bool:
        """Return whether a thought that ends here, after so many waits, must continue."""
        return num_thinking_tokens < self.min_thinking_tokens and num_waits < self.max_waits


@dataclass(frozen=True)
class BudgetedCompletion:
    """The tokens after the opened thought: thought, closing tag and answer, appended tokens included."""

    token_ids: list[int]
    log_probs: list[float | None] | None  # nats, as `Completion` has them; None for tokens that were appended
    finish_reason: FinishReason  # never "stop": an answer ends with eos or at the limit
    num_thinking_tokens: int  # before the closing tag, or before the appended tokens that cut the thought
    num_waits: int  # how often `wait` was appended
    cut: bool  # whether it was ended at max_thinking_tokens


@dataclass
class BudgetedDraft:
    """One response while it is sampled."""

    prompt: list[int]
    seeds: random.Random  # the response's own stream: one seed for each part that an engine samples
    limit: int  # tokens at most
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    num_thinking_tokens: int = 0
    num_waits: int = 0
    cut: bool = False

    def add_sampled(self, completion: Completion, num_tokens: int) -> None:
        """Append the first tokens of a completion."""
        self.token_ids += completion.token_ids[:num_tokens]
        log_probs = completion.log_probs
        self.log_probs += [None] * num_tokens if log_probs is None else log_probs[:num_tokens]
        self.finish_reason = completion.finish_reason

    def add_given(self, token_ids: list[int]) -> None:
        """Append tokens that nobody sampled."""
        self.token_ids += token_ids
        self.log_probs += [None] * len(token_ids)

    def has_answer(self) -> bool:
        """Return whether the thought is closed and there is room for an answer."""
        return (self.cut or self.finish_reason == "stop") and len(self.token_ids) < self.limit

    def to_completion(self) -> BudgetedCompletion:
        """Return the finished response."""
        known = any(log_prob is not None for log_prob in self.log_probs)
        return BudgetedCompletion(
            token_ids=self.token_ids,
            log_probs=self.log_probs if known else None,
            # A thought whose closing tag took the last token has come to the limit, too.
            finish_reason="eos" if self.finish_reason == "eos" else "length",
            num_thinking_tokens=self.num_thinking_tokens,
            num_waits=self.num_waits,
            cut=self.cut,
        )


def sample_with_budget(
    engine: Engine,
    tokenizer: Any,
    prompts: list[list[int]],
    sampling: Sampling,
    num_completions: int,
    seeds: list[int],
    budget: BudgetForcing,
    thought_close: str,
    answer_opening: list[int],
    limits: list[int] | None = None,
    recover: Callable[[], None] | None = None,
) -> list[list[BudgetedCompletion]]:
    """Sample `num_completions` responses per prompt, each with its thought within the budget.

    Args:
        engine: Started, with the weights that are to sample.
        tokenizer: The model's tokenizer.
        prompts: P prompts, token ids, through the opened thought.
        sampling: `max_completion_length` counts thought, tags and answer.
        num_completions: Responses per prompt.
        seeds: One per prompt. A response depends only on its prompt's seed and its number, whatever else is
            sampled at the same time.
        budget: Limits of the thoughts.
        thought_close: The tag that closes a thought.
        answer_opening: Tokens that cut a thought, closing tag through opened solution.
        limits: Tokens of a response at most, one per prompt; None: sampling.max_completion_length for all.
        recover: See `sample_all`.

    Returns:
        P lists of `num_completions`. A thought that ends with an end-of-sequence token past the minimum, or
        fills max_completion_length without a max_thinking_tokens, is all there is: it has no answer.

    Raises:
        InputError: If the longest thought and its answer do not fit into the smallest limit.
    """
    limits = limits or [sampling.max_completion_length] * len(prompts)
    smallest = replace(sampling, max_completion_length=min(limits))
    budget.require_room(smallest, len(answer_opening))
    wait = tokenizer(budget.wait, add_special_tokens=False)["input_ids"]
    # A thought that ends just in time needs room for its closing tag.
    most = budget.max_thinking_tokens and budget.max_thinking_tokens + len(answer_opening)
    drafts = [
        BudgetedDraft(prompt, random.Random(f"{seed}/{number}"), limit)
        for prompt, seed, limit in zip(prompts, seeds, limits, strict=True)
        for number in range(num_completions)
    ]
    extend = partial(extend_thought, budget=budget, wait=wait, answer_opening=answer_opening)
    thinking = drafts
    while thinking:
        pieces = continue_drafts(engine, thinking, sampling, most, thought_close, recover)
        bodies = [count_body_tokens(tokenizer, piece, thought_close) for piece in pieces]
        rows = zip(thinking, pieces, bodies, strict=True)
        thinking = [draft for draft, piece, num_body in rows if extend(draft, piece, num_body)]
    answering = [draft for draft in drafts if draft.has_answer()]
    answers = continue_drafts(engine, answering, sampling, None, "", recover)
    for draft, answer in zip(answering, answers, strict=True):
        draft.add_sampled(answer, len(answer.token_ids))
    done = [draft.to_completion() for draft in drafts]
    return [done[i : i + num_completions] for i in range(0, len(done), num_completions)]


def extend_thought(
    draft: BudgetedDraft,
    completion: Completion,
    num_body: int,
    budget: BudgetForcing,
    wait: list[int],
    answer_opening: list[int],
) -> bool:
    """Add a sampled piece to a draft's thought, and return whether the thought continues.

    Args:
        draft: The draft, changed in place.
        completion: The piece.
        num_body: Tokens of the piece before its closing tag.
        budget: Limits of the thoughts.
        wait: Tokens that make a model think on.
        answer_opening: Tokens that cut a thought, closing tag through opened solution.
    """
    longest = budget.max_thinking_tokens or draft.limit
    num_thinking = len(draft.token_ids) + num_body
    if num_thinking > longest:
        draft.add_sampled(completion, longest - len(draft.token_ids))
        draft.num_thinking_tokens, draft.cut = longest, True
        draft.add_given(answer_opening)
        return False
    if budget.needs_wait(num_thinking, draft.num_waits) and num_thinking + len(wait) < longest:
        draft.add_sampled(completion, num_body)
        draft.num_waits += 1
        draft.add_given(wait)
        return True
    draft.add_sampled(completion, len(completion.token_ids))
    draft.num_thinking_tokens = num_thinking
    return False


def continue_drafts(
    engine: Engine,
    drafts: list[BudgetedDraft],
    sampling: Sampling,
    num_tokens: int | None,
    stop: str,
    recover: Callable[[], None] | None,
) -> list[Completion]:
    """Sample the next part of each draft, which then has at most `num_tokens`, or its own limit if None."""
    if not drafts:
        return []
    requests = [
        SampleRequest(
            draft.prompt + draft.token_ids,
            seed=draft.seeds.getrandbits(SEED_MASK.bit_length()),
            max_tokens=(num_tokens or draft.limit) - len(draft.token_ids),
        )
        for draft in drafts
    ]
    return [completion for [completion] in sample_all(engine, requests, sampling, stop, recover)]


def count_body_tokens(tokenizer: Any, completion: Completion, tag: str) -> int:
    """Return the number of a completion's tokens before its end tag or end-of-sequence token."""
    if completion.finish_reason == "stop":
        return start_of_tag(tokenizer, completion.token_ids, tag)
    return len(completion.token_ids) - (completion.finish_reason == "eos")
