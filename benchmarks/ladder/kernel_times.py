"""Step 8: kernels side by side: the head, our attention by each kernel, fused blocks, AdamW.

What is installed is timed, and compared with what it replaces; what is not is skipped, with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu
import torch
from common import DEVICE, HALF, ON_CPU, PRETENDED, TINY, Finding, attempt, distance, median_seconds, note
from numerics import LAYOUTS
from numerics import attention as exact_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlt_lightning.models.kernels import (
    ATTENTION_KERNELS,
    AttentionKernel,
    Kernels,
    attention_kernel,
    compile_blocks,
    explain_missing,
    use_checked_liger,
)
from rlt_lightning.models.packed import HeadOptions, scored_hidden_states
from rlt_lightning.modules.optimizer import OptimizerConfig, optimizer_and_schedule
from rlt_lightning.modules.phases import forward_flops
from rlt_lightning.numerics import Head, linear_log_probs
from rlt_lightning.numerics.attention import (
    KERNELS,
    Segments,
    SharedPrefix,
    looped_attention,
    segment_attention,
)
from rlt_lightning.numerics.head import LogitScale
from rlt_lightning.types import first_line

TOKENS, WORDS = (256, 2000) if TINY else (16384, 151936)


def timed(label: str, step: Callable[[], Any], flops: float) -> None:
    """Note time, rate and peak memory of a step, or why it could not run."""
    try:
        step()
        if not ON_CPU:
            torch.cuda.reset_peak_memory_stats()
        taken = median_seconds(step, rounds=3, warm_up=1)
    except Exception as error:  # a kernel that this card lacks must not hide the others
        note(label, False, why=f"{type(error).__name__}: {first_line(error)}")
        return
    gib = 0.0 if ON_CPU else torch.cuda.max_memory_allocated() / 2**30
    note(label, ms=taken * 1e3, tflops=flops / taken / 1e12, peak_gib=gib)


def installed(label: str, module: str) -> bool:
    """Return whether a module is there; if not, note that its check is skipped."""
    found = importlib.util.find_spec(module) is not None
    if not found or TINY:
        note(label, why=f"skipped: {module} is not installed" if not found else "skipped: needs a GPU")
    return found and not TINY


class HeadCase:
    """Hidden states, a head and targets, with each way to get log-probs and their gradient."""

    def __init__(self, hidden_size: int) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(TOKENS, hidden_size, device=DEVICE, dtype=HALF, requires_grad=True)
        weight = torch.randn(WORDS, hidden_size, device=DEVICE, dtype=HALF) * 0.02
        self.weight = weight.requires_grad_()
        self.targets = torch.randint(WORDS, (TOKENS,), device=DEVICE)
        self.name = f"head {TOKENS} x {hidden_size} x {WORDS}"
        self.product = (
            2 * TOKENS * WORDS * hidden_size
        )  # operations: forward 1, backward 3, with recomputation

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def ours(
        self, mib: int | None, compiled: bool, tokens: int = TOKENS, backward: bool = True
    ) -> Callable[[], None]:
        def step() -> None:
            self.clear()
            head = Head(self.weight, None, LogitScale(0.7))
            with torch.set_grad_enabled(backward):
                found, _ = linear_log_probs(
                    self.hidden[:tokens], head, self.targets[:tokens], mib, compiled, True
                )
            if backward:
                found.sum().backward()

        return step

    def full(self) -> None:
        self.clear()
        logits = (self.hidden @ self.weight.t()).float() / 0.7
        picked = logits.gather(1, self.targets[:, None]).squeeze(1)
        (picked - logits.logsumexp(1)).sum().backward()

    def cut_cross_entropy(self) -> None:
        self.clear()
        library = importlib.import_module("cut_cross_entropy")
        losses = library.linear_cross_entropy(self.hidden, self.weight, self.targets, reduction="none")
        (-losses).sum().backward()

    def liger(self) -> None:
        self.clear()
        library = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
        library.LigerFusedLinearCrossEntropyLoss()(self.weight, self.hidden, self.targets).backward()

    def run(self) -> None:
        timed(f"{self.name}, full logits", self.full, 3 * self.product)
        for compiled in (False,) if TINY else (False, True):
            for mib in (16, 64) if TINY else (32, 64, 128, 256, 512, 1024):
                label = f"{self.name}, ours, {mib} MiB, compiled {compiled}"
                timed(label, self.ours(mib, compiled), 4 * self.product)
            for fewer in (7,) if TINY else (511, 2048):  # numbers of tokens that are no multiple of 128
                tokens = TOKENS - fewer
                label = f"{self.name}, ours, {tokens} tokens, compiled {compiled}"
                timed(label, self.ours(None, compiled, tokens), 4 * self.product * tokens / TOKENS)
            label = f"{self.name}, ours, forward alone, compiled {compiled}"
            timed(label, self.ours(None, compiled, backward=False), self.product)
        if installed(f"{self.name}, cut-cross-entropy", "cut_cross_entropy"):
            timed(f"{self.name}, cut-cross-entropy", self.cut_cross_entropy, 4 * self.product)
        if installed(f"{self.name}, Liger, a loss", "liger_kernel"):
            timed(f"{self.name}, Liger, a loss", self.liger, 3 * self.product)


class AttentionCase:
    """Queries, keys and values of 16k tokens in three layouts, with each kernel that computes them."""

    def __init__(self, heads: int, key_heads: int, size: int) -> None:
        self.length = 512 if TINY else 16384
        prompt = self.length // 8
        rest = (self.length - prompt) // 16
        end = prompt + 16 * rest
        self.layouts = {
            "one sequence": Segments((0, self.length)),
            "16 completions behind a prompt": Segments(
                (0, *range(prompt, end + 1, rest)), (SharedPrefix(0, prompt, end),)
            ),
            "64 sequences": Segments(tuple(range(0, self.length + 1, self.length // 64))),
        }
        counts = (heads, key_heads, key_heads)
        shapes = [(1, self.length, count, size) for count in counts]
        self.rows = [torch.randn(shape, device=DEVICE, dtype=HALF, requires_grad=True) for shape in shapes]
        self.inputs = [row.transpose(1, 2) for row in self.rows]
        self.name, self.heads, self.size = f"attention {heads}/{key_heads} x {size}", heads, size
        self.shape = heads, key_heads, size

    def backward(self, found: Tensor) -> None:
        for row in self.rows:
            row.grad = None
        found.sum().backward()

    def attend(self, function: Callable[..., Tensor], num_tokens: int) -> None:
        self.backward(function(*[x[0, :, :num_tokens] for x in self.inputs]))

    def time_layouts(self, label: str, function: Callable[..., Tensor]) -> None:
        """Time a function of queries, keys, values and segments, forward and backward."""
        for layout, segments in self.layouts.items():
            ends = segments.boundaries
            pairs = sum((b - a) * (b - a + 1) / 2 for a, b in itertools.pairwise(ends))
            pairs += sum((s.split - s.start) * (s.end - s.split) for s in segments.shared)
            step = partial(self.attend, partial(function, segments=segments), ends[-1])
            timed(f"{self.name}, {label}, {layout}", step, 14 * self.heads * self.size * pairs)

    def ours(self) -> None:
        """Time our attention: a loop over PyTorch's public attention, and each kernel that is right."""
        self.time_layouts("loop over sdpa", partial(looped_attention, scale=self.size**-0.5))
        merged = partial(segment_attention, scale=self.size**-0.5)
        if ON_CPU:
            self.time_layouts(KERNELS["cpu"].name, merged)
        for kernel in reversed(ATTENTION_KERNELS):
            label = f"{self.name}, ours by {kernel}"
            if reason := "needs a GPU" if ON_CPU else explain_missing(kernel, DEVICE):
                note(label, why=f"skipped: {reason}")
                continue
            if not attempt(label, partial(use_kernel, kernel)):
                continue
            exact = f"{label}, against float64"
            checks = {name: partial(exact_attention, layout, *self.shape) for name, layout in LAYOUTS.items()}
            right = [attempt(f"{exact}, {name}", partial(check, HALF)) for name, check in checks.items()]
            if all(right):
                self.time_layouts(f"ours by {kernel}", merged)
        if not ON_CPU:
            KERNELS["cuda"] = attention_kernel("torch")

    def libraries(self) -> None:
        """Time what libraries compute of one sequence by themselves."""
        causal = 7 * self.heads * self.size * self.length**2
        q, k, v = self.inputs
        sdpa = lambda: self.backward(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))  # noqa: E731
        timed(f"{self.name}, PyTorch's, one sequence", sdpa, causal)
        if installed(f"{self.name}, FlashAttention 2, one sequence", "flash_attn"):
            library = importlib.import_module("flash_attn")
            flash2 = lambda: self.backward(library.flash_attn_func(*self.rows, causal=True))  # noqa: E731
            timed(f"{self.name}, FlashAttention 2, one sequence", flash2, causal)
        if installed(f"{self.name}, FlashAttention 3, one sequence", "flash_attn_interface"):
            torch.nn.attention.activate_flash_attention_impl("FA3")
            try:
                timed(f"{self.name}, FlashAttention 3, one sequence", sdpa, causal)
            finally:
                torch.nn.attention.restore_flash_attention_impl()


