"""Log-probs and divergences through language-model heads whose weights lie in shards on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
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
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(teacher, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
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
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    if strategy == "zero3":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute
        deepspeed.init_distributed("gloo")
    model, hidden, targets = example(rank)
    compute, slow = log_probs, slow_log_probs
    if what != "log_probs":
        kind, teacher = what.split()
        compute = Distilled(kind, sharded_teacher(strategy) if teacher == "frozen" else None)
        slow = compute.slow
    expected = slow(model, hidden, targets)
    [expected_hidden_grad] = torch.autograd.grad(expected.sum(), hidden)
    gathered = []
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        assert model.lm_head.weight.to_local().numel() == NUM_WORDS * SIZE // 2
        found = model(compute, hidden, targets)
        found.sum().backward()
        gathered = [parameter.grad.full_tensor() for parameter in model.lm_head.parameters()]
    else:
        engine, *_ = deepspeed.initialize(
            model=model, config=ZERO3, optimizer=torch.optim.AdamW(model.parameters())
        )
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


def through_a_sharded_head(strategy: str, tmp_path: Path, what: str) -> None:
    if strategy == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed extra")
    ranks.call(rank_main, tmp_path, strategy, what)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_log_probs_and_gradients_through_a_sharded_head(strategy: str, tmp_path: Path) -> None:
    through_a_sharded_head(strategy, tmp_path, "log_probs")


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
@pytest.mark.parametrize("teacher", ["frozen", "live"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_divergence_of_two_sharded_heads(strategy: str, teacher: str, kind: str, tmp_path: Path) -> None:
    through_a_sharded_head(strategy, tmp_path, f"{kind} {teacher}")
