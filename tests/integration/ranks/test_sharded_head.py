"""Log-probs and divergences through language-model heads whose weights lie in shards on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from sharded import join_ranks, shard
from slow_logits import slow_logits, token_log_probs
from torch import Tensor, nn

from rlt_lightning.models.packed import HeadOptions, ModelHead, head_divergence, head_log_probs
from rlt_lightning.numerics import Divergence
from rlt_lightning.numerics.divergence import divergence
from rlt_lightning.numerics.head import LogitScale
from rlt_lightning.strategies.sharding import ZeRO3

NUM_WORDS, SIZE = 1100, 6


class Headed(nn.Module):
    """As much of a transformers model as its head needs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(SIZE, SIZE)
        self.lm_head = nn.Linear(SIZE, NUM_WORDS)

    @property
    def config(self) -> Any:
        return self

    def get_text_config(self) -> Any:
        return self

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return function(self, *arguments)


def example(rank: int) -> tuple[Headed, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Headed()
    torch.manual_seed(rank + 1)
    num_tokens = 300 + rank  # several tiles, and another length on every rank
    return model, torch.randn(num_tokens, SIZE, requires_grad=True), torch.randint(NUM_WORDS, (num_tokens,))


def log_probs(model: Headed, hidden: Tensor, targets: Tensor) -> Tensor:
    return head_log_probs(model, hidden, targets, 0.7, HeadOptions(1))[0]


def slow_log_probs(model: Headed, hidden: Tensor, targets: Tensor) -> Tensor:
    return token_log_probs(model.lm_head(hidden), targets, 0.7)


OPTIONS = {
    "reverse": Divergence("reverse"),
    "forward": Divergence("forward"),
    "jsd": Divergence("jsd", beta=0.3),
}
EXCHANGED = 3, 1050


class Distilled:
    """The divergence from a teacher: another model, or with None the student as it is."""

    def __init__(self, kind: str, run_teacher: Callable[..., Tensor] | None) -> None:
        self.options, self.run_teacher = OPTIONS[kind], run_teacher

    def __call__(self, model: Headed, hidden: Tensor, targets: Tensor) -> Tensor:
        run = self.run_teacher or (lambda function: function(model))
        with torch.no_grad():
            teacher_hidden = run(lambda teacher: teacher.body(hidden.flip(0)))

        def with_teacher(teacher: Headed) -> Tensor:
            heads = ModelHead(model, 0.7), hidden, ModelHead(teacher, 0.9, EXCHANGED), teacher_hidden
            return head_divergence(*heads, self.options, HeadOptions(1))

        return run(with_teacher)

    def slow(self, model: Headed, hidden: Tensor, targets: Tensor) -> Tensor:
        teacher = teacher_model() if self.run_teacher else model
        with torch.no_grad():
            states, head = teacher.body(hidden.flip(0)), teacher.lm_head
            scale = LogitScale(exchanged=EXCHANGED)
            teacher_logits = slow_logits(states, head.weight, head.bias, scale)
        return divergence(model.lm_head(hidden), teacher_logits, self.options, 0.7, 0.9)


def teacher_model() -> Headed:
    torch.manual_seed(3)
    return Headed().requires_grad_(False)


def expected_gradients(slow: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Of the mean of both ranks' losses, from full logits."""
    model, _, _ = example(0)
    for rank in range(2):
        (slow(model, *example(rank)[1:]).sum() / 2).backward()
    return {name: parameter.grad for name, parameter in model.lm_head.named_parameters()}


def sharded_teacher(strategy: str) -> Callable[..., Tensor]:
    teacher = teacher_model()
    if strategy == "fsdp2":
        shard(teacher)
        assert teacher.lm_head.weight.to_local().numel() == NUM_WORDS * SIZE // 2
        return teacher
    run = ZeRO3(SimpleNamespace(config=ZERO3)).freeze(teacher)
    assert teacher.lm_head.weight.ds_tensor.numel() == NUM_WORDS * SIZE // 2
    assert teacher.lm_head.weight.numel() == 0
    return run


ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def rank_main(rank: int, strategy: str, what: str) -> None:
    join_ranks(rank, strategy)
    model, hidden, targets = example(rank)
    compute, slow = log_probs, slow_log_probs
    if what != "log_probs":
        kind, teacher = what.split()
        compute = Distilled(kind, sharded_teacher(strategy) if teacher == "frozen" else None)
        slow = compute.slow
    expected = slow(model, hidden, targets)
    [expected_hidden_grad] = torch.autograd.grad(expected.sum(), hidden)
    if strategy == "fsdp2":
        shard(model)
        assert model.lm_head.weight.to_local().numel() == NUM_WORDS * SIZE // 2
        found = model(compute, hidden, targets)
        found.sum().backward()
        gathered = [parameter.grad.full_tensor() for parameter in model.lm_head.parameters()]
    else:
        import deepspeed

        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, config=ZERO3, optimizer=optimizer)
        assert model.lm_head.weight.ds_tensor.numel() == NUM_WORDS * SIZE // 2
        assert model.lm_head.weight.numel() == 0
        found = engine(compute, hidden, targets)
        engine.backward(found.sum())
        gathered = [deepspeed.utils.safe_get_full_grad(parameter) for parameter in model.lm_head.parameters()]
    if strategy == "zero3" and what.endswith("frozen"):
        assert compute.run_teacher.lm_head.weight.numel() == 0  # freed after the backward
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(hidden.grad, expected_hidden_grad)
    for ours, (name, theirs) in zip(gathered, expected_gradients(slow).items(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3, msg=name)  # sums over 300 tokens
    torch.distributed.barrier()


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
@pytest.mark.parametrize("what", ["log_probs", *map(" ".join, product(OPTIONS, ("frozen", "live")))])
def test_values_and_gradients_through_sharded_heads(what: str, strategy: str, tmp_path: Path) -> None:
    ranks.call(rank_main, tmp_path, strategy, what)
