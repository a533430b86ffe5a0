"""Step 9: the in-process engine beside transformers' generate: tokens a second, part of the memory's rate."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gpu
import torch
from common import DEVICE, HALF, TINY, median_seconds, note
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rlt_lightning.engines import HFEngine, SampleRequest, Sampling, sample_all
from rlt_lightning.models.attention import SEGMENT_ATTENTION, register_segment_attention
from rlt_lightning.models.embedded import MINIATURES


def copy_rate() -> float:
    """Return the memory's rate, bytes a second, of a large copy."""
    source = torch.zeros(2**22 if TINY else 2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * len(source) / median_seconds(lambda: target.copy_(source))


def request(prompt: list[int], num: int, length: int) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` for the same completions."""
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=0, eos_token_id=None, pad_token_id=0,
        min_new_tokens=length, max_new_tokens=length, num_return_sequences=num,
    )  # fmt: skip
    tokens = torch.tensor([prompt], device=DEVICE)
    return {"inputs": tokens, "attention_mask": torch.ones_like(tokens), "generation_config": config}


def main() -> None:
    register_segment_attention()
    rate = copy_rate()
    note("memory's rate", gb_per_s=rate / 1e9)
    for shape in ("tiny",) if TINY else ("qwen2.5-0.5b", "7b"):
        torch.manual_seed(0)
        settings: dict[str, Any] = gpu.SHAPES[shape] | {"attn_implementation": SEGMENT_ATTENTION}
        config = Qwen2Config(**settings, max_position_embeddings=4096)
        with torch.device(DEVICE):
            model: Any = Qwen2ForCausalLM(config)
        model = model.to(HALF).eval()
        model.generation_config.eos_token_id = None  # all completions of full length
        tokenizer = AutoTokenizer.from_pretrained(str(MINIATURES["miniature"]))
        tokenizer.eos_token = None
        engine = HFEngine()
        engine.start(model, tokenizer, Path())
        prompt = torch.randint(300, (16 if TINY else 512,)).tolist()
        length = 4 if TINY else 64
        weights = sum(p.nbytes for p in model.parameters())
        for num in (2,) if TINY else (1, 16, 64):
            options = Sampling(temperature=0.7, max_completion_length=length)
            requests = [SampleRequest(prompt, seed=0, num_completions=num)]
            sample = partial(sample_all, engine, requests, options, "</never>")
            taken = median_seconds(sample, rounds=1 if TINY else 3, warm_up=1)
            note(
                f"HFEngine, {shape}, {num} sequences",
                tokens_per_s=num * length / taken,
                part_of_memory_rate=weights * length / taken / rate,
            )
            theirs = partial(model.generate, **request(prompt, num, length))
            assert theirs().shape == (num, len(prompt) + length)
            taken = median_seconds(theirs, rounds=1, warm_up=1)
            note(f"transformers' generate, {shape}, {num} sequences", tokens_per_s=num * length / taken)


if __name__ == "__main__":
    main()
