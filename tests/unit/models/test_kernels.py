"""Fused attention: our use of its interfaces, against a loop; how a kernel is chosen, checked and refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from slow_kernels import (
    CPU,
    SEGMENTS,
    AnyType,
    SlowFlashAttn,
    SlowOwnKernels,
    install,
    random_heads,
    row,
    tiny_qwen,
)
from tiny import StrictEntry
from torch import Tensor
from torch.nn.attention import _registry, current_flash_attention_impl, restore_flash_attention_impl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlt_lightning.models import kernels
from rlt_lightning.models.kernels import LOOP, choose_attention
from rlt_lightning.models.packed import compute_log_probs, verify_layout
from rlt_lightning.numerics.attention import (
    KERNELS,
    MergedAttention,
    Segments,
    looped_attention,
    segment_attention,
)
from rlt_lightning.numerics.varlen import FlashAttnKernel, PackedKernel, TorchKernel, varlen_limits
from rlt_lightning.types import InputError


def test_varlen_kernels_equal_a_loop_over_segments_in_value_and_gradient():
    inputs = random_heads()
    kernel = FlashAttnKernel(SlowFlashAttn(), "slow")
    for segments in (SEGMENTS, Segments((0, 5, 12, 40))):
        ours = MergedAttention.apply(*inputs, segments, 0.3, kernel)
        expected = looped_attention(*inputs, segments, 0.3)
        torch.testing.assert_close(ours, expected)
        gradient = torch.randn_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad(ours, inputs, gradient), torch.autograd.grad(expected, inputs, gradient)
        )


def test_heads_of_any_size_are_padded_for_the_kernel(monkeypatch: pytest.MonkeyPatch):
    sizes = []

    class Watched(SlowFlashAttn):
        def ranges(self, *limits: Any) -> Any:
            return super().ranges(*limits)

        def _wrapped_flash_attn_varlen_forward(self, q: Tensor, *args: Any, **options: Any) -> Any:
            sizes.append(q.shape[-1])
            return super()._wrapped_flash_attn_varlen_forward(q, *args, **options)

    monkeypatch.setitem(KERNELS, "cpu", AnyType(Watched(), "slow"))
    inputs = random_heads(size=10)
    ours, expected = segment_attention(*inputs, SEGMENTS, 0.3), looped_attention(*inputs, SEGMENTS, 0.3)
    torch.testing.assert_close(ours, expected)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, gradient), torch.autograd.grad(expected, inputs, gradient)
    )
    assert set(sizes) == {16}


class CopiesOfNumbers(TorchFunctionMode):
    """Counts tensors made of Python numbers: on a GPU each is a copy that waits."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.tensor, torch.as_tensor)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_no_layer_copies_numbers_to_the_device(gradient_checkpointing: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KERNELS, "cpu", AnyType(SlowFlashAttn(), "slow"))
    counts = {}
    for num_layers in (1, 4):
        model = tiny_qwen(num_layers).train()
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        packed = row()
        varlen_limits.cache_clear()
        with CopiesOfNumbers() as copies:
            compute_log_probs(model, packed)[0].sum().backward()
        counts[num_layers] = copies.count
    assert counts[1] == counts[4] == 4  # limits of queries and keys, of two parts


