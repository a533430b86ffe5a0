"""Shared by the benchmarks: options, sides that alternate in one run, peak memory, results, pictures.

A benchmark is a file of this folder. It reads its options by `benchmark_parser` and `read_options`, so that
all have --tiny, --rounds and --output, and ends with `finish`:

    finish(options.output, results, ratio=4.9, goal=5.0)  ->  reward ratio=4.9 goal=5

`finish` writes the JSON, prints that line as the last of its output, and only then draws: without matplotlib
only the picture is missing. The JSON says where it comes from: commit, machine, command, date.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import rlt_lightning
from rlt_lightning.modules.phases import peak_memory, reset_peak_memory, resident_bytes, synchronise

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "lightning", "deepspeed", "vllm", "triton", "liger-kernel", "flash-attn")


def benchmark_parser(description: str | None, rounds: int | None = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; results go to runs/benchmarks/NAME.json.

    Args:
        description: The benchmark's docstring.
        rounds: How often each side runs after the warm-up; None: there is no such option.
    """
    name = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a size that shows only that it works")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="of each side, after the warm-up")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "benchmarks" / f"{name}.json")
    return parser


def read_options(parser: argparse.ArgumentParser, **tiny: Any) -> argparse.Namespace:
    """Read the command line; with --tiny, the given defaults replace the others."""
    options = parser.parse_args()
    if options.tiny:
        parser.set_defaults(**{"rounds": 1} | tiny)
        options = parser.parse_args()
    return options


def measure(function: Callable[[], Any], device: torch.device = CPU) -> dict[str, float]:
    """Run once; return seconds, CPU seconds of all threads, and how far memory in use rises, bytes."""
    gc.collect()
    if device.type == "cpu" and sys.platform == "linux":
        # What the run before left with the allocator is no memory in use.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    reset_peak_memory(device)
    before = memory_now(device)
    synchronise(device)
    start, cpu_start = time.perf_counter(), cpu_seconds()
    function()
    synchronise(device)
    seconds, cpu_s = time.perf_counter() - start, cpu_seconds() - cpu_start
    return {"seconds": seconds, "cpu_s": cpu_s, "peak_bytes": peak_memory(device) - before}


def measure_training(
    model: torch.nn.Module, phase: Callable[[], None], device: torch.device = CPU
) -> dict[str, float]:
    """Measure a phase that leaves gradients, in a process that takes turns on the device with others."""
    if device.type == "cuda":
        phase()  # memory is taken from the driver now, and given back below
    model.zero_grad()
    measured = measure(phase, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return measured


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory_now(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_bytes() or 0


def alternate(
    sides: dict[str, Callable[[], dict[str, float]]], rounds: int, warm_up: int = 1
) -> dict[str, dict[str, Any]]:
    """Run the sides in turns, so that disturbances meet all of them; return medians after the warm-up."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(warm_up + rounds):
        for name, side in sides.items():
            runs[name].append(side())
            print(f"round {number}: {name} {runs[name][-1]}", flush=True)
    return {
        name: {key: statistics.median(run[key] for run in found[warm_up:]) for key in found[0]}
        | {"all_seconds": [run["seconds"] for run in found[warm_up:]]}
        for name, found in runs.items()
    }


def run_text(*command: str) -> str:
    """Return what a command prints, or nothing where it cannot be run."""
    with suppress(OSError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return ""


def proc_field(file: str, field: str) -> str:
    """Return a field of a file in /proc, or nothing."""
    with suppress(OSError):
        lines = Path("/proc", file).read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
    return ""


def machine() -> dict[str, Any]:
    """Return what the machine is, without its name: processor, cores, memory, GPUs."""
    memory_kb = int((proc_field("meminfo", "MemTotal") or "0").split()[0])
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    found: dict[str, Any] = {
        "cpu": proc_field("cpuinfo", "model name") or platform.machine(),
        "cores": cores,
        "memory_gib": round(memory_kb / 2**20, 1),
        "load": os.getloadavg()[0],
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpus"] = torch.cuda.device_count()
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def provenance() -> dict[str, Any]:
    """Return where a result comes from."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    # Of the package that was imported, which need not be the one beside this file.
    git = ("git", "-C", str(Path(rlt_lightning.__file__).parents[1]))
    changed = run_text(*git, "status", "--porcelain", "--", "rlt_lightning", "benchmarks")
    words, ends = sys.argv[1:], [i for i, word in enumerate(sys.argv[1:]) if word == "--output"]
    options = [word for i, word in enumerate(words) if not any(i - end in (0, 1) for end in ends)]
    return {
        "command": shlex.join(["python", str(name), *options]),
        "commit": run_text(*git, "rev-parse", "--short=12", "HEAD") or "unknown",
        "uncommitted_changes": bool(changed),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def write(output: Path, results: dict[str, Any]) -> None:
    """Write the results, and where they come from, as JSON."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"provenance": provenance()} | results, indent=2) + "\n")


def finish(
    output: Path, results: dict[str, Any], draw: Callable[[], None] | None = None, **figures: float | str
) -> None:
    """Write the results, print the last line, which has the figures, and draw."""
    write(output, results | {"figures": figures})
    words = [
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in figures.items()
    ]
    print(Path(sys.argv[0]).stem, *words, flush=True)
    if draw is not None:
        draw_picture(draw)


def draw_picture(draw: Callable[[], None]) -> None:
    """Draw, unless matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
    else:
        draw()


def bars(output: Path, title: str, panels: dict[str, dict[str, float]]) -> None:
    """Draw one panel per quantity and one bar per side, as a PNG beside the JSON."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2), squeeze=False)
    for axis, (unit, values) in zip(axes[0], panels.items(), strict=True):
        drawn = axis.bar(
            list(values), list(values.values()), color=["#9aa5b1", "#2f6f9f", "#7fb069"][: len(values)]
        )
        axis.bar_label(drawn, fmt="%.3g")
        axis.set_ylabel(unit)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.15)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(output.with_suffix(".png"), dpi=120)
