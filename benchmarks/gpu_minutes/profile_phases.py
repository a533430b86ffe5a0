"""Profile where the time of the optimise phase goes, by kind of kernel, as in a run."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter

import gpu
import torch
from common import DEVICE, ON_CPU, OUT, TINY, Finding, attempt, note
from findings import measured_before
from torch.profiler import ProfilerActivity

from rlt_lightning.models.kernels import Kernels
from rlt_lightning.models.lora import LoRA
from rlt_lightning.modules.phases import synchronise

KINDS = {  # the first that fits
    "attention": r"flash|fmha|attn",
    "matrix products": r"gemm|cutlass|nvjet|sm\d+_xmma|cublas|wgmma|matmul",
    "copies": r"memcpy|memset|copy_kernel|direct_copy|CatArray",
    "compiled": r"^triton_",
    "Liger": r"rms_norm|rope|swiglu",
    "reductions": r"reduce",
    "elementwise": r"elementwise|fill|index|gather|scatter|norm|softmax",
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpyAsync", "cudaLaunchKernel")
# Shape, checkpointing, Liger, bf16-mixed, LoRA.
CASES = {
    "qwen2.5-0.5b, Liger": ("qwen2.5-0.5b", False, None, False, False),
    "7b LoRA, bf16-mixed, Liger, checkpointing": ("7b", True, None, True, True),
    "qwen2.5-0.5b, bf16-mixed, Liger": ("qwen2.5-0.5b", False, None, True, False),
    "qwen2.5-0.5b, checkpointing": ("qwen2.5-0.5b", True, False, False, False),
}


def kind_of(kernel: str) -> str:
    """Return what a GPU kernel does, by its name."""
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE)), "other")


def profile(
    name: str, shape: str, checkpointing: bool, liger: bool | None, mixed: bool, lora: bool
) -> Finding:
    """Return GPU time by kind of kernel and calls that wait; write the table of kernels to a file."""
    options = {"kernels": Kernels(liger=liger), "mixed": mixed, "lora": LoRA() if lora else None}
    group = gpu.Group(gpu.SHAPES[shape], 256 if TINY else 16384, checkpointing, DEVICE, **options)
    for _ in range(2):
        group.optimise()
    synchronise(DEVICE)
    activities = [ProfilerActivity.CPU] + ([] if ON_CPU else [ProfilerActivity.CUDA])
    with torch.profiler.profile(activities=activities) as recorded:
        start = time.perf_counter()
        group.optimise()
        synchronise(DEVICE)
        taken = time.perf_counter() - start
    by_kind: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in recorded.events():
        if str(event.device_type).endswith("CUDA"):
            by_kind[kind_of(event.name)] += event.self_device_time_total / 1e3
            calls["kernels"] += 1
        elif event.name in WAITS:
            calls[event.name] += 1
    order = "self_cpu_time_total" if ON_CPU else "self_device_time_total"
    table = recorded.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
    with open(OUT / "profiles.txt", "a") as file:
        file.write(f"\n{name}\n{table}\n")
    kinds = {kind: round(ms, 2) for kind, ms in by_kind.most_common()}
    return None, {"seconds": taken, "gpu_ms_by_kind": kinds, "calls": dict(calls), "kernels": group.kernels}


def main() -> None:
    end = time.monotonic() + float(sys.argv[1])
    before = measured_before()
    cases = {"tiny": ("tiny", True, None, False, True)} if TINY else CASES
    for name, case in cases.items():
        if f"profile, {name}" in before:
            continue
        if time.monotonic() > end:
            note(f"profile, {name}", why="skipped: no time left")
            continue
        attempt(f"profile, {name}", lambda name=name, case=case: profile(name, *case))  # type: ignore[misc]
        if not ON_CPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
