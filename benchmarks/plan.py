"""`rlt plan` against small real runs: predicted and measured peak memory of one process.

    .venv/bin/python benchmarks/plan.py [--only NAME ...] [--allocator default]
    .venv/bin/python benchmarks/plan.py --pages

Each set-up is planned, then SmolLM2-135M is trained in it for two steps on the CPU. The plan's largest
measured phase is compared with the largest perf/*_peak_gib of the second step, the first with gradients and
moments in place: VmHWM, from /proc, of the process that needs most. A checkpoint is written after the last
step, outside of the measured phases: resident memory is therefore also read from outside, ten times a second.

A CPU's allocator keeps what is freed: by default glibc returns only blocks above a threshold that grows to
32 MiB, so resident memory is more than what is in use. With `--allocator exact`, the default here, the runs
have MALLOC_ARENA_MAX=1 and return every block above 64 KiB; `--allocator default` leaves them alone.

`--pages` plans the large set-ups of docs/hardware.md instead, from the published shapes of the models.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import benchmark_parser, finish, read_options

ROOT = Path(__file__).parents[1]
GIB = 2**30
EXACT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SFT = ["--config=research/configs/correctness_warmup.yaml", "--data.prompts_per_step=32"]
RLT = ["--config=configs/laptop/smollm2_rlt.yaml", "--model.teacher=smollm2-135m"]
RLT += ["--model.student_dtype=float32", "--trainer.precision=32-true"]  # as fast on every CPU
ZERO3 = ["--config=configs/hardware/zero3.yaml", "--trainer.devices=2", "--model.micro_batch_tokens=1024"]
FSDP2 = ["--config=configs/hardware/fsdp2.yaml", "--trainer.devices=2"]
SHORT = ["--rollouts.sampling.max_completion_length=8"]  # HFEngine gathers shards anew for every token
SETUPS: dict[str, list[str]] = {
    "rlt": RLT,
    "sft": [*SFT, "--model.micro_batch_tokens=2048"],
    "sft_checkpointing": [*SFT, "--model.micro_batch_tokens=2048", "--model.gradient_checkpointing=true"],
    "sft_bfloat16": [*SFT, "--model.micro_batch_tokens=2048", "--model.dtype=bfloat16"],
    "sft_mixed": [*SFT, "--model.micro_batch_tokens=2048", "--trainer.precision=bf16-mixed"],
    "sft_ddp": [*SFT, "--model.micro_batch_tokens=1024", "--trainer.devices=2"],
    "sft_zero1": [*SFT, *ZERO3, "--trainer.strategy=deepspeed_stage_1"],
    "sft_zero3": [*SFT, *ZERO3],
    "rlt_fsdp2": [*RLT, *FSDP2, *SHORT],
    "rlt_zero3": [*RLT, *ZERO3, *SHORT],
}
TINY = {
    "tiny": ["--config=configs/laptop/rlt.yaml", "--model.group_size=2", "--data.prompts_per_step=2", *SHORT]
}
TEACHER = ["--config=configs/recipe_7b/rlt.yaml"]
STUDENT = ["--config=recipe_7b/sft", "--config=add/student_32b"]
PAGES: dict[str, list[str]] = {
    "7B teacher, 4 train with ZeRO-3, 4 sample": [*TEACHER, "--config=configs/hardware/zero3_8gpu.yaml"],
    "7B teacher, 4 train with FSDP2, 4 sample": [*TEACHER, "--config=configs/hardware/fsdp2_8gpu.yaml"],
    "7B teacher, 8 by turns": [*TEACHER, "--config=configs/hardware/zero3_8gpu_colocated.yaml"],
    "7B teacher, 8 by DDP": [*TEACHER, "--trainer.devices=8"],
    "32B student, 8": STUDENT,
    "32B student, 8, on the host": [*STUDENT, "--config=configs/hardware/cpu_offload.yaml"],
    "32B student, 16": [*STUDENT, "--trainer.num_nodes=2"],
}  # fmt: skip
OUTSIDE = ("checkpoint",)  # phases of the plan that no metric covers


def rlt(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rlt_lightning", *arguments]


def planned(arguments: list[str], file: Path) -> dict[str, float]:
    """Return the GiB that `rlt plan` predicts for every phase."""
    command = rlt("plan", *arguments, f"--plan.json={file}")
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)  # 1 where it does not fit
    return {name: phase["total"] / GIB for name, phase in json.loads(file.read_text())["phases"].items()}


def measured(
    arguments: list[str], folder: Path, environment: dict[str, str]
) -> tuple[dict[str, float], float]:
    """Return GiB of every measured phase of the second step, and the most that a process was seen to have."""
    command = rlt("fit", *arguments, "--trainer.max_steps=2", "--checkpoint.every_n_train_steps=2")
    command += ["--export.enabled=false", f"--output_dir={folder}"]
    most = 0.0
    with open(folder.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            most = max(most, resident(str(folder)))
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {folder.with_suffix('.log').read_text()[-2000:]}")
    with open(folder / "metrics.csv", newline="") as file:
        last = list(csv.DictReader(file))[-1]
    ends = "_peak_gib"
    return {
        name.removeprefix("perf/").removesuffix(ends): float(value)
        for name, value in last.items()
        if name.endswith(ends)
    }, most


def pages() -> None:
    """Plan large set-ups from configurations that hold only shapes."""
    print("| set-up | start, GiB | peak, GiB | in | largest | host, GiB a process | fits |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for title, arguments in PAGES.items():
            file = Path(scratch) / "plan.json"
            subprocess.run(
                rlt("plan", *arguments, f"--plan.json={file}"),
                cwd=ROOT,
                check=False,
                stdout=subprocess.DEVNULL,
            )
            plan = json.loads(file.read_text())
            device = plan["phases"][plan["peak_phase"]]["device"]
            host = max(sum(phase["host"].values()) for phase in plan["phases"].values())
            largest = sorted(device.items(), key=lambda item: -item[1])[:3]
            parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in largest)
            start = plan["phases"]["start"]["total"] / GIB
            cells = [title, f"{start:.1f}", f"{plan['peak_bytes'] / GIB:.1f}", plan["peak_phase"], parts]
            cells += [f"{host / GIB:.0f}", "yes" if plan["fits"] else "no"]
            print("|", " | ".join(cells), "|", flush=True)


def resident(word: str) -> float:
    """Return the GiB of the largest process that has a word in its command line."""
    largest = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "cmdline").read_text():
                lines = (folder / "status").read_text().splitlines()
                largest = max(
                    [largest, *(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))]
                )
        except OSError:
            continue  # it has ended
    return largest * 1024 / GIB


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=None)
    parser.add_argument("--only", nargs="*", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--allocator", choices=("exact", "default"), default="exact")
    parser.add_argument("--pages", action="store_true")
    options = read_options(parser, only=list(TINY))
    if options.pages:
        pages()
        return
    environment = EXACT if options.allocator == "exact" else {}
    setups, results = SETUPS | TINY, {}
    print("| set-up | phase | predicted, GiB | measured, GiB | ratio | the run's most, from outside |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in options.only:
        with tempfile.TemporaryDirectory() as scratch:
            plan = planned(setups[name], Path(scratch) / "plan.json")
            found, most = measured(setups[name], Path(scratch) / "run", environment)
        inside = {phase: total for phase, total in plan.items() if phase not in OUTSIDE}
        phase = max(inside, key=inside.__getitem__)
        predicted, real = inside[phase], max(found.values())
        results[name] = {"plan": plan, "measured": found, "from_outside": most}
        results[name] |= {"predicted": predicted, "real": real, "ratio": predicted / real}
        print(
            f"| `{name}` | {phase} | {predicted:.2f} | {real:.2f} | {predicted / real:.2f} | {most:.2f} |",
            flush=True,
        )
    worst = max(abs(result["ratio"] - 1) for result in results.values())
    finish(options.output, {"allocator": options.allocator} | results, worst=worst, goal=0.15)


if __name__ == "__main__":
    main()
