"""Which kernels a run computes with: chosen by device and packages, checked at the start, named in the log.

               chosen where nothing is set                   checked against
    attention  FA3, flash-attn or PyTorch's: the first       a loop over segments in fp32 (value, gradients)
               that is installed and suits the GPU
    liger      on a GPU with liger-kernel                    plain functions in fp32 (value, gradients); the
                                                             model's log-probs without it
    blocks     not compiled                                  the model's log-probs without it
    head       compiled on a GPU                             the head as it is (value, gradients), with the
                                                             divergence that the run computes
    AdamW      fused on a GPU                                nothing

A kernel that was chosen by default and fails its check is left out with a warning. If the settings ask for
it, the run ends with an error. `attention_choice` has the attention, `checks` what all checks share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from rlt_lightning.models.announce import announce
from rlt_lightning.models.attention_choice import AttentionKernel, choose_attention, package_version
from rlt_lightning.models.checks import Refused, failure_of
from rlt_lightning.models.fused import compile_blocks, liger_fault, liger_functions, use_liger
from rlt_lightning.models.packed import HeadOptions, ask, computing_dtype, log_probs_of
from rlt_lightning.numerics.divergence import Divergence, linear_divergence
from rlt_lightning.numerics.head import Head
from rlt_lightning.numerics.log_probs import linear_log_probs
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence
from rlt_lightning.types import InputError


@dataclass(frozen=True)
class Kernels:
    """Faster kernels for the same numbers. Each of them is checked at the start of a run.

    Args:
        attention: The kernel of our attention on an NVIDIA GPU in half precision: "fa3" (FlashAttention-3 in
            place of PyTorch's kernel), "flash_attn" (the package flash-attn) or "torch"; None: the first of
            them that is installed, suits the GPU and is right.
        liger: Compute RMSNorm, RoPE and SwiGLU with liger-kernel; None: on a GPU where it is installed, suits
            the architecture and is right.
        compiled_blocks: Compile every transformer block with torch.compile; not with DeepSpeed ZeRO-3.
        fused_adamw: Step all weights in one pass over memory; None: on a GPU, and for offloaded steps.
    """

    attention: AttentionKernel | None = None
    liger: bool | None = None
    compiled_blocks: bool = False
    fused_adamw: bool | None = None

    def __post_init__(self) -> None:
        if self.liger and self.compiled_blocks:
            raise InputError(
                "model.kernels must fuse blocks in one way, but liger and compiled_blocks are both true. "
                "Leave one of them out."
            )


# Blocks


def fuse_blocks(run: Callable[..., Any], name: str, kernels: Kernels, device: torch.device) -> list[str]:
    """Fuse what the settings say in one model, check its log-probs, and name what is fused.

    Args:
        run: Calls the model: run(function, *arguments) is function(model, *arguments).
        name: The user's name for the model.
        kernels: The settings.
        device: The device that computes.

    Raises:
        InputError: If a fusion that the settings ask for is not available or is wrong.
    """
    liger = kernels.liger
    if liger is None:
        liger = (
            device.type == "cuda" and not kernels.compiled_blocks and find_spec("liger_kernel") is not None
        )
    fusions: list[tuple[str, bool, Callable[[Any], Callable[[], None]], bool]] = [
        (f"RMSNorm, RoPE and SwiGLU by Liger {package_version('liger-kernel')}", liger, checked_liger,
         kernels.liger is True),
        ("blocks by torch.compile", kernels.compiled_blocks, compile_blocks, True),
    ]  # fmt: skip
    fused = []
    for what, is_on, fuse, asked in fusions:
        if not is_on:
            continue
        fault = failure_of(partial(fusion_fault, run, fuse))
        if fault is None:
            fused.append(what)
        elif asked:
            raise InputError(
                f"'{name}' must compute the same with {what} as without, but {fault}. "
                "Turn it off in model.kernels."
            )
        else:
            rank_zero_warn(f"'{name}' runs without {what}: {fault}.")
    return fused


def checked_liger(model: Any) -> Callable[[], None]:
    """Use Liger in a model, once its functions have been found right for the model's sizes and type."""
    parameter = next(model.parameters())
    config = model.config.get_text_config()
    if fault := liger_fault(liger_functions(), config, computing_dtype(model), parameter.device):
        raise Refused(fault)
    return use_liger(model)


def fusion_fault(run: Callable[..., Any], fuse: Callable[[Any], Callable[[], None]]) -> str | None:
    """Fuse a model, and take it back if its log-probs change; return the fault, or None."""
    plain = run(sample_log_probs)
    undo = ask(run, fuse)
    fault: str | None = "its check did not end"
    try:
        difference = (run(sample_log_probs) - plain).abs().mean().item()
        half = ask(run, computing_dtype) in (torch.bfloat16, torch.float16)
        bound = 0.1 if half else 1e-3  # nats
        # NaN is a fault too.
        fault = None if difference <= bound else f"its log-probs change by {difference:.2g} nats"
    finally:
        if fault is not None:
            undo()
    return fault


@torch.no_grad()
def sample_log_probs(model: Any) -> Tensor:
    """Return a model's log-probs of a few random tokens, nats."""
    num_words = min(1000, model.config.get_text_config().vocab_size)
    tokens = torch.randint(num_words, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    sequence = ScoredSequence([], tokens, [False] + [True] * 23)
    packed = PackedSequences.from_sequences([sequence], device=next(model.parameters()).device)
    return log_probs_of(model, packed)[0]


# Head


def chosen_head(
    head: HeadOptions, dtype: torch.dtype, device: torch.device, divergence: Divergence | None = None
) -> HeadOptions:
    """Return the head's options with `compiled` decided: on a GPU by default, if it equals the head as it is.

    Args:
        head: The user's options.
        dtype: The type in which the model computes.
        device: The device that computes.
        divergence: The divergence of two heads that the run computes, as its loss or in its reward, if any.

    Raises:
        InputError: If `compiled` was asked for and fails.
    """
    compiled = device.type == "cuda" if head.compiled is None else head.compiled
    if compiled and (fault := failure_of(partial(compiled_head_fault, dtype, device, divergence))):
        if head.compiled:
            raise InputError(
                f"The compiled head must equal the head as it is, but {fault}. torch.compile needs a C "
                "compiler and, on a GPU, Triton. Set model.head.compiled to false."
            )
        rank_zero_warn(f"The head is not compiled: {fault}.")
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
            found = [log_probs, entropy, *torch.autograd.grad(log_probs.sum(), inputs)]
            # The other model's vocabulary is smaller, and its states are others.
            other = inputs[0].flip(0), Head(inputs[1][:2800])
            if divergence is not None:
                values = linear_divergence(inputs[0], head, *other, divergence, None, 1, compiled)
                found += [values, *torch.autograd.grad(values.sum(), inputs)]
            return found

    distances = [
        ((ours.float() - plain.float()).norm() / plain.float().norm()).item()
        for ours, plain in zip(results(True), results(False), strict=True)
    ]
    bad = [distance for distance in distances if not distance <= 1e-2]
    return f"a value or gradient is off by {bad[0]:.2g} of its norm" if bad else None


# All of it, and the optimizer


def prepare_model(
    run: Callable[..., Any],
    name: str,
    kernels: Kernels,
    head: HeadOptions,
    device: torch.device,
    more: str = "",
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
        more: What else the line names.
        divergence: What the run computes with this model's head and another's, if anything.
    """
    attention = ask(run, choose_attention, kernels.attention, device)
    fused = fuse_blocks(run, name, kernels, device)
    chosen = chosen_head(head, ask(run, computing_dtype), device, divergence)
    if device.type == "cuda" or kernels != Kernels() or chosen.compiled:
        parts = [f"attention by {attention}", *fused, *["compiled head"] * bool(chosen.compiled), more]
        announce(f"kernels of {name}: {', '.join(filter(None, parts))}")
    return chosen


def steps_fused(kernels: Kernels, device: torch.device, steps_on_cpu: bool) -> bool | None:
    """Return whether AdamW is fused; None: PyTorch's choice, which is not."""
    if kernels.fused_adamw is not None:
        return kernels.fused_adamw
    return True if steps_on_cpu or device.type == "cuda" else None
