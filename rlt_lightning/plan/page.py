"""Write a plan as a page to read, and as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from rlt_lightning.modules.phases import GIB
from rlt_lightning.plan.inputs import Setup
from rlt_lightning.plan.time import kv_capacity, rows_at_once
from rlt_lightning.plan.verdict import Plan

LAYOUTS = {
    "whole": "all weights on one",
    "ddp": "all weights on each (DDP)",
    "fsdp2": "everything in shards (FSDP2)",
    "zero1": "optimizer states in shards (ZeRO-1)",
    "zero2": "optimizer states and gradients in shards (ZeRO-2)",
    "zero3": "everything in shards (ZeRO-3)",
}


def plan_page(plan: Plan) -> str:
    """Return the plan as text: memory by part and phase, time, assumptions, and the verdict."""
    setup, device = plan.setup, plan.setup.device
    known = "measured here" if device.is_cpu else "stated"
    notes = [
        *setup.notes,
        *note_rows(setup),
        *note_ranks(setup),
        f"products at {setup.mfu:.0%} of {device.flops / 1e12:.3g} TFLOP/s, memory at "
        f"{device.bandwidth / 1e9:.4g} GB/s",
        *([f"runtime {device.reserved / GIB:.2f} GiB, {known}"] if device.reserved else []),
    ]
    head = f"rlt {setup.verb} on {setup.num_processes} x {device.name}, {device.memory / GIB:.1f} GiB each"
    verdict = f"fits: {plan.peak.total / GIB:.1f} GiB of {device.memory / GIB:.1f}, in {plan.peak.name}."
    sections = [
        [f"{head}: {LAYOUTS[setup.sharding]}"],
        format_memory(plan),
        format_workers(setup),
        format_time(plan),
        format_splits(plan),
        ["Assumed:", *(line for note in notes for line in wrap_note(note))],
        [line for problem in plan.problems() or [verdict] for line in wrap_note(problem, "")],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def wrap_note(note: str, indent: str = "  ") -> list[str]:
    """Return a note in lines of at most 96 columns; paths are not broken."""
    return textwrap.wrap(
        note,
        96,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def note_rows(setup: Setup) -> list[str]:
    """Return a line about the rows of a forward, if any model but the sampler computes."""
    if not setup.trains and not setup.students:
        return []
    every = "a step and process" if setup.trains else "a batch"
    return [f"rows of up to {setup.step.row_tokens} tokens, {len(setup.step.mean_rows)} {every}"]


def note_ranks(setup: Setup) -> list[str]:
    """Return a line about the slowest rank, if there are several."""
    if setup.num_processes == 1:
        return []
    slowest = f"{setup.step.slowest_rank:.2f} times the mean tokens"
    if setup.step.balanced:
        return [f"ranks have equal tokens; with whole problems each, the slowest would have {slowest}"]
    return [f"the slowest rank has {slowest}, since lengths differ"]


def format_memory(plan: Plan) -> list[str]:
    """Return a table of parts by phases, with the peak marked, and the host's memory at the end."""
    host = {name: size for phase in plan.phases for name, size in phase.host.items()}
    names = list(dict.fromkeys(name for phase in plan.phases for name in phase.device))
    shown = [name for name in names if any(phase.device.get(name) for phase in plan.phases)]
    columns = [(phase.name, phase.device) for phase in plan.phases]
    if any(host.values()):
        columns.append(("host", host))
        shown += [name for name in host if name not in shown and host[name]]
    widths = [max(9, len(name) + 2) for name, _ in columns]
    first = max(len(name) for name in [*shown, "GiB of one process"]) + 1

    def line(title: str, cells: list[str]) -> str:
        return title.ljust(first) + "".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))

    lines = [line("GiB of one process", [name for name, _ in columns])]
    for name in shown:
        lines.append(line(name, [format_gib(parts.get(name, 0.0)) for _, parts in columns]))
    totals = [format_gib(sum(parts.values())) for _, parts in columns]
    peak = plan.phases.index(plan.peak)
    totals[peak] = f"*{totals[peak]}"
    lines.append(line("total (* the peak)", totals))
    if any(host.values()):
        machine = plan.setup.processes_per_machine * sum(host.values()) / GIB
        lines.append(f"in the host's memory {machine:.0f} GiB a machine, besides libraries; not checked")
    return lines


