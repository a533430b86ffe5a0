"""Which kernel computes our attention: chosen at the start of a run, checked against a loop over segments.

One kernel serves all models of a process, since FlashAttention-3 takes the place of PyTorch's own for all of
them. So each choice is checked with the heads of every model that has come so far.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from rlt_lightning.models.attention import SEGMENT_ATTENTION
from rlt_lightning.models.checks import failure_of, relative_distance
from rlt_lightning.models.packed import computing_dtype
from rlt_lightning.numerics.attention import (
    KERNELS,
    Kernel,
    Segments,
    SharedPrefix,
    looped_attention,
    segment_attention,
)
from rlt_lightning.numerics.varlen import FlashAttnKernel, TorchKernel
from rlt_lightning.types import InputError

AttentionKernel = Literal["fa3", "flash_attn", "torch"]
# From the fastest to the one that is always there.
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = ("fa3", "flash_attn", "torch")
LOOP = "a loop over segments"


class Heads(NamedTuple):
    """What a model asks of a kernel."""

    num_queries: int
    num_keys: int
    size: int  # dimensions of a head
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Any) -> Heads:
        """Return the heads of a model, and the type in which it computes."""
        config = model.config.get_text_config()
        num_keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_attention_heads, num_keys, size, computing_dtype(model))


# The heads that the kernel of a type of device must be right for, in the order in which they came.
SERVED: dict[str, dict[Heads, None]] = {}


def missing(name: AttentionKernel, device: torch.device) -> str | None:
    """Return why a kernel is not available here, or None."""
    if name == "flash_attn" and find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if name == "fa3" and find_spec("flash_attn_interface") is None:
        return "FlashAttention-3 (the module flash_attn_interface) is not installed"
    if name == "fa3" and (device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9):
        return "FlashAttention-3 is for GPUs of compute capability 9 (H100, H200)"
    return None


def attention_kernel(name: AttentionKernel) -> Kernel:
    """Return a kernel of our attention by its name; "fa3" replaces PyTorch's in the whole process."""
    restore_flash_attention_impl(_raise_warn=False)
    if name == "flash_attn":
        interface = import_module("flash_attn.flash_attn_interface")
        return FlashAttnKernel(interface, f"flash-attn {package_version('flash-attn')}")
    if name == "torch":
        return TorchKernel()
    activate_flash_attention_impl("FA3")
    return TorchKernel("FlashAttention-3")


def choose_attention(model: Any, wanted: AttentionKernel | None, device: torch.device) -> str:
    """Choose the kernel of our attention for this process, and return its name.

    A default that is wrong is left out with a warning. If none is right, a loop over segments computes.

    Raises:
        InputError: If the wanted kernel is not available, does not suit the model or is wrong.
    """
    if model.config._attn_implementation != SEGMENT_ATTENTION:
        return f"transformers' {model.config._attn_implementation}"
    if wanted is None and device.type != "cuda":
        return KERNELS[device.type].name if device.type in KERNELS else LOOP
    heads = Heads.of(model)
    if not TorchKernel().supports(heads.dtype, heads.size):
        found = f"{heads.dtype} and heads of {heads.size} dimensions"
        if wanted is None:
            return f"{LOOP} (there is no kernel for {found})"
        raise InputError(
            f"model.kernels.attention {wanted} needs half precision and heads of at most 256 dimensions, but "
            f"this model has {found}. For half precision set trainer.precision to bf16-mixed, else leave it "
            "out."
        )
    SERVED.setdefault(device.type, {})[heads] = None
    for name in (wanted,) if wanted else ATTENTION_KERNELS:
        reason = missing(name, device)
        fault = reason or failure_of(partial(install_attention, name, device))
        if fault is None:
            return KERNELS[device.type].name
        if wanted is not None:
            raise InputError(
                f"model.kernels.attention {name} must be installed and equal {LOOP}, but {fault}. Set "
                "another one, or leave it out."
            )
        # A kernel that is not installed needs no warning unless the settings ask for it.
        if reason is None:
            rank_zero_warn(f"The attention kernel '{name}' is not used: {fault}.")
    KERNELS.pop(device.type, None)
    rank_zero_warn(
        f"Our attention is {LOOP}, which is slow, since no kernel is right. To use transformers' attention, "
        "set model.attn_implementation to sdpa."
    )
    return LOOP


def install_attention(name: AttentionKernel, device: torch.device) -> str | None:
    """Put a kernel in place; if it has a fault, take it out again and return the fault."""
    before = KERNELS.get(device.type)
    fault: str | None = "its check did not end"
    try:
        KERNELS[device.type] = attention_kernel(name)
        faults = (attention_fault(heads, device) for heads in SERVED[device.type])
        fault = next((found for found in faults if found is not None), None)
    finally:
        if fault is not None:
            restore_flash_attention_impl(_raise_warn=False)
            KERNELS.pop(device.type, None)
            if before is not None:
                KERNELS[device.type] = before
    return fault


@torch.inference_mode(False)
def attention_fault(heads: Heads, device: torch.device) -> str | None:
    """Compare value and gradients of the device's kernel with the loop over segments, in fp32."""
    segments = Segments((0, 130, 150, 290, 333), (SharedPrefix(0, 130, 290),))
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(
        torch.randn(num, 333, heads.size, generator=generator).to(device, heads.dtype)
        for num in (heads.num_queries, heads.num_keys, heads.num_keys)
    )
    options: dict[str, Any] = {"segments": segments, "scale": heads.size**-0.5}
    ours, plain = partial(segment_attention, **options), partial(looped_attention, **options)
    distance = relative_distance(ours, plain, inputs)
    return None if distance is None else f"a value or gradient is off by {distance:.2g} of its norm"


def package_version(package: str) -> str:
    """Return a package's version, or "of unknown version"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
