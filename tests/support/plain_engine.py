"""Sample in the slow and obvious way; HFEngine must sample the same tokens.

One batch after the other, transformers' own cache, a prompt's keys and values repeated for each completion,
and float64 probabilities of the whole vocabulary. test_decoding.py compares, benchmarks/generate.py measures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sampling import numbered
from torch import Tensor

from rlt_lightning.engines import HFEngine, SampleRequest, Sampling
from rlt_lightning.engines.hf import draw_uniforms, truncate
from rlt_lightning.models.template import find_eos_token_ids
from rlt_lightning.tags import StopWatcher
from rlt_lightning.types import Completion, FinishReason


@dataclass
class Draft:
    uniforms: Tensor
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    @property
    def unfinished(self) -> bool:
        return self.finish_reason == "length" and len(self.token_ids) < len(self.uniforms)


class PlainEngine(HFEngine):
    """HFEngine as it was before it had a cache of its own."""

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """Sample so many requests at once as max_sequences allows; all of them want equally many."""
        per_turn = max(1, self.max_sequences // requests[0].num_completions)
        was_training = self.model.training
        self.model.eval()
        groups: list[list[Completion]] = []
        for start in range(0, len(requests), per_turn):
            groups += self.sample_turn(requests[start : start + per_turn], sampling, stop)
        self.model.train(was_training)
        yield from numbered(groups)

    @torch.no_grad()
    def sample_turn(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> list[list[Completion]]:
        num_completions = requests[0].num_completions
        drafts = [
            Draft(uniforms, request.seed)
            for request in requests
            for uniforms in draw_uniforms(request.seed, num_completions, request.limit(sampling))
        ]
        prompts = [request.prompt for request in requests]
        logits, cache, history, mask = self.repeated_prompts(prompts, num_completions)
        watcher = StopWatcher(self.tokenizer, stop, find_eos_token_ids(self.model, self.tokenizer))
        active = list(range(len(drafts)))
        for step in itertools.count():
            uniforms = torch.stack([drafts[i].uniforms[step] for i in active])
            tokens, log_probs = draw_plainly(logits.float(), history, uniforms, sampling)
            for i, token, log_prob in zip(active, tokens.tolist(), log_probs.tolist(), strict=True):
                drafts[i].token_ids.append(token)
                drafts[i].log_probs.append(log_prob)
                drafts[i].finish_reason = watcher.finish_reason(drafts[i].token_ids)
            keep = [j for j, i in enumerate(active) if drafts[i].unfinished]
            if not keep:
                break
            history = torch.cat([history, tokens[:, None]], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
            if len(keep) < len(active):
                rows = torch.tensor(keep)
                history, mask, tokens = history[rows], mask[rows], tokens[rows]
                cache.batch_select_indices(rows)
                active = [active[j] for j in keep]
            logits = self.model(
                input_ids=tokens[:, None],
                attention_mask=mask,
                position_ids=mask.sum(dim=1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        done = [Completion(d.token_ids, d.log_probs, d.finish_reason, d.seed) for d in drafts]
        return [done[i : i + num_completions] for i in range(0, len(done), num_completions)]

    def repeated_prompts(
        self, prompts: list[list[int]], num_completions: int
    ) -> tuple[Tensor, Any, Tensor, Tensor]:
        length = max(map(len, prompts))
        # Left padding with the first token: the repetition penalty then sees nothing new.
        history = torch.tensor([[prompt[0]] * (length - len(prompt)) + prompt for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = (torch.arange(length) >= length - lengths[:, None]).long()
        output = self.model(
            input_ids=history,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        output.past_key_values.batch_repeat_interleave(num_completions)
        logits, history, mask = (
            t.repeat_interleave(num_completions, dim=0) for t in (output.logits[:, -1], history, mask)
        )
        return logits, output.past_key_values, history, mask


def draw_plainly(
    logits: Tensor, history: Tensor, uniforms: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    scaled = logits / (sampling.temperature or 1.0)
    filtered = truncate(logits, history, sampling)
    if sampling.temperature == 0:
        tokens = filtered.argmax(dim=-1)
    else:
        cumulative = filtered.double().softmax(dim=-1).cumsum(dim=-1)  # (n, V)
        targets = uniforms[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)  # the first sum above u
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, scaled.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
