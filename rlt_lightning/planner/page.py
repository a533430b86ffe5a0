"""Write a plan as a page to read, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rlt_lightning.modules.meter import GIB
from rlt_lightning.planner.inputs import Setup
from rlt_lightning.planner.timing import kv_capacity, rows_at_once
from rlt_lightning.planner.verdict import Plan

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
    notes = [
        *setup.notes,
        f"rows of up to {setup.step.row_tokens} tokens, {len(setup.step.mean_rows)} a step and process",
        f"products at {setup.mfu:.0%} of {device.flops / 1e12:.3g} TFLOP/s, memory at "
        f"{device.bandwidth / 1e9:.4g} GB/s",
        f"runtime {device.reserved / GIB:.2f} GiB, " + ("measured here" if device.is_cpu else "stated"),
    ]
    head = f"{setup.num_processes} x {device.name}, {device.memory / GIB:.1f} GiB each"
    verdict = f"fits: {plan.peak.total / GIB:.1f} GiB of {device.memory / GIB:.1f}, in {plan.peak.name}."
    sections = [
        [f"{head}: {LAYOUTS[setup.sharding]}"],
        memory_table(plan),
        worker_lines(setup),
        time_lines(plan),
        ["Assumed:", *(f"  {note}" for note in notes)],
        plan.problems() or [verdict],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def memory_table(plan: Plan) -> list[str]:
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
        lines.append(line(name, [figure(parts.get(name, 0.0)) for _, parts in columns]))
    totals = [figure(sum(parts.values())) for _, parts in columns]
    peak = plan.phases.index(plan.peak)
    totals[peak] = f"*{totals[peak]}"
    lines.append(line("total (* the peak)", totals))
    if any(host.values()):
        machine = plan.setup.processes_per_machine * sum(host.values()) / GIB
        lines.append(f"in the host's memory {machine:.0f} GiB a machine, besides libraries; not checked")
    return lines


def figure(size: float) -> str:
    """Return a size in GiB, or a dot for nothing."""
    return f"{size / GIB:.2f}" if size >= 0.005 * GIB else "."


def worker_lines(setup: Setup) -> list[str]:
    """Return what the vLLM workers hold, or no line without workers."""
    worker = setup.worker
    if worker is None:
        return []
    weights = setup.policy.shape.weights * worker.weight_bytes / worker.tensor_parallel_size
    if setup.device.is_cpu:
        return [f"vLLM needs besides: {weights / GIB:.2f} GiB of weights, and space for keys and values"]
    per_token = setup.policy.shape.kv_per_token * worker.weight_bytes
    where = "on the trainer's GPUs" if worker.colocated else "on separate GPUs"
    return [
        f"vLLM: {worker.num_copies} copies, {worker.num_gpus} GPUs, {where}",
        f"  takes {worker.gpu_memory_utilization:.0%} of a GPU, {weights / GIB:.1f} GiB of it for weights",
        f"  a token's keys and values take {per_token / 1024:.0f} KiB: room for "
        f"{kv_capacity(setup, worker):,.0f} tokens a copy,",
        f"  {rows_at_once(setup, worker):,.0f} completions of full length at once",
    ]


def time_lines(plan: Plan) -> list[str]:
    """Return the seconds of every phase."""
    total = sum(timing.seconds for timing in plan.timings)
    lines = [f"A step takes about {total:,.3g} s: estimates from stated rates, nothing of it was measured."]
    return lines + [f"  {t.name:<9}{t.seconds:>10,.3g} s  {t.reason}" for t in plan.timings]


def write_json(plan: Plan, path: str) -> None:
    """Write the plan's figures, in bytes and seconds, for other programs."""
    content = {
        "peak_phase": plan.peak.name,
        "peak_bytes": plan.peak.total,
        "device_bytes": plan.setup.device.memory,
        "fits": plan.fits,
        "problems": plan.problems(),
        "phases": {p.name: {"device": p.device, "host": p.host, "total": p.total} for p in plan.phases},
        "seconds": {timing.name: timing.seconds for timing in plan.timings},
        "setup": asdict(plan.setup),
    }
    Path(path).write_text(json.dumps(content, indent=1))
