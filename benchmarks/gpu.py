"""On a GPU: reward, optimise phase, head memory and MFU of a shape with random weights, with a profile.

    .venv/bin/python benchmarks/gpu.py [--shape qwen2.5-0.5b|qwen2.5-1.5b|7b|tiny] [--tokens 16384]
        [--gradient_checkpointing true|false]

bf16 weights, one group of completions behind one prompt, about `--tokens` tokens in one packed row.
Attention, blocks and head use the kernels that a run chooses by default; the JSON names them. The other side
is the same model with the same blocks, one completion at a time with full logits. MFU is that of the optimise
phase (reference pass, forward and backward), relative to the rate of a large matrix product that is measured
first; what gradient checkpointing computes again does not count. By default gradient checkpointing is on only
for shapes whose activations do not fit otherwise. The profile of one phase is written next to the JSON.
Without a GPU it runs a tiny shape on the CPU, to show that it works, and says so.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import alternate, bars, benchmark_parser, draw_picture, finish, measure, read_options
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlt_lightning.models.attention import SEGMENT_ATTENTION, register_segment_attention
from rlt_lightning.models.kernels import Kernels, fuse_blocks, prepare_model
from rlt_lightning.models.lora import LoRA, add_adapter, without_adapter
from rlt_lightning.models.packed import HeadOptions, compute_log_probs
from rlt_lightning.modules.phases import count_weights, synchronise
from rlt_lightning.numerics import GRPOLoss
from rlt_lightning.numerics.attention import KERNELS
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence, to_padded

GOAL = 0.45
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip
# By the plan, 16k tokens have 96 GiB of activations, those of 0.5B 21.
CHECKPOINTED = ("7b",)


def call(model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(model, *arguments)`."""
    return function(model, *arguments)


