"""Choose a run's kernels by device and installed packages, check them at the start, name them in the log.

               chosen where nothing is set                   checked against
    attention  flash-attn if installed, else PyTorch's       a loop over segments in fp32 (value, gradients)
    liger      on a GPU with liger-kernel                    the model's log-probs without it
    head       compiled on a GPU, if it is right             the head as it is (value, gradients), with the
                                                             divergence that the run computes
    AdamW      fused on a GPU                                nothing

A kernel that is wrong ends the run with an error that names its setting. By default, a warning says so and
attention takes the next kernel, at last the loop; the head is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from rlt_lightning.models.attention import SEGMENT_ATTENTION, get_attention
from rlt_lightning.models.packed import HeadOptions, call_model, compute_log_probs, computing_dtype
from rlt_lightning.numerics.attention import (
    KERNELS,
    Segments,
    SharedPrefix,
    looped_attention,
    segment_attention,
)
from rlt_lightning.numerics.divergence import Divergence, linear_divergence
from rlt_lightning.numerics.head import Head, full_precision
from rlt_lightning.numerics.log_probs import linear_log_probs
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence
from rlt_lightning.numerics.varlen import FlashAttnKernel, TorchKernel
from rlt_lightning.run.console import announce
from rlt_lightning.types import InputError, first_line, missing_package

AttentionKernel = Literal["flash_attn", "torch"]
LOOP = "a loop over segments"
WRONG: set[str] = set()  # kernels that no model of this process takes by default, since all share one
# Architectures whose norms multiply by the weight after rounding, as Liger's "llama" mode does.
LIGER_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Kernels:
    """Faster kernels for the same numbers. Each of them is checked at the start of a run.

    Args:
        attention: The kernel of our attention on an NVIDIA GPU in half precision: "flash_attn" (the package
            flash-attn) or "torch"; None: the first of them that is installed and right, else a slow loop.
        liger: Compute RMSNorm, RoPE and SwiGLU with liger-kernel; None: on a GPU where it is installed and
            suits the architecture.
    """

    attention: AttentionKernel | None = None
    liger: bool | None = None


# How a fault is found


def find_failure(function: Callable[[], str | None]) -> str | None:
    """Return the fault that a check finds, or the error that it raises.

    Each library of kernels and each compiler has other error classes, so every class counts.
    """
    try:
        return function()
    except Exception as error:
        return f"it fails with {type(error).__name__}: {first_line(error)}"


def find_difference(ours: list[Tensor], plain: list[Tensor], bound: float) -> str | None:
    """Return the fault if a tensor's distance, as a fraction of the plain one's norm, is above the bound."""
    for a, b in zip(ours, plain, strict=True):
        distance = ((a.float() - b.float()).norm() / b.float().norm()).item()
        if not distance <= bound:  # NaN is too far too
            return f"a value or gradient is off by {distance:.2g} of its norm"
    return None


# Attention


class Heads(NamedTuple):
    """What a model asks of a kernel."""

    num_queries: int
    num_keys: int
    size: int  # dimensions of a head
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Heads:
        """Return the heads of a model or of a layer, by its configuration; none where it has no attention."""
        num_queries = getattr(config, "num_attention_heads", None) or 0
        num_keys = num_queries and (getattr(config, "num_key_value_heads", None) or num_queries)
        size = getattr(config, "head_dim", None) or config.hidden_size // max(1, num_queries)
        return cls(num_queries, num_keys, size, dtype)


def choose_attention(model: Any, wanted: AttentionKernel | None, device: torch.device) -> str:
    """Choose the kernel of our attention for this process, and return its name.

    Raises:
        InputError: If the kernel that is wanted is not available, does not suit the model or is wrong.
    """
    if (chosen := get_attention(model)) != SEGMENT_ATTENTION:
        return f"transformers' {chosen}"
    if wanted is None and device.type != "cuda":
        return KERNELS[device.type].name if device.type in KERNELS else LOOP
    heads = Heads.of(model.config.get_text_config(), computing_dtype(model))
    if wanted is None and not TorchKernel().supports(heads.dtype, heads.size):
        return f"{LOOP} (there is no kernel for {heads.dtype} and heads of {heads.size} dimensions)"
    defaults = ["flash_attn", "torch"] if find_spec("flash_attn") else ["torch"]
    names = [wanted] if wanted else [name for name in defaults if name not in WRONG]
    for name, following in pairwise([*names, LOOP]):
        if not (fault := find_failure(partial(install_attention, name, heads, device))):
            return KERNELS[device.type].name
        message = f"model.kernels.attention {name} must be installed and equal {LOOP}, but {fault}."
        if wanted:
            raise InputError(f"{message} Set another one, or model.attn_implementation to sdpa.")
        rank_zero_warn(f"{message} It is left out: attention is by {following}.")
        WRONG.add(name)
    KERNELS.pop(device.type, None)
    return LOOP


def install_attention(name: AttentionKernel, heads: Heads, device: torch.device) -> str | None:
    """Put a kernel in place, and return its fault for these heads."""
    if name == "torch":
        KERNELS[device.type] = TorchKernel()
    else:
        interface = import_module("flash_attn.flash_attn_interface")
        KERNELS[device.type] = FlashAttnKernel(interface, "flash-attn")
    if not KERNELS[device.type].supports(heads.dtype, heads.size):
        return f"it needs half precision and heads of at most 256 dimensions, not {heads.dtype}, {heads.size}"
    return attention_fault(heads, device)


@torch.inference_mode(False)
def attention_fault(heads: Heads, device: torch.device) -> str | None:
    """Compare value and gradients of the device's kernel with the loop over segments, in fp32."""
    segments = Segments((0, 130, 150, 290, 333), (SharedPrefix(0, 130, 290),))
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(num, 333, heads.size, generator=generator).to(device, heads.dtype)
        for num in (heads.num_queries, heads.num_keys, heads.num_keys)
    ]
    precise = full_precision(heads.dtype)

    def results(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        arguments = [x.to(dtype).detach().requires_grad_() for x in inputs]
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            value = attend(*arguments, segments, heads.size**-0.5)
            weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
            return [value, *torch.autograd.grad(value, arguments, weights)]

    ours, plain = results(segment_attention, heads.dtype), results(looped_attention, precise)
    return find_difference(ours, plain, 1e-3 if heads.dtype == precise else 0.02)


# Blocks


def fuse_blocks(run: Callable[..., Any], name: str, kernels: Kernels, device: torch.device) -> list[str]:
    """Fuse what the settings say in one model, check its log-probs, and name what is fused.

    Args:
        run: Calls the model: run(function, *arguments) is function(model, *arguments).
        name: The user's name for the model.
        kernels: The settings.
        device: The device that computes.

    Raises:
        InputError: If a fusion that the settings ask for is not available, or if one is wrong.
    """
    liger = kernels.liger
    if liger is None:
        installed = device.type == "cuda" and find_spec("liger_kernel") is not None
        liger = installed and call_model(run, suits_liger)
    if not liger:
        return []
    plain = run(sample_log_probs)
    call_model(run, use_liger)
    difference = (run(sample_log_probs) - plain).abs().mean().item()
    half = call_model(run, computing_dtype) in (torch.bfloat16, torch.float16)
    if not difference <= (0.1 if half else 1e-3):  # nats; NaN is a fault too
        raise InputError(
            f"'{name}' must compute the same with model.kernels.liger as without, but its log-probs change "
            f"by {difference:.2g} nats. Set it to false."
        )
    return ["RMSNorm, RoPE and SwiGLU by Liger"]


@torch.no_grad()
def sample_log_probs(model: Any) -> Tensor:
    """Return a model's log-probs of a few random tokens, nats."""
    num_words = min(1000, model.config.get_text_config().vocab_size)
    tokens = torch.randint(num_words, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    sequence = ScoredSequence([], tokens, [False] + [True] * 23)
    packed = PackedSequences.from_sequences([sequence], device=next(model.parameters()).device)
    return compute_log_probs(model, packed)[0]


def find_blocks(model: Any) -> list[nn.Module]:
    """Return the transformer's blocks: the modules that transformers never splits."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def suits_liger(model: Any) -> bool:
    """Return whether Liger's norms, rotations and SwiGLU are right for a model's architecture."""
    config = model.config.get_text_config()
    return config.model_type in LIGER_ARCHITECTURES and config.hidden_act in ("silu", "swish")


def use_liger(model: Any) -> None:
    """Compute a model's norms, rotations and SwiGLU with Liger's kernels.

    Liger replaces the rotation for all models of the architecture in this process, which share the settings.

    Raises:
        InputError: If Liger is not installed, or is not right for the architecture.
    """
    try:
        liger = import_module("liger_kernel.transformers")
    except ImportError as error:
        raise missing_package("model.kernels.liger", "liger-kernel", "liger", "leave it out") from error
    config = model.config.get_text_config()
    if not suits_liger(model):
        raise InputError(
            f"model.kernels.liger is for {', '.join(LIGER_ARCHITECTURES)} with SwiGLU, but this model is "
            f"{config.model_type} with {config.hidden_act}. Leave it out."
        )
    apply_to = getattr(liger, f"apply_liger_kernel_to_{config.model_type}")
    apply_to(model=model, fused_linear_cross_entropy=False)


# Head


def choose_head(
    head: HeadOptions, dtype: torch.dtype, device: torch.device, divergence: Divergence | None = None
) -> HeadOptions:
    """Return the head's options with `compiled` decided: on a GPU by default.

    Args:
        head: The user's options.
        dtype: The type in which the model computes.
        device: The device that computes.
        divergence: The divergence of two heads that the run computes, as its loss or in its reward, if any.

    Raises:
        InputError: If the settings ask for a compiled head that is wrong or does not compile.
    """
    compiled = device.type == "cuda" if head.compiled is None else head.compiled
    if compiled and (fault := find_failure(partial(compiled_head_fault, dtype, device, divergence))):
        message = f"The compiled head must equal the head as it is, but {fault}."
        if head.compiled:
            raise InputError(f"{message} Set model.head.compiled to false.")
        rank_zero_warn(f"{message} It is not compiled. torch.compile needs a C compiler.")
        compiled = False
    return replace(head, compiled=compiled)


@torch.inference_mode(False)
def compiled_head_fault(
    dtype: torch.dtype, device: torch.device, divergence: Divergence | None = None
) -> str | None:
    """Compare log-probs, entropies, a divergence and gradients of a compiled head with the plain one."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(device, dtype) / 4 for n in (200, 3000))
    targets = torch.randint(3000, (200,), generator=generator).to(device)

    def results(compiled: bool) -> list[Tensor]:
        inputs = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            head = Head(inputs[1])
            log_probs, entropy = linear_log_probs(inputs[0], head, targets, 1, compiled, with_entropy=True)
            assert entropy is not None
            computed = [log_probs, entropy, *torch.autograd.grad(log_probs.sum(), inputs)]
            # The other model's vocabulary is smaller, and its states are others.
            teacher = inputs[0].flip(0), Head(inputs[1][:2800])
            if divergence is not None:
                values = linear_divergence(inputs[0], head, *teacher, divergence, 1, compiled)
                computed += [values, *torch.autograd.grad(values.sum(), inputs)]
            return computed

    return find_difference(results(True), results(False), 1e-2)


# All of it


def prepare_model(
    run: Callable[..., Any],
    name: str,
    kernels: Kernels,
    head: HeadOptions,
    device: torch.device,
    divergence: Divergence | None = None,
) -> HeadOptions:
    """Choose and check the kernels of a model, name them in one line, and return the head's options.

    On a CPU with default settings there is no line.

    Args:
        run: Calls the model: run(function, *arguments) is function(model, *arguments).
        name: The user's name for the model.
        kernels: The settings.
        head: The user's options of the head.
        device: The device that computes.
        divergence: What the run computes with this model's head and another's, if anything.
    """
    attention = call_model(run, choose_attention, kernels.attention, device)
    fused = fuse_blocks(run, name, kernels, device)
    chosen = choose_head(head, call_model(run, computing_dtype), device, divergence)
    if device.type == "cuda" or kernels != Kernels() or chosen.compiled:
        parts = [f"attention by {attention}", *fused, *["compiled head"] * bool(chosen.compiled)]
        announce(f"kernels of {name}: {', '.join(parts)}")
    return chosen