def use_kernel(name: AttentionKernel) -> Finding:
    """Let our attention compute with a kernel."""
    KERNELS[DEVICE.type] = attention_kernel(name)
    return True, {"name": KERNELS[DEVICE.type].name}


class BlockCase:
    """Some blocks of a model, forward and backward: as they are, compiled, and by Liger."""

    def __init__(self, shape: str) -> None:
        layers = 2 if TINY else 4
        self.name = f"{layers} blocks of {shape}"
        sizes = gpu.SHAPES[shape] | {"num_hidden_layers": layers}
        plain = Kernels(liger=False), HeadOptions(compiled=False)
        group = gpu.Group(sizes, 256 if TINY else 16384, False, DEVICE, *plain)
        self.policy, self.packed = group.policy, group.packed
        self.direction = torch.randn(sizes["hidden_size"], device=DEVICE, dtype=HALF)
        head = 2 * len(self.packed.targets) * sizes["hidden_size"] * sizes["vocab_size"]
        self.flops = 3 * (forward_flops(self.policy, self.packed) - head)

    def step(self) -> Tensor:
        self.policy.zero_grad()
        states = scored_hidden_states(self.policy, self.packed)
        (states @ self.direction).sum().backward()
        return states.detach()

    def results(self) -> list[Tensor]:
        """Return the states, and the gradients of all blocks."""
        states = self.step()
        return [states, *[p.grad.clone() for p in self.policy.base_model.layers.parameters()]]

    def run(self) -> None:
        self.plain = self.results()
        timed(f"{self.name}, as they are", self.step, self.flops)
        if PRETENDED or shutil.which("gcc") is None:
            needed = "a real GPU" if PRETENDED else "a C compiler"
            note(f"{self.name}, compiled", why=f"skipped: torch.compile needs {needed}")
        else:
            label = f"{self.name}, compiled"
            attempt(f"{label} against plain", partial(self.fused, label, compile_blocks))
        label = f"{self.name}, by Liger"
        if installed(label, "liger_kernel"):
            attempt(f"{label} against plain", partial(self.fused, label, use_checked_liger))

    def fused(self, label: str, fuse: Callable[[Any], Callable[[], None]]) -> Finding:
        """Time fused blocks, and compare states and gradients by the norm of their difference."""
        undo = fuse(self.policy)
        try:
            found = self.results()
            timed(label, self.step, self.flops)
        finally:
            undo()
        squares = torch.tensor([
            [(ours.float() - plain.float()).square().sum(), plain.float().square().sum()]
            for ours, plain in zip(found, self.plain, strict=True)
        ])  # fmt: skip
        off, norm = torch.stack([squares[0], squares[1:].sum(0)]).sqrt().unbind(1)
        errors = dict(zip(("states", "gradients"), (off / norm).tolist(), strict=True))
        bound = 1e-3 if ON_CPU else 0.05
        return max(errors.values()) < bound, errors | {"bound": bound}