def test_launches_do_not_grow_with_the_number_of_segments():
    class Nothing(PackedKernel):
        name = "nothing"

        def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
            return torch.zeros_like(q), torch.zeros(q.shape[1], len(q), dtype=q.dtype)

        def gradients(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    class Launches(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found[str(func)] += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for boundaries in ((0, 20, 40), (0, *range(2, 41, 2))):
        inputs = random_heads()
        segments = Segments(boundaries)
        looped = Nothing()
        # The limits are made once per row.
        MergedAttention.apply(*inputs, segments, 0.3, looped)
        with Launches() as launches:
            MergedAttention.apply(*inputs, segments, 0.3, looped).sum().backward()
        counts.append(launches.found)
    assert counts[0] == counts[1]


# Choosing and refusing

GPU = torch.device("cuda")
# What a GPU's own kernel is called in the log.
OWN = "PyTorch's variable-length flash attention"


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a process in which nothing has been chosen yet."""
    monkeypatch.setattr(kernels, "SERVED", {})
    for device_type in ("cpu", "cuda"):
        monkeypatch.setitem(KERNELS, device_type, KERNELS[device_type])
    yield
    restore_flash_attention_impl(_raise_warn=False)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> SlowFlashAttn:
    slow = SlowFlashAttn()
    install(monkeypatch, "flash_attn")
    install(monkeypatch, "flash_attn.flash_attn_interface", slow)
    return slow


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """PyTorch's own kernels run on the CPU too."""
    own = SlowOwnKernels()
    yield
    own.remove()


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels are checked on the CPU, where PyTorch's own does not run."""
    plain_check = kernels.attention_fault

    def check_on_cpu(heads: kernels.Heads, device: torch.device) -> str | None:
        KERNELS["cpu"] = KERNELS["cuda"]
        return plain_check(heads, CPU)

    monkeypatch.setattr(kernels, "attention_fault", check_on_cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def install_fa3(monkeypatch: pytest.MonkeyPatch, error: float = 0.0) -> None:
    install(monkeypatch, "flash_attn_interface")
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: SlowOwnKernels(error))


def half_precision(**sizes: int) -> Any:
    return tiny_qwen(1, **sizes).to(torch.bfloat16)


def test_flash_attn_is_used_where_it_is_asked_for_and_right(flash_attn: SlowFlashAttn):
    model = tiny_qwen().to(torch.bfloat16)
    assert choose_attention(model, "flash_attn", CPU).startswith("flash-attn ")
    assert isinstance(KERNELS["cpu"], FlashAttnKernel)
    assert verify_layout(StrictEntry(model), "tiny", "shared_prefix") == "shared_prefix"


def test_a_kernel_that_is_wrong_is_refused_and_not_left_in_place(flash_attn: SlowFlashAttn):
    before = KERNELS["cpu"]
    flash_attn.error = 0.3
    with pytest.raises(
        InputError, match=r"attention flash_attn must .* off by 0\.\d+ of its norm\. Set another"
    ):
        choose_attention(half_precision(), "flash_attn", CPU)
    assert KERNELS["cpu"] is before


@pytest.mark.parametrize("error", [0.3, torch.nan])
def test_a_gpu_goes_on_with_the_next_kernel_and_says_why(
    error: float, flash_attn: SlowFlashAttn, own_kernels: None, h100: None
):
    flash_attn.error = error
    with pytest.warns(UserWarning, match="attention kernel 'flash_attn' is not used: a value or gradient is"):
        assert choose_attention(half_precision(), None, GPU) == OWN


def test_fa3_is_used_for_all_of_pytorchs_attention(monkeypatch: pytest.MonkeyPatch, h100: None):
    install_fa3(monkeypatch)
    assert choose_attention(half_precision(), None, GPU) == "FlashAttention-3"
    assert current_flash_attention_impl() == "FA3"


def test_fa3_that_is_wrong_leaves_the_process(
    flash_attn: SlowFlashAttn, monkeypatch: pytest.MonkeyPatch, h100: None
):
    install_fa3(monkeypatch, error=0.3)
    with pytest.warns(UserWarning, match="attention kernel 'fa3' is not used: a value or gradient is off"):
        assert choose_attention(half_precision(), None, GPU).startswith("flash-attn ")
    assert current_flash_attention_impl() is None
    # PyTorch's own is back, which has nothing for a CPU.
    with pytest.raises(NotImplementedError):
        MergedAttention.apply(*random_heads(), SEGMENTS, 0.3, TorchKernel())
    with pytest.raises(
        InputError, match="attention fa3 must be installed and equal a loop over segments, but"
    ):
        choose_attention(half_precision(), "fa3", GPU)
    assert current_flash_attention_impl() is None


def test_flash_attn_that_is_asked_for_does_not_leave_fa3_active(
    flash_attn: SlowFlashAttn, monkeypatch: pytest.MonkeyPatch, h100: None
):
    install_fa3(monkeypatch)
    choose_attention(half_precision(), "fa3", GPU)
    choose_attention(half_precision(), "flash_attn", GPU)
    assert current_flash_attention_impl() is None


def test_a_loop_computes_where_no_kernel_is_right(h100: None):
    with (
        pytest.warns(UserWarning, match="kernel 'torch' is not used: it fails with NotImplementedError"),
        pytest.warns(
            UserWarning, match="Our attention is a loop over segments, which is slow, since no kernel"
        ),
    ):
        assert choose_attention(half_precision(), None, GPU) == LOOP
    assert "cuda" not in KERNELS
    with pytest.raises(InputError, match="attention torch must be installed and equal a loop"):
        choose_attention(half_precision(), "torch", GPU)


@pytest.mark.parametrize("sizes", [(32, 64), (64, 32)])
def test_a_kernel_is_right_for_all_models_or_is_not_used(
    sizes: tuple[int, int], flash_attn: SlowFlashAttn, monkeypatch: pytest.MonkeyPatch, h100: None
):
    right = flash_attn.scores

    def scores(q: Tensor, *arguments: Any) -> Tensor:
        return right(q, *arguments) * (2 if q.shape[1] == 16 else 1)

    monkeypatch.setattr(flash_attn, "scores", scores)
    # Hidden states of 64 in 4 heads of 16 dimensions.
    with pytest.warns(UserWarning, match="attention kernel 'flash_attn' is not used"):
        names = [choose_attention(half_precision(hidden_size=size), None, GPU) for size in sizes]
    assert names[-1] == LOOP
    assert "cuda" not in KERNELS


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_fa3_is_left_out_on_cards_that_it_is_not_for(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, own_kernels: None, h100: None
):
    install_fa3(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_attention(half_precision(), None, GPU) == OWN
    assert current_flash_attention_impl() is None
