"""Compare results on CUDA with float64 on the CPU. An error is relative to the largest number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import DEVICE, HALF, ON_CPU, TINY, Finding, attempt, distance
from torch import Tensor

from rlt_lightning.models.attention import SEGMENT_ATTENTION, register_segment_attention
from rlt_lightning.models.packed import compute_log_probs, layout_fault
from rlt_lightning.numerics import Divergence
from rlt_lightning.numerics.attention import Segments, SharedPrefix, looped_attention, segment_attention
from rlt_lightning.numerics.divergence import linear_divergence
from rlt_lightning.numerics.head import Head, LogitScale
from rlt_lightning.numerics.log_probs import linear_log_probs
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence

WORDS = 3000 if TINY else 49152
LAYOUTS = {
    "one segment": Segments((0, 333)),
    "packed": Segments((0, 7, 135, 136, 400)),
    "one family": Segments((0, 130, 131, 300, 557), (SharedPrefix(0, 130, 557),)),
    "two families and a loner": Segments(
        (0, 64, 70, 199, 263, 520, 777, 800), (SharedPrefix(0, 64, 199), SharedPrefix(263, 520, 800))
    ),
    "64 completions": Segments(
        (0, *range(300, 300 + 37 * 64 + 1, 37)), (SharedPrefix(0, 300, 300 + 37 * 64),)
    ),
}
HEADS = ((8, 2, 64), (4, 4, 32)) if TINY else ((8, 2, 64), (28, 4, 128), (4, 4, 32), (2, 1, 256), (3, 1, 80))


def attention(
    segments: Segments, heads: int, key_heads: int, size: int, dtype: torch.dtype, strided: bool = True
) -> Finding:
    """Compare output and gradients; both sides get the same rounded numbers."""
    torch.manual_seed(0)
    length = segments.boundaries[-1]
    counts = (heads, key_heads, key_heads, heads)
    full = [torch.randn(n, length, size, dtype=torch.float64).to(dtype).double() for n in counts]
    wanted_in = [t.clone().requires_grad_() for t in full[:3]]
    query, key, value = wanted_in
    wanted = looped_attention(query, key, value, segments, size**-0.5)
    wanted.backward(full[3])
    given = [t.to(DEVICE, dtype) for t in full]
    if strided:  # (L, heads, D) in memory, as a model's projections make them
        given = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in given]
    found_in = [t.detach().requires_grad_() for t in given[:3]]
    query, key, value = found_in
    found = segment_attention(query, key, value, segments, size**-0.5)
    found.backward(given[3])
    bound = 2e-5 if dtype == torch.float32 else 0.02
    errors = {"output": distance(found, wanted)}
    for name, ours, theirs in zip("qkv", found_in, wanted_in, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        errors[name] = distance(ours.grad, theirs.grad)
    return max(errors.values()) < bound, errors | {"bound": bound}


def odd_heads() -> Finding:
    """Heads of 12 dimensions: aten's flash backward takes multiples of 8 only."""
    return attention(Segments((0, 10, 40), (SharedPrefix(0, 10, 40),)), 2, 2, 12, HALF)


def log_probs(
    dtype: torch.dtype,
    num_tokens: int = 300,
    words: int = WORDS,
    bias: bool = False,
    scale: LogitScale = LogitScale(0.7),
    compiled: bool = False,
    autocast: bool = False,
) -> Finding:
    """Compare log-probs, their gradients and entropies of the head."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, 96, dtype=torch.float64).to(dtype)
    weight = (torch.randn(words, 96, dtype=torch.float64) * 0.1).to(dtype)
    offset = torch.randn(words, dtype=torch.float64).to(dtype) if bias else None
    targets, grads = torch.randint(words, (num_tokens,)), torch.randn(num_tokens, dtype=torch.float64)
    sides: list[list[Tensor]] = []
    for device, to in ((torch.device("cpu"), torch.float64), (DEVICE, dtype)):
        ours = to == dtype
        inputs = [None if t is None else t.to(device, to).requires_grad_() for t in (hidden, weight, offset)]
        states, own_weight, own_bias = inputs
        assert states is not None
        assert own_weight is not None
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast and ours):
            head = Head(own_weight, own_bias, scale)
            found, entropy = linear_log_probs(states, head, targets.to(device), None, compiled and ours, True)
        assert entropy is not None
        found.backward(grads.to(found))
        gradients = [t.grad for t in inputs if t is not None and t.grad is not None]
        sides.append([found, entropy, *gradients])
    names = ("log_prob", "entropy", "hidden", "weight", "bias")
    wanted, got = sides
    errors = {name: distance(a, b) for name, b, a in zip(names, wanted, got, strict=False)}
    bound = 2e-5 if dtype == torch.float32 and not autocast else 0.02
    return max(errors.values()) < bound, errors | {"bound": bound}


def no_token() -> Finding:
    """A row without scored tokens."""
    weight = torch.zeros(WORDS, 96, device=DEVICE, dtype=HALF)
    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    found, _ = linear_log_probs(weight[:0], Head(weight), none)
    return found.shape == (0,), {}


def exact_kl(dtype: torch.dtype) -> Finding:
    """Compare the KL over the whole vocabulary, of heads of different sizes, and the student's gradients."""
    torch.manual_seed(0)
    shapes = ((200, 96), (WORDS, 96), (200, 64), (WORDS - 128, 64))
    tensors = [torch.randn(shape) * (0.1 if shape[0] > 200 else 1) for shape in shapes]
    tensors = [t.to(dtype) for t in tensors]
    sides: list[list[Tensor]] = []
    for device, to in ((torch.device("cpu"), torch.float64), (DEVICE, dtype)):
        p, pw, q, qw = inputs = [t.to(device, to).requires_grad_() for t in tensors]
        scale = LogitScale(0.7)
        kl = linear_divergence(q, Head(qw, None, scale), p, Head(pw, None, scale), Divergence("forward"))
        kl.sum().backward()
        sides.append([kl, *[t.grad for t in inputs if t.grad is not None]])
    wanted, got = sides
    names = ("kl", "q", "q_weight")
    errors = {name: distance(a, b) for name, b, a in zip(names, wanted, got, strict=False)}
    bound = 5e-5 if dtype == torch.float32 else 0.03
    return max(errors.values()) < bound, errors | {"bound": bound}


