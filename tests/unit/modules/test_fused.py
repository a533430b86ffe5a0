"""Fused blocks, head and optimizer equal plain ones, are chosen by device, and are refused if wrong."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from cases import needs_compiler
from slow_kernels import CPU, liger, tiny_qwen
from tiny import StrictEntry
from torch import Tensor, nn

from rlt_lightning.checkpoints.io import place_step
from rlt_lightning.models import kernels as chosen_kernels
from rlt_lightning.models.kernels import Kernels, choose_head, compiled_head_fault, fuse_blocks
from rlt_lightning.models.packed import HeadOptions
from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.on_policy import get_frozen_ready
from rlt_lightning.modules.optimizer import OptimizerConfig, build_optimizer
from rlt_lightning.modules.policy import PolicyModule
from rlt_lightning.numerics import Divergence
from rlt_lightning.rewards import RLTReward
from rlt_lightning.strategies.sharding import Unsharded
from rlt_lightning.types import InputError


def test_liger_is_used_where_it_suits_and_is_wanted(monkeypatch: pytest.MonkeyPatch):
    liger(monkeypatch)
    gpu = torch.device("cuda")
    [what] = fuse_blocks(StrictEntry(tiny_qwen()), "tiny", Kernels(), gpu)
    assert what.startswith("RMSNorm, RoPE and SwiGLU by Liger")
    for model, wanted, device in (
        (tiny_qwen(hidden_act="gelu"), None, gpu),
        (tiny_qwen(), False, gpu),
        (tiny_qwen(), None, CPU),
    ):
        assert fuse_blocks(StrictEntry(model), "tiny", Kernels(liger=wanted), device) == []


def test_liger_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch):
    liger(monkeypatch, error=0.05)
    with pytest.raises(InputError, match=r"model\.kernels\.liger .* log-probs change by .* Set it to false"):
        fuse_blocks(StrictEntry(tiny_qwen()), "tiny", Kernels(), torch.device("cuda"))


def test_the_head_is_compiled_only_on_a_gpu_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chosen_kernels, "compiled_head_fault", lambda *_: None)
    assert choose_head(HeadOptions(), torch.float32, CPU) == HeadOptions(None, False)
    assert choose_head(HeadOptions(), torch.float32, torch.device("cuda")).compiled
    assert not choose_head(HeadOptions(compiled=False), torch.float32, torch.device("cuda")).compiled
    monkeypatch.setattr(chosen_kernels, "compiled_head_fault", lambda *_: "it is off by 2")
    with pytest.raises(InputError, match=r"it is off by 2.*Set model\.head\.compiled to false"):
        choose_head(HeadOptions(compiled=True), torch.float32, torch.device("cuda"))
    with pytest.warns(UserWarning, match="it is off by 2"):
        assert not choose_head(HeadOptions(), torch.float32, torch.device("cuda")).compiled


@pytest.mark.full
@needs_compiler
def test_a_compiled_head_passes_its_check_here():
    assert choose_head(HeadOptions(compiled=True), torch.float32, CPU, Divergence("forward")).compiled


def times_1_1(parts: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    return 1.1 * parts[0], parts[1]


# The exact KL of an RLT reward, and losses of distillation: a function that is compiled wrongly, and how.
MISCOMPILED: list[tuple[Divergence, str, Callable[[Any], Any]]] = [
    (Divergence("forward"), "add_kl_block", lambda sums: sums._replace(ratio=1.1 * sums.ratio)),
    (Divergence("forward"), "divergence_gradient", times_1_1),
    (Divergence("jsd"), "add_normalisers", lambda s: (s[0]._replace(normaliser=1.1 * s[0].normaliser), s[1])),
    (Divergence("jsd"), "tile_sums", times_1_1),
    (Divergence("jsd"), "divergence_gradient", times_1_1),
]


@pytest.mark.parametrize(("divergence", "function", "wrong"), MISCOMPILED)
def test_the_check_of_the_head_sees_a_wrong_divergence(
    divergence: Divergence, function: str, wrong: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
):
    def compiled_wrongly(right: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
        is_wrong = compiled and right.__name__ == function
        return (lambda *arguments: wrong(right(*arguments))) if is_wrong else right

    # By its module's name, since the package has a function of that name.
    module = import_module("rlt_lightning.numerics.divergence")
    monkeypatch.setattr(module, "choose_kernel", lambda function, compiled: function)
    monkeypatch.setattr("rlt_lightning.numerics.log_probs.choose_kernel", lambda function, compiled: function)
    assert compiled_head_fault(torch.float32, CPU, divergence) is None
    monkeypatch.setattr(module, "choose_kernel", compiled_wrongly)
    fault = compiled_head_fault(torch.float32, CPU, divergence)
    assert fault is not None
    assert "a value or gradient is off by" in fault


def module_on_a_gpu(head: HeadOptions, **more: Any) -> Any:
    """What the checks at the start of a run read of a module."""
    trainer = types.SimpleNamespace(
        training=False,
        precision_plugin=types.SimpleNamespace(forward_context=contextlib.nullcontext),
        strategy=types.SimpleNamespace(root_device=torch.device("cuda")),
    )
    options = {"kernels": Kernels(liger=False), "attn_implementation": None, "chosen_layout": "auto"}
    module = types.SimpleNamespace(trainer=trainer, chosen_head=head, head_loss=None, **options, **more)
    module.check_model = partial(PolicyModule.check_model, module)  # type: ignore[arg-type]
    return module


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_kernels, "choose_attention", lambda *_: "nothing")


@pytest.mark.parametrize(("estimator", "expected"), [("exact", Divergence("forward")), ("k1", None)])
def test_the_exact_kl_is_checked_where_the_reward_uses_it(
    estimator: Any, expected: Any, no_kernels: None, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []
    monkeypatch.setattr(chosen_kernels, "compiled_head_fault", lambda *choice: seen.append(choice[-1]))
    places = {"reference": None, "device": CPU, "sharding": Unsharded(None)}
    module = module_on_a_gpu(HeadOptions(), reward=RLTReward(kl_estimator=estimator), **places)
    get_frozen_ready(module, {"tiny": Model.frozen(StrictEntry(tiny_qwen()))})
    assert seen == [expected]


# The optimizer


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for number in steps:
        for i, parameter in enumerate(model.parameters()):
            numbers = torch.arange(parameter.numel()) * (i + number + 1.0)
            parameter.grad = torch.sin(numbers).view_as(parameter)
        optimizer.step()


def adamw(fused: bool | None, model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerConfig(1e-2, 0.1), model.named_parameters(), fused)


def a_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 7)


@pytest.mark.parametrize("saved", [True, None])
@pytest.mark.parametrize("restored", [True, None])
def test_fused_adamw_equals_plain_and_restores_either(saved: bool | None, restored: bool | None):
    model = a_layer()
    first = adamw(saved, model)
    stepped(first, model, range(3))
    second = adamw(restored, model)
    second.load_state_dict(first.state_dict())
    # How AdamW computes is the machine's, not the checkpoint's.
    assert {group["fused"] for group in second.param_groups} == {restored}
    assert {group["weight_decay"] for group in second.param_groups} == {0.1, 0.0}
    for state in second.state.values():
        assert state["step"].dtype == torch.float32
    stepped(second, model, range(3, 5))
    expected = a_layer()
    plain = adamw(None, expected)
    stepped(plain, expected, range(5))
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))


def test_steps_are_counted_where_the_optimizer_needs_them():
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    step = torch.tensor(7.0)
    for fused, device in ((True, "meta"), (None, "cpu")):
        optimizer = types.SimpleNamespace(param_groups=[{"fused": fused, "params": [parameter]}])
        assert place_step(optimizer, parameter, step).device.type == device
    assert place_step(optimizer, parameter, 7) == 7  # bitsandbytes
    assert place_step(optimizer, parameter, step) is not step  # one count per parameter: steps add 1 in place
