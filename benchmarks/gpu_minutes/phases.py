"""Time the phases of 16k tokens by shape and options, and say in which kernels their time goes.

python phases.py SECONDS       which bounds the whole
"""

from __future__ import annotations

import gc
import re
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import gpu
import torch
from common import DEVICE, HALF, ON_CPU, OUT, TINY, Finding, attempt, note, time_call
from torch.profiler import ProfilerActivity

from rlt_lightning.models.kernels import Kernels
from rlt_lightning.models.lora import LoRA
from rlt_lightning.modules.phases import peak_memory, reset_peak_memory

KINDS = {  # of kernels, by their names: the first that fits
    "attention": r"flash|fmha|attn",
    "products": r"gemm|cutlass|nvjet|sm\d+_xmma|cublas|wgmma|matmul",
    "copies": r"memcpy|memset|copy_kernel|direct_copy|CatArray",
    "compiled": r"^triton_",
    "Liger": r"rms_norm|rope|swiglu",
    "reductions": r"reduce",
    "elementwise": r"elementwise|fill|index|gather|scatter|norm|softmax",
}
# Shape and options. The most valuable of a second first.
CASES = [
    ("qwen2.5-0.5b", "bf16, Liger"),
    ("qwen2.5-1.5b", "bf16, Liger"),
    ("7b", "LoRA, bf16-mixed, Liger, checkpointing"),
    ("qwen2.5-0.5b", "bf16, checkpointing"),
    ("qwen2.5-0.5b", "bf16-mixed, Liger"),
    ("7b", "bf16, Liger, checkpointing"),
    ("qwen2.5-1.5b", "bf16, checkpointing"),
]


def ceilings() -> Finding:
    """Measure the two ceilings: matrix products, and a large copy, bytes read and written."""
    source = torch.randn(2**20 if TINY else 2**30, device=DEVICE, dtype=HALF)
    target = torch.empty_like(source)
    copy_gb_s = 2 * source.nbytes / time_call(partial(target.copy_, source)) / 1e9
    return None, {"tflops": gpu.matmul_rate(DEVICE, HALF) / 1e12, "copy_gb_s": copy_gb_s}


def phases(name: str, shape: str, options: str) -> Finding:
    """Time the optimise and the score phase; MFU is against the measured rate of products."""
    kernels = Kernels(liger="Liger" in options and not ON_CPU)
    group = gpu.Group(
        gpu.SHAPES[shape], 256 if TINY else 16384, "checkpointing" in options, DEVICE, kernels,
        mixed="mixed" in options, lora=LoRA() if "LoRA" in options else None,
    )  # fmt: skip
    reset_peak_memory(DEVICE)  # that of the checks at the start does not count
    optimise_s = time_call(group.optimise)
    fields: dict[str, Any] = {"optimise_s": optimise_s, "peak_gib": peak_memory(DEVICE) / 2**30}
    score_s, peak = time_call(group.score), gpu.matmul_rate(DEVICE, HALF)
    fields |= {"mfu": group.optimise_flops() / optimise_s / peak, "score_s": score_s}
    fields["score_mfu"] = gpu.forward_flops(group.policy, group.packed) / score_s / peak
    return None, fields | profile(name, group) | {"kernels": group.kernels}


def profile(name: str, group: gpu.Group) -> dict[str, Any]:
    """Return the GPU's time in ms by kind of kernel; write the table of kernels to a file."""
    activities = [ProfilerActivity.CPU] + ([] if ON_CPU else [ProfilerActivity.CUDA])
    with torch.profiler.profile(activities=activities) as recorded:
        group.optimise()
    kinds: Counter[str] = Counter()
    for event in recorded.events():
        if str(event.device_type).endswith("CUDA"):
            fitting = (kind for kind, words in KINDS.items() if re.search(words, event.name, re.IGNORECASE))
            kinds[next(fitting, "other")] += event.self_device_time_total / 1e3
    order = "self_cpu_time_total" if ON_CPU else "self_device_time_total"
    table = recorded.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
    with open(OUT / "profiles.txt", "a") as file:
        file.write(f"\n{name}\n{table}\n")
    return {f"{kind}_ms": round(ms, 2) for kind, ms in kinds.most_common()}


def main() -> None:
    end = time.monotonic() + float(sys.argv[1])
    results = [attempt("ceilings", ceilings)]
    for shape, options in [("tiny", "LoRA, bf16-mixed, checkpointing")] if TINY else CASES:
        name = f"phases, {shape}, {options}"
        if time.monotonic() > end:
            note(name, why="skipped: no time left")
            continue
        results.append(attempt(name, partial(phases, name, shape, options)))
        gc.collect()
        torch.cuda.empty_cache()
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
