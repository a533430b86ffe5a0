"""Count the bytes moved through memory: by the head per token and word, by a transformer block per token.

    .venv/bin/python benchmarks/bytes_moved.py [--shape qwen2.5-0.5b] [--tokens 1024]

Nothing is timed, so any machine will do; types and attention are those of the device. An operator reads its
inputs and writes its outputs once, and a view costs nothing. A compiled function, and each of Liger's, is
computed plainly and counts as one kernel. Every figure is the difference between a run with twice the tokens
and one with the tokens, so weights, which are read once for all tokens, drop out. Matrix products are counted
separately.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from gpu import SHAPES, Group
from side_by_side import benchmark_parser, finish, read_options
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlt_lightning.models import kernels
from rlt_lightning.models.packed import HeadOptions, scored_hidden_states
from rlt_lightning.numerics import head
from rlt_lightning.numerics.head import Head, LogitScale
from rlt_lightning.numerics.log_probs import linear_log_probs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
WRITES_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
READS_WHAT_IT_WRITES = ("gather", "index", "index_select", "embedding")
ONLY_WRITES = ("copy_", "fill_", "zero_")
Step = Callable[[int], Iterator[str]]


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write, by `products` and `other`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if self.in_kernel or func.is_view or name in WRITES_NOTHING:
            return result
        if name.startswith("scatter"):
            self.counts["other"] += 3 * num_bytes(args[3:])
        elif name in READS_WHAT_IT_WRITES:
            self.counts["other"] += 2 * num_bytes(result)
        else:
            read = args[1:] if name in ONLY_WRITES else args
            self.counts["products" if name in PRODUCTS else "other"] += num_bytes((read, result))
        return result

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts as one kernel."""

        def run(*inputs: Any) -> Any:
            self.in_kernel = True
            result = function(*inputs)
            self.in_kernel = False
            self.counts["other"] += num_bytes((inputs, result))
            return result

        return run

    def differentiable_kernel(self, function: Callable[..., Any], num_tensors: int) -> Callable[..., Any]:
        """Return a function of that many tensors, and of constants, that is one kernel each way."""

        def pull_back(grads: tuple[Tensor, ...], tensors: tuple[Tensor, ...], constants: Any) -> Any:
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
                return torch.autograd.grad(function(*inputs, *constants), inputs, grads, allow_unused=True)

        class Fused(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                ctx.inputs = inputs
                return self.kernel(function)(*inputs)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                tensors, constants = ctx.inputs[:num_tensors], ctx.inputs[num_tensors:]
                return (*self.kernel(pull_back)(grads, tensors, constants), *(None for _ in constants))

        return lambda *inputs, **_: Fused.apply(*inputs)

    def per_token(self, step: Step, tokens: int) -> dict[str, dict[str, int]]:
        """Return what each phase of a step moves; the step yields a phase's name at its end."""
        found: list[dict[str, Counter[str]]] = []
        for number in (tokens, 2 * tokens):
            found.append({})
            self.counts.clear()
            with self:
                for phase in step(number):
                    found[-1][phase] = self.counts.copy()
                    self.counts.clear()
        once, twice = found
        return {
            phase: {kind: round((twice[phase][kind] - once[phase][kind]) / tokens) for kind in twice[phase]}
            for phase in twice
        }


def num_bytes(values: Any) -> int:
    """Return the bytes of all tensors; along a dimension that is expanded there is one number."""
    total = 0
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor):
            sizes = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
            total += tensor.element_size() * torch.Size(sizes).numel()
    return total


def head_step(traffic: Traffic, hidden_size: int, num_words: int, compiled: bool) -> Step:
    """Return a step of log-probs with entropies at temperature 0.7."""
    head.compiled_kernel = traffic.kernel  # type: ignore[assignment]
    weight = torch.randn(num_words, hidden_size, device=DEVICE, dtype=DTYPE, requires_grad=True)

    def step(tokens: int) -> Iterator[str]:
        weight.grad = None
        hidden = torch.randn(tokens, hidden_size, device=DEVICE, dtype=DTYPE, requires_grad=True)
        targets = torch.arange(tokens, device=DEVICE)
        scaled = Head(weight, None, LogitScale(0.7))
        log_probs, _ = linear_log_probs(hidden, scaled, targets, None, compiled, with_entropy=True)
        yield "forward"
        log_probs.sum().backward()
        yield "backward"

    return step


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), epsilon)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)).to(x.dtype)

    return turn(q), turn(k)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


def block_step(traffic: Traffic, shape: str, num_blocks: int, liger: bool, mixed: bool) -> Step:
    """Return a step of some blocks, without embedding and head."""
    functions = SimpleNamespace(
        liger_rms_norm=traffic.differentiable_kernel(rms_norm, 2),
        liger_rope=traffic.differentiable_kernel(rotate, 4),
        liger_swiglu=traffic.differentiable_kernel(swiglu, 2),
    )
    kernels.liger_functions = lambda: functions

    def step(tokens: int) -> Iterator[str]:
        sizes = SHAPES[shape] | {"num_hidden_layers": num_blocks, "vocab_size": 64}
        plain = kernels.Kernels(liger=False), HeadOptions(compiled=False)
        group = Group(sizes, tokens, False, DEVICE, *plain)
        policy = group.policy.float() if mixed else group.policy
        if liger:
            kernels.use_liger(policy)
        traffic.counts.clear()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mixed):
            states = scored_hidden_states(policy, group.packed)
        yield "forward"
        states.backward(torch.ones_like(states))
        yield "backward"

    return step


def count_block(shape: str, tokens: int, liger: bool, mixed: bool) -> dict[str, dict[str, int]]:
    """Return what one block moves: two of them less one."""
    one, two = (
        traffic.per_token(block_step(traffic, shape, number, liger, mixed), tokens)
        for number, traffic in ((1, Traffic()), (2, Traffic()))
    )
    return {phase: {kind: two[phase][kind] - one[phase][kind] for kind in two[phase]} for phase in two}


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=None)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--tokens", type=int, default=1024)
    options = read_options(parser, shape="tiny", tokens=128)
    shape = SHAPES[options.shape]
    num_words = 2048 if options.tiny else 16384
    results: dict[str, Any] = {}
    for compiled in (False, True):
        traffic = Traffic()
        step = head_step(traffic, shape["hidden_size"], num_words, compiled)
        found = traffic.per_token(step, options.tokens)
        results[f"head, {'compiled' if compiled else 'plain'}, per word"] = {
            phase: {kind: value / num_words for kind, value in counts.items()}
            for phase, counts in found.items()
        }
    for mixed in (False, True) if DEVICE.type == "cuda" else (False,):
        precision = "bf16-mixed" if mixed else str(DTYPE).removeprefix("torch.")
        for liger in (False, True):
            name = f"block, {precision}, {'Liger' if liger else 'plain'}"
            results[name] = count_block(options.shape, options.tokens, liger, mixed)
    for name, phases in results.items():
        print(f"{name}: {phases}")
    figures: dict[str, Any] = {
        re.sub(r"\W+", "_", name): float(sum(counts["other"] for counts in phases.values()))
        for name, phases in results.items()
    }
    finish(options.output, {"device": DEVICE.type, "shape": options.shape} | results, **figures)


if __name__ == "__main__":
    main()