class Group:
    """One prompt and its completions, through policy and reference.

    Args:
        shape: Of the model, one of `SHAPES`.
        tokens: In the packed row, about.
        checkpointing: Whether the policy's blocks are computed again in the backward pass.
        device: Computes.
        kernels: As `model.kernels`; the default is what a run chooses by itself.
        head: As `model.head`, likewise.
        mixed: Whether trained weights are fp32, and products bf16 by autocast, as with bf16-mixed.
        lora: Adapters are trained, and the frozen weights, in half precision on a GPU, are the reference.
    """

    def __init__(
        self,
        shape: dict[str, Any],
        tokens: int,
        checkpointing: bool,
        device: torch.device,
        kernels: Kernels = Kernels(),
        head: HeadOptions = HeadOptions(),
        mixed: bool = False,
        lora: LoRA | None = None,
    ) -> None:
        register_segment_attention()
        torch.manual_seed(0)
        config = Qwen2Config(**shape, max_position_embeddings=32768, attn_implementation=SEGMENT_ATTENTION)
        full = device.type == "cpu" or (mixed and lora is None)
        with torch.device(device):
            self.policy = Qwen2ForCausalLM(config).to(torch.float32 if full else torch.bfloat16).train()
        self.lora, self.reference = lora, self.policy
        if lora is None:
            self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        else:
            add_adapter(self.policy, lora, seed=0)
        self.autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=mixed)
        if checkpointing:
            self.policy.gradient_checkpointing_enable({"use_reentrant": False})
        name = f"{shape['hidden_size']} x {shape['num_hidden_layers']}"
        with self.autocast():  # as at the start of a run: check_model in modules/policy.py
            self.head = prepare_model(partial(call, self.policy), name, kernels, head, device)
            blocks = fuse_blocks(partial(call, self.reference), name, kernels, device)
        self.kernels: dict[str, Any] = {
            "attention": KERNELS[device.type].name,
            "blocks": blocks,
            "compiled_head": bool(self.head.compiled),
        }
        self.device, self.prompt_length = device, max(4, tokens // 8)
        self.length = max(2, (tokens - self.prompt_length) // 16)
        prompt = torch.randint(shape["vocab_size"], (self.prompt_length,)).tolist()
        rests = torch.randint(shape["vocab_size"], (16, self.length)).tolist()
        mask = [False] * self.prompt_length + [True] * self.length
        self.sequences = [ScoredSequence(prompt, rest, mask) for rest in rests]
        self.advantages = torch.randn(16, device=device)
        self.packed = PackedSequences.from_sequences(self.sequences, (tuple(range(16)),), device)

    def loss(self, log_probs: Tensor, ref_log_probs: Tensor, advantages: Tensor) -> Tensor:
        mask = torch.ones_like(log_probs, dtype=torch.bool)
        options = {"advantages": advantages, "token_mask": mask, "num_sequences": 16}
        return GRPOLoss()(log_probs=log_probs, ref_log_probs=ref_log_probs, **options)[0]

    @torch.no_grad()
    def score(self) -> Tensor:
        with self.autocast():
            return without_adapter(self.reference, compute_log_probs, self.packed, 0.7, self.head)[0]

    def optimise(self) -> None:
        lengths = [self.length] * 16
        ref_log_probs = to_padded(self.score(), lengths)[0]
        with self.autocast():
            flat, _ = compute_log_probs(self.policy, self.packed, 0.7, self.head, with_entropy=True)
            loss = self.loss(to_padded(flat, lengths)[0], ref_log_probs, self.advantages)
        loss.backward()

    def optimise_flops(self) -> float:
        """Return what the optimise phase must compute: the reference's forward, forward and backward.

        A backward is two forwards, or one where frozen weights need no gradient.
        """
        return (4 if self.lora is None else 3) * forward_flops(self.policy, self.packed)

    def full_log_probs(self, model: Any, sequence: ScoredSequence) -> Tensor:
        ids = torch.tensor([sequence.prefix + sequence.rest], device=self.device)
        logits = model(input_ids=ids, use_cache=False).logits.float() / 0.7
        return logits.log_softmax(-1)[:, self.prompt_length - 1 : -1].gather(
            2, ids[:, self.prompt_length :, None]
        )[..., 0]

    @torch.no_grad()
    def score_one_by_one(self) -> None:
        for sequence in self.sequences:
            self.full_log_probs(self.reference, sequence)

    def optimise_one_by_one(self) -> None:
        for sequence, advantage in zip(self.sequences, self.advantages, strict=True):
            with torch.no_grad():
                ref_log_probs = self.full_log_probs(self.reference, sequence)
            log_probs = self.full_log_probs(self.policy, sequence)
            self.loss(log_probs, ref_log_probs, advantage[None]).backward()


@cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the device's best rate of matrix products, FLOP/s; only once."""
    # A GPU's clock takes a second to rise.
    size, enough_s = (8192, 1.0) if device.type == "cuda" else (1024, 0.05)
    a = torch.randn(size, size, device=device, dtype=dtype)
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < enough_s:
        synchronise(device)
        start = time.perf_counter()
        a @ a
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def forward_flops(model: Any, packed: PackedSequences) -> float:
    """Return the floating-point operations of a forward's products with weights, but for the head's."""
    return 2 * count_weights(model) * packed.input_ids.shape[1]


def profile(function: Any, path: Path) -> None:
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=activities) as recorded:
        function()
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    path.write_text(recorded.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=60))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--gradient_checkpointing", choices=["true", "false"])
    options = read_options(parser, shape="tiny", tokens=256)
    device, shape, tokens = torch.device("cuda"), options.shape, options.tokens
    if not torch.cuda.is_available():
        print("No GPU: a tiny shape on the CPU, which shows that the script works and nothing of its speed.")
        device, shape, tokens = torch.device("cpu"), "tiny", min(tokens, 1024)
    chosen = options.gradient_checkpointing
    checkpointing = chosen == "true" if chosen else shape in CHECKPOINTED
    group = Group(SHAPES[shape], tokens, checkpointing, device)
    peak = matmul_rate(device, next(group.policy.parameters()).dtype)

    def side(function: Any) -> Any:
        def once() -> dict[str, float]:
            group.policy.zero_grad()
            return measure(function, device)

        return once

    sides = {"one by one": side(group.score_one_by_one), "ours": side(group.score)}
    reward = alternate(sides, options.rounds, warm_up=2)
    optimise = alternate(
        {"one by one": side(group.optimise_one_by_one), "ours": side(group.optimise)},
        options.rounds,
        warm_up=2,
    )
    mfu = group.optimise_flops() / optimise["ours"]["seconds"] / peak
    speed_up = {
        phase: found["one by one"]["seconds"] / found["ours"]["seconds"]
        for phase, found in (("score", reward), ("optimise", optimise))
    }
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    setting: dict[str, Any] = {"device": name, "shape": shape, "tokens": group.packed.input_ids.shape[1]}
    setting |= {"gradient_checkpointing": checkpointing, "kernels": group.kernels}
    results = {"peak_tflops": peak / 1e12, "speed_up": speed_up, "score": reward, "optimise": optimise}
    panels = {
        "score, s": {side: found["seconds"] for side, found in reward.items()},
        "optimise, s": {side: found["seconds"] for side, found in optimise.items()},
        "optimise, GiB": {side: found["peak_bytes"] / 2**30 for side, found in optimise.items()},
    }

    def draw() -> None:
        bars(options.output, f"{shape}, {setting['tokens']} packed tokens, {name}", panels)

    print(
        f"{name}, {shape}: score {speed_up['score']:.2f}, optimise {speed_up['optimise']:.2f} times as fast"
    )
    finish(options.output, setting | results, mfu=mfu, goal=GOAL)
    profile(group.optimise, options.output.with_suffix(".profile.txt"))
    draw_picture(draw)


if __name__ == "__main__":
    main()