def whole_model(dtype: torch.dtype, autocast: bool) -> Finding:
    """Compare rows with and without shared prefixes to the model's own log-probs."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    register_segment_attention()
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(
        vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, attn_implementation=SEGMENT_ATTENTION,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(Qwen2Config(**shape))
    model = model.to(DEVICE, dtype).eval()
    prompt, rests = torch.randint(2000, (150,)).tolist(), torch.randint(2000, (6, 90)).tolist()
    sequences = [ScoredSequence(prompt, rest, [False] * 150 + [True] * 90) for rest in rests]
    scores, gradients = {}, {}
    for layout, families in {"shared": (tuple(range(6)),), "packed": tuple((i,) for i in range(6))}.items():
        model.zero_grad()
        packed = PackedSequences.from_sequences(sequences, families, DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            flat, _ = compute_log_probs(model, packed, 0.7)
        flat.mean().backward()
        scores[layout] = flat.detach()
        gradients[layout] = torch.cat([p.grad.flatten().float() for p in model.parameters()])
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        ids = torch.tensor([prompt + rest for rest in rests], device=DEVICE)
        rows = [model(input_ids=row[None], use_cache=False).logits[0, 149:-1].float() for row in ids]
        own = torch.cat([
            (logits / 0.7).log_softmax(-1).gather(1, row[150:, None]).squeeze(1)
            for logits, row in zip(rows, ids, strict=True)
        ])  # fmt: skip
        fault = layout_fault(model, "auto")
    bound = 1e-4 if dtype == torch.float32 and not autocast else 0.03
    errors = {f"{name}_mean_nats": (found - own).abs().mean().item() for name, found in scores.items()}
    cosine = torch.cosine_similarity(gradients["shared"], gradients["packed"], dim=0).item()
    passed = max(errors.values()) < bound and cosine > 0.999 and fault is None
    return passed, errors | {"gradient_cosine": cosine, "layout_fault": fault, "bound": bound}


def main() -> None:
    checks: dict[str, Callable[[], Finding]] = {}
    for name, segments in LAYOUTS.items():
        for heads in HEADS:
            for dtype in dict.fromkeys((HALF, torch.float32)):
                label = f"attention, {name}, {heads[0]}/{heads[1]} heads of {heads[2]}, {str(dtype)[6:]}"
                checks[label] = partial(attention, segments, *heads, dtype)
    checks["attention, contiguous"] = partial(attention, LAYOUTS["one family"], 8, 2, 64, HALF, False)
    checks["attention, heads of 12 dimensions"] = odd_heads
    checks["log-probs, fp32"] = partial(log_probs, torch.float32)
    checks["log-probs, half"] = partial(log_probs, HALF)
    soft = LogitScale(0.7, 1.3, 30.0)
    checks["log-probs, half, bias, soft cap"] = partial(log_probs, HALF, bias=True, scale=soft)
    checks["log-probs, no token"] = no_token
    checks["exact KL, fp32"] = partial(exact_kl, torch.float32)
    checks["exact KL, half"] = partial(exact_kl, HALF)
    checks["model, fp32"] = partial(whole_model, torch.float32, False)
    checks["model, half"] = partial(whole_model, HALF, False)
    if not TINY:
        checks["log-probs, several tiles"] = partial(log_probs, HALF, 2048, 151936)
        checks["log-probs, fp32, compiled"] = partial(log_probs, torch.float32, compiled=True)
        checks["log-probs, half, compiled"] = partial(log_probs, HALF, compiled=True)
    if not ON_CPU:
        checks["log-probs under autocast"] = partial(log_probs, torch.float32, autocast=True)
        checks["model, fp32 under autocast"] = partial(whole_model, torch.float32, True)
    results = [attempt(name, function) for name, function in checks.items()]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
