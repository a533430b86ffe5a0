"""Measure the in-process engine: tokens per second, and how much of the memory bandwidth weights take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu
import torch
from common import DEVICE, HALF, ON_CPU, TINY, median_seconds, note
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from rlt_lightning.engines import HFEngine, SampleRequest, Sampling, sample_all
from rlt_lightning.models.attention import SEGMENT_ATTENTION, register_segment_attention
from rlt_lightning.models.embedded import MINIATURES

PROFILED = 8  # token steps: a profile of more takes longer to read than to make


def copy_rate() -> float:
    """Return the memory's rate, bytes a second, of a large copy."""
    source = torch.zeros(2**22 if TINY else 2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * len(source) / median_seconds(lambda: target.copy_(source))


def profile(sample: Callable[[], Any], length: int) -> dict[str, Any]:
    """Return how many kernels a token step has, and their milliseconds, the prompt's included."""
    if ON_CPU:
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        sample()
    kernels = [event for event in recorded.events() if str(event.device_type).endswith("CUDA")]
    busy_ms = sum(event.self_device_time_total for event in kernels) / 1e3
    return {"kernels_per_step": len(kernels) / length, "gpu_ms_per_step": busy_ms / length}


def main() -> None:
    register_segment_attention()
    rate = copy_rate()
    torch.manual_seed(0)
    shape = "tiny" if TINY else "qwen2.5-0.5b"
    settings: dict[str, Any] = gpu.SHAPES[shape] | {"attn_implementation": SEGMENT_ATTENTION}
    with torch.device(DEVICE):
        model: Any = Qwen2ForCausalLM(Qwen2Config(**settings, max_position_embeddings=4096))
    model = model.to(HALF).eval()
    model.generation_config.eos_token_id = None  # all completions of full length
    tokenizer = AutoTokenizer.from_pretrained(str(MINIATURES["miniature"]))
    tokenizer.chat_template = tokenizer.eos_token = None
    prompt = torch.randint(300, (16 if TINY else 512,)).tolist()
    length = 4 if TINY else 64
    weights = sum(p.nbytes for p in model.parameters())
    for rows in (2, 4) if TINY else (64, 256):
        engine = HFEngine(max_sequences=rows)
        engine.start(model, tokenizer, Path())
        options = Sampling(temperature=0.7, max_completion_length=length)
        requests = [SampleRequest(prompt, seed=0, num_completions=rows)]
        sample = partial(sample_all, engine, requests, options, "</never>")
        few = replace(options, max_completion_length=PROFILED)
        taken = median_seconds(sample, rounds=1 if TINY else 2, warm_up=1)
        note(
            f"engine, {shape}, {rows} rows",
            tokens_per_s=rows * length / taken,
            ms_per_token_step=taken / length * 1e3,
            part_of_memory_rate=weights * length / taken / rate,
            **profile(partial(sample_all, engine, requests, few, "</never>"), PROFILED),
        )


if __name__ == "__main__":
    main()