def adamw(shape: str) -> Finding:
    """Time AdamW as PyTorch chooses and fused; after a checkpoint changes hands, both must step alike."""
    sizes = gpu.SHAPES[shape]
    hidden, wide = sizes["hidden_size"], sizes["intermediate_size"]
    torch.manual_seed(0)
    first = [torch.randn(s, device=DEVICE) for s in ((wide, hidden), (hidden, wide), (hidden,))]
    gradients = [torch.randn_like(tensor) for tensor in first]
    flops = 15.0 * sum(tensor.numel() for tensor in first)

    def optimizer_of(fused: bool | None) -> torch.optim.Optimizer:
        named = [(str(i), torch.nn.Parameter(tensor.clone())) for i, tensor in enumerate(first)]
        for (_, parameter), gradient in zip(named, gradients, strict=True):
            parameter.grad = gradient.clone()
        return optimizer_and_schedule(OptimizerConfig(1e-3, 0.1), named, 100, fused)[0]

    weights = []
    for fused in (None, True):
        label = f"AdamW, {shape}, {'fused' if fused else 'as PyTorch chooses'}"
        optimizer = optimizer_of(fused)
        timed(label, optimizer.step, flops)
        saving, restored = optimizer_of(None), optimizer_of(fused)
        saving.step()
        restored.load_state_dict(saving.state_dict())
        restored.step()
        weights.append([parameter for group in restored.param_groups for parameter in group["params"]])
    error = max(distance(found, wanted) for wanted, found in zip(*weights, strict=True))
    return error < 1e-6, {"error": error}


def main() -> None:
    for hidden_size in (96,) if TINY else (896, 3584):
        HeadCase(hidden_size).run()
        free()
    for heads, key_heads, size in ((4, 2, 64),) if TINY else ((14, 2, 64), (28, 4, 128)):
        case = AttentionCase(heads, key_heads, size)
        case.ours()
        case.libraries()
    for shape in ("tiny",) if TINY else ("qwen2.5-0.5b", "7b"):
        attempt(f"AdamW, {shape}, fused against plain", partial(adamw, shape))
        free()
        BlockCase(shape).run()
        free()


def free() -> None:
    """Return the memory of what was measured."""
    if not ON_CPU:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
