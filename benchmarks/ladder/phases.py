"""Step 7: where the time of the optimise phase goes, by kind of kernel: as in a run, and without fusing."""

from __future__ import annotations

import re
from collections import Counter

import gpu
import torch
from common import DEVICE, ON_CPU, OUT, TINY, median_seconds, note
from torch.profiler import ProfilerActivity

from rlt_lightning.models.kernels import Kernels
from rlt_lightning.models.packed import HeadOptions
from rlt_lightning.modules.phases import forward_flops, matmul_rate, synchronise

KINDS = {  # the first that fits
    "attention": r"flash|fmha|attn",
    "matrix products": r"gemm|cutlass|nvjet|sm\d+_xmma|cublas|wgmma|matmul",
    "copies": r"memcpy|memset|copy_kernel|direct_copy|CatArray",
    "compiled": r"^triton_",
    "reductions": r"reduce",
    "elementwise": r"elementwise|fill|index|gather|scatter|norm|softmax",
}
SIDES = {
    "plain blocks and head": (Kernels(liger=False), HeadOptions(compiled=False)),
    "as in a run": (Kernels(), HeadOptions()),
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpyAsync", "cudaLaunchKernel")


def kind_of(kernel: str) -> str:
    """Return what a GPU kernel does, by its name."""
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE)), "other")


def profile(shape: str, side: str, peak: float) -> None:
    """Note time, MFU, GPU time by kind of kernel and calls that wait, of one optimise phase."""
    group = gpu.Group(
        gpu.SHAPES[shape], 256 if TINY else 16384, shape in gpu.CHECKPOINTED, DEVICE, *SIDES[side]
    )
    taken = median_seconds(group.optimise, rounds=1 if TINY else 3)
    group.policy.zero_grad()
    activities = [ProfilerActivity.CPU] + ([] if TINY else [ProfilerActivity.CUDA])
    with torch.profiler.profile(activities=activities) as recorded:
        group.optimise()
        synchronise(DEVICE)
    by_kind: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in recorded.events():
        if str(event.device_type).endswith("CUDA"):
            by_kind[kind_of(event.name)] += event.self_device_time_total / 1e3
            calls["kernels"] += 1
        elif event.name in WAITS:
            calls[event.name] += 1
    mfu = 4 * forward_flops(group.policy, group.packed) / taken / peak
    note(
        f"profile, {shape}, {side}",
        seconds=taken, mfu=mfu, gpu_ms_by_kind=dict(by_kind.most_common()), calls=dict(calls),
        kernels=group.kernels,
    )  # fmt: skip
    order = "self_cpu_time_total" if TINY else "self_device_time_total"
    table = recorded.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
    with open(OUT / "profiles.txt", "a") as file:
        file.write(f"\n{shape}, {side}\n{table}\n")


def main() -> None:
    peak = matmul_rate(DEVICE, torch.float32 if ON_CPU else torch.bfloat16)
    # Liger's rotation, once chosen, is that of all models of the process: the plain side comes first.
    for side in SIDES:
        for shape in ("tiny",) if TINY else ("qwen2.5-0.5b", "7b"):
            profile(shape, side, peak)
            if not ON_CPU:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
