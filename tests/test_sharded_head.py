"""Log-probs through a language-model head whose weight lies in shards on two ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn

from rlt_lightning.models.packed import HeadOptions, head_log_probs
from rlt_lightning.numerics import token_log_probs

NUM_WORDS, SIZE = 1100, 6


class Headed(nn.Module):
    """As much of a transformers model as its head needs."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(SIZE, NUM_WORDS)

    @property
    def config(self) -> Any:
        return self

    def get_text_config(self) -> Any:
        return self

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return head_log_probs(self, hidden, targets, 0.7, HeadOptions(1))[0]


def example(rank: int) -> tuple[Headed, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Headed()
    torch.manual_seed(rank + 1)
    num_tokens = 300 + rank  # several tiles, and another length on every rank
    return model, torch.randn(num_tokens, SIZE, requires_grad=True), torch.randint(NUM_WORDS, (num_tokens,))


def expected_gradients() -> dict[str, Tensor]:
    """Of the mean of both ranks' losses, from full logits."""
    model, _, _ = example(0)
    for rank in range(2):
        _, hidden, targets = example(rank)
        (token_log_probs(model.lm_head(hidden), targets, 0.7).sum() / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def rank_main(rank: int, strategy: str) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model, hidden, targets = example(rank)
    expected = token_log_probs(model.lm_head(hidden), targets, 0.7)
    [expected_hidden_grad] = torch.autograd.grad(expected.sum(), hidden)
    names = [name for name, _ in model.named_parameters()]
    gathered = []
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (2,)))
        assert model.lm_head.weight.to_local().numel() == NUM_WORDS * SIZE // 2
        log_probs = model(hidden, targets)
        log_probs.sum().backward()
        gathered = [parameter.grad.full_tensor() for parameter in model.parameters()]
    else:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute
        deepspeed.init_distributed("gloo")
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        engine, *_ = deepspeed.initialize(
            model=model, config=config, optimizer=torch.optim.AdamW(model.parameters())
        )
        assert model.lm_head.weight.ds_tensor.numel() == NUM_WORDS * SIZE // 2
        assert model.lm_head.weight.numel() == 0
        log_probs = engine(hidden, targets)
        engine.backward(log_probs.sum())
        gathered = [deepspeed.utils.safe_get_full_grad(parameter) for parameter in model.parameters()]
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(hidden.grad, expected_hidden_grad)
    for name, ours, theirs in zip(names, gathered, expected_gradients().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3, msg=name)  # sums over 300 tokens
    torch.distributed.barrier()


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_log_probs_and_gradients_through_a_sharded_head(strategy: str, tmp_path: Path) -> None:
    if strategy == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed extra")
    ranks.call("test_sharded_head:rank_main", tmp_path, strategy)