def format_gib(size: float) -> str:
    """Return a size in GiB, or a dot for nothing."""
    return f"{size / GIB:.2f}" if size >= 0.005 * GIB else "."


def format_workers(setup: Setup) -> list[str]:
    """Return what the vLLM workers hold, or no line without workers."""
    worker = setup.worker
    if worker is None:
        return []
    weights = setup.policy.shape.weights * worker.weight_bytes / worker.tensor_parallel_size
    if setup.device.is_cpu:
        return [f"vLLM needs besides: {weights / GIB:.2f} GiB of weights, and space for keys and values"]
    per_token = setup.policy.shape.kv_per_token * worker.weight_bytes
    where = "on the trainer's GPUs" if worker.colocated else "on separate GPUs"
    where = where if setup.loads_policy else "which load the model themselves; the table shows one GPU"
    return [
        f"vLLM: {worker.num_copies} copies, {worker.num_gpus} GPUs, {where}",
        f"  takes {worker.gpu_memory_utilization:.0%} of a GPU, {weights / GIB:.1f} GiB of it for weights",
        f"  a token's keys and values take {per_token / 1024:.0f} KiB: room for "
        f"{kv_capacity(setup, worker):,.0f} tokens a copy,",
        f"  {rows_at_once(setup, worker):,.0f} completions of full length at once",
    ]


def format_time(plan: Plan) -> list[str]:
    """Return the seconds of every phase."""
    total = format_seconds(plan.time.total)
    what = "A step" if plan.setup.trains else f"A batch of {plan.setup.step.prompts} problems"
    lines = [f"{what} takes about {total} s: estimates from stated rates, nothing of it was measured."]
    lines += [f"  {t.name:<9}{format_seconds(t.seconds):>10} s  {t.reason}" for t in plan.time.phases]
    return [*lines, f"  {plan.time.order}"]


def format_seconds(seconds: float) -> str:
    """Return seconds with three digits, but never in powers of ten."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


COLUMNS = ("generate", "push", "sleep", "score", "reference", "train", "cpu")


def format_splits(plan: Plan) -> list[str]:
    """Return a table of the step's seconds by how the GPUs are divided; no line if there is no choice."""
    if not plan.splits:
        return []
    columns = [name for name in COLUMNS if any(split.time.sum_seconds(name) for split in plan.splits)]
    first = max(len(split.name) for split in plan.splits) + 2
    header = "".join(name.rjust(len(name) + 2) for name in [*columns, "total"])
    lines = ["The same step by how these GPUs are divided, seconds:", f"  {'':<{first}}{header}"]
    for split in plan.splits:
        seconds = [split.time.sum_seconds(name) for name in columns] + [split.time.total]
        figures = [f"{value:,.0f}" if value else "." for value in seconds]
        names = [*columns, "total"]
        cells = "".join(figure.rjust(len(name) + 2) for figure, name in zip(figures, names, strict=True))
        lines.append(f"  {split.name:<{first}}{cells}{'' if split.fits else '  does not fit'}")
    return [*lines, "  * as configured"]


def write_json(plan: Plan, path: str) -> None:
    """Write the plan's figures, in bytes and seconds, for other programs."""
    content = {
        "peak_phase": plan.peak.name,
        "peak_bytes": plan.peak.total,
        "device_bytes": plan.setup.device.memory,
        "fits": plan.fits,
        "problems": plan.problems(),
        "phases": {p.name: {"device": p.device, "host": p.host, "total": p.total} for p in plan.phases},
        "seconds": {timing.name: timing.seconds for timing in plan.time.phases},
        "step_seconds": plan.time.total,
        "slowest_rank": 1.0 if plan.setup.step.balanced else plan.setup.step.slowest_rank,
        "splits": [split.figures() for split in plan.splits],
        "setup": asdict(plan.setup),
    }
    Path(path).write_text(json.dumps(content, indent=1))
