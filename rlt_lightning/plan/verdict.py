"""Decide whether a run fits, say what to change if it does not, and write it all as a page or as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlt_lightning.modules.phases import GIB
from rlt_lightning.plan.inputs import LanguageModel, Setup, Sharding
from rlt_lightning.plan.memory import Phase, list_phases
from rlt_lightning.plan.time import StepTime, count_kv_tokens, count_rows_at_once, estimate_step, name_number

LAYOUTS = {
    "whole": "all weights on one",
    "ddp": "all weights on each (DDP)",
    "fsdp2": "everything in shards (FSDP2)",
    "zero1": "optimizer states in shards (ZeRO-1)",
    "zero2": "optimizer states and gradients in shards (ZeRO-2)",
    "zero3": "everything in shards (ZeRO-3)",
}


@dataclass(frozen=True)
class Split:
    """A way to divide a machine's GPUs between training and sampling."""

    name: str
    time: StepTime
    fits: bool

    def figures(self) -> dict[str, Any]:
        """Return the split for JSON."""
        seconds = {phase.name: phase.seconds for phase in self.time.phases}
        return {"name": self.name, "seconds": seconds, "step_seconds": self.time.total, "fits": self.fits}


@dataclass(frozen=True)
class Plan:
    """The memory and the time of a step."""

    setup: Setup
    phases: list[Phase]
    time: StepTime
    splits: list[Split] = field(default_factory=list)
    # The same run by who divides its weights, if they are in shards.
    by_sharding: dict[Sharding, Plan] = field(default_factory=dict)

    @property
    def peak(self) -> Phase:
        """Return the phase that needs most memory."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def run_seconds(self) -> float | None:
        """Return the seconds of all steps or batches; None if their number is unknown."""
        return None if self.setup.num_steps is None else self.setup.num_steps * self.time.total

    @property
    def fits(self) -> bool:
        """Return whether everything fits."""
        return not self.problems()

    def problems(self) -> list[str]:
        """Return a line for each thing that does not fit, with what to change."""
        found = []
        have = self.setup.device.memory
        if self.peak.total > have:
            parts = sorted(self.peak.device.items(), key=lambda item: -item[1])[:3]
            largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
            advice = [text for name, _ in parts for text in suggest_remedies(self.setup, name)]
            steps = [phase.total for phase in self.phases if phase.name != "start"]
            only = ", while models are loaded, although the steps would fit" * (max(steps) <= have)
            found.append(
                f"does not fit: {self.peak.total / GIB:.1f} GiB of {have / GIB:.1f} in "
                f"{self.peak.name}{only}. Largest: {largest}. "
                f"Try {'; '.join(dict.fromkeys(advice)) or 'more or larger devices'}."
            )
        worker = self.setup.worker
        if worker and not self.setup.device.is_cpu and count_rows_at_once(self.setup, worker) < 1:
            size, length = worker.tensor_parallel_size, self.setup.step.completion_length
            found.append(
                f"does not fit: a vLLM worker has no room for a completion of {length} tokens beside its "
                f"weights. Try a tensor_parallel_size above {size}, or a lower "
                "--rollouts.sampling.max_completion_length."
            )
        return found


def make_plan(setup: Setup) -> Plan:
    """Compute memory and time of a step."""
    time = estimate_step(setup)
    plan = Plan(setup, list(list_phases(setup)), time, compare_splits(setup))
    both: list[Literal["fsdp2", "zero3"]] = ["fsdp2", "zero3"] if is_exchangeable(setup) else []
    others = [divide_weights(setup, sharding) for sharding in both]
    by_sharding = {other.sharding: Plan(other, list(list_phases(other)), time) for other in others}
    return replace(plan, by_sharding=by_sharding)


def is_exchangeable(setup: Setup) -> bool:
    """Return whether FSDP2 and ZeRO-3 could both divide the weights; FSDP2 offloads nothing."""
    return setup.trains and setup.shards > 1 and not (setup.offload_optimizer or setup.offload_parameters)


def divide_weights(setup: Setup, sharding: Literal["fsdp2", "zero3"]) -> Setup:
    """Return the setup with weights that FSDP2 or ZeRO-3 divides.

    FSDP2 keeps weights in the type in which they are loaded, and their gradients and moments too. DeepSpeed
    casts weights, and has gradients, moments and a second copy of the weights in fp32.
    """
    if sharding == setup.sharding:
        return setup
    deepspeed = sharding == "zero3"

    def store(model: LanguageModel) -> LanguageModel:
        return replace(model, weight_bytes=model.product_bytes if deepspeed else model.loaded_bytes)

    policy, shape = store(setup.policy), setup.policy.shape
    # The matrices of an adapter are in fp32.
    size = 4 if deepspeed or shape.trained < shape.weights else policy.loaded_bytes
    return replace(
        setup,
        sharding=sharding,
        policy=policy,
        students=tuple(map(store, setup.students)),
        teacher=setup.teacher and (policy if setup.is_own_teacher else store(setup.teacher)),
        master_bytes=size,
        grad_bytes=size,
    )


def compare_splits(setup: Setup) -> list[Split]:
    """Return the splits of one machine's GPUs: as configured, in halves, by turns, the fastest asynchronous.

    There are none for a run that does not train, without vLLM workers on the trainer's machine or without
    shards: a model that every GPU holds whole is better trained on few GPUs. None is asynchronous where the
    policy scores, which that run would refuse.
    """
    worker, trains = setup.worker, setup.processes_per_machine
    if (
        worker is None
        or not setup.trains
        or setup.device.is_cpu
        or setup.shards == 1
        or trains != setup.num_processes
    ):
        return []
    gpus = max(trains, worker.num_gpus) if worker.colocated else trains + worker.num_gpus
    size = worker.tensor_parallel_size
    if gpus < 2 * size:
        return []
    wanted = [setup, divide_gpus(setup, gpus // 2 // size * size, gpus), share_gpus(setup, gpus)]
    samples = range(0) if setup.scorer == "policy" else range(size, gpus, size)
    ahead = [divide_gpus(setup, n, gpus, asynchronous=True) for n in samples]
    fitting = [other for other in ahead if not Plan(other, list(list_phases(other)), StepTime([])).problems()]
    if fitting:
        wanted.append(min(fitting, key=lambda other: estimate_step(other).total))
    found: dict[str, Split] = {}
    for number, other in enumerate(wanted):
        if (name := name_split(other)) not in found and f"{name} *" not in found:
            plan = Plan(other, list(list_phases(other)), estimate_step(other))
            name += "" if number else " *"
            found[name] = Split(name, plan.time, plan.fits)
    return sorted(found.values(), key=lambda split: -split.time.total)


def name_split(setup: Setup) -> str:
    """Return what a split is called: `5 train, 3 sample, asynchronous`."""
    worker = setup.worker
    assert worker is not None
    if worker.colocated:
        return f"{setup.num_processes} by turns"
    name = f"{setup.num_processes} train, {worker.num_gpus} sample"
    return f"{name}, asynchronous" if setup.asynchronous else name


def divide_gpus(setup: Setup, samples: int, gpus: int, asynchronous: bool = False) -> Setup:
    """Return the setup with so many GPUs that sample, and the others that train."""
    return assign_gpus(setup, gpus - samples, samples, colocated=False, asynchronous=asynchronous)


def share_gpus(setup: Setup, gpus: int) -> Setup:
    """Return the setup with all GPUs doing both, and as much memory for workers as the trainer leaves."""
    for percent in range(90, 25, -5):
        found = assign_gpus(setup, gpus, gpus, colocated=True, utilization=percent / 100)
        if not Plan(found, list(list_phases(found)), StepTime([])).problems():
            break
    return found


def assign_gpus(
    setup: Setup,
    trains: int,
    samples: int,
    colocated: bool,
    asynchronous: bool = False,
    utilization: float = 0.9,
) -> Setup:
    """Return the setup with these numbers of GPUs."""
    assert setup.worker is not None
    samples -= samples % setup.worker.tensor_parallel_size
    worker = replace(
        setup.worker,
        num_gpus=samples,
        colocated=colocated,
        sleeps=colocated,
        gpu_memory_utilization=utilization,
    )
    return replace(
        setup,
        processes_per_machine=trains,
        step=replace(setup.step, num_processes=trains),
        worker=worker,
        asynchronous=asynchronous,
        scores_early=not colocated,
    )


def suggest_remedies(setup: Setup, part: str) -> list[str]:
    """Return settings that make a part smaller and are not set yet."""
    whole = setup.sharding in ("whole", "ddp")
    # Traces, scores and responses are written by one process.
    shard = "--config overlays/fsdp2"
    if setup.num_processes == 1:
        shard += " on several devices"
    step = setup.step
    longest = step.prompt_length + step.completion_length
    frozen = setup.shards == 1 and not setup.offload_frozen
    wide = any(student.weight_bytes > 2 for student in setup.students)
    choices = {
        "activations": [
            (not setup.checkpointing, "--model.gradient_checkpointing true"),
            (step.micro_batch_tokens > longest, "a lower --model.micro_batch_tokens"),
            (step.micro_batch_tokens <= longest, f"shorter sequences than {longest} tokens"),
        ],
        "optimizer states": [
            (whole, shard),
            (setup.is_deepspeed, "--config overlays/cpu_offload"),
        ],
        "step workspace": [
            (setup.sharding == "zero3", "a sub_group_size of the strategy, such as 500000000"),
        ],
        "gradients": [(whole, shard)],
        "policy weights": [(setup.shards == 1 and setup.trains, shard)],
        "reference weights": [(frozen, "--model.offload_frozen true")],
        "student weights": [
            (wide, f"--model.{setup.student_dtype} bfloat16"),
            (frozen, "--model.offload_frozen true"),
        ],
        "teacher weights": [
            (setup.teacher is not None and setup.teacher.weight_bytes > 2, "--model.teacher_dtype bfloat16"),
            (frozen, "--model.offload_frozen true"),
        ],
        "head": [(True, "a lower --model.head.logits_mib")],
        "kv cache": [(True, "a lower max_sequences of the engine, or vLLM workers")],
        "vLLM worker": [(True, "workers on other GPUs, or a lower --gpu-memory-utilization")],
    }
    return [text for holds, text in choices.get(part, []) if holds]


# The page


def format_plan(plan: Plan) -> str:
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
    if setup.worker and not setup.worker.colocated and not device.is_cpu:
        head += f", and {setup.worker.num_gpus} for vLLM"
    verdict = f"fits: {plan.peak.total / GIB:.1f} GiB of {device.memory / GIB:.1f}, in {plan.peak.name}."
    sections = [
        [f"{head}: {LAYOUTS[setup.sharding]}"],
        format_memory(plan),
        format_workers(setup),
        format_time(plan),
        format_splits(plan),
        format_sharding(plan),
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
    where = "on the trainer's GPUs" if worker.colocated else "apart from the trainer's"
    where = where if setup.loads_policy else "which load the model themselves; the table shows one GPU"
    return [
        f"vLLM: {name_number(worker.num_copies, 'copy', 'copies')}, "
        f"{name_number(worker.num_gpus, 'GPU', 'GPUs')}, {where}",
        f"  takes {worker.gpu_memory_utilization:.0%} of a GPU, {weights / GIB:.1f} GiB of it for weights",
        f"  a token's keys and values take {per_token / 1024:.0f} KiB: room for "
        f"{count_kv_tokens(setup, worker):,.0f} tokens a copy,",
        f"  {count_rows_at_once(setup, worker):,.0f} completions of full length at once",
    ]


def format_time(plan: Plan) -> list[str]:
    """Return the seconds of every phase."""
    total = format_seconds(plan.time.total)
    what = "A step" if plan.setup.trains else f"A batch of {plan.setup.step.prompts} problems"
    lines = [f"{what} takes about {total} s: estimates from stated rates, nothing of it was measured."]
    lines += [f"  {t.name:<9}{format_seconds(t.seconds):>10} s  {t.reason}" for t in plan.time.phases]
    lines.append(f"  {plan.time.order}")
    if plan.run_seconds is not None:
        unit = "steps" if plan.setup.trains else "batches"
        duration = format_duration(plan.run_seconds)
        lines.append(
            f"The whole run has {plan.setup.num_steps:,} {unit}: about {duration}, besides its start."
        )
    return lines


def format_duration(seconds: float) -> str:
    """Return a duration in the unit that people would use."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{format_seconds(seconds)} s"


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


def format_sharding(plan: Plan) -> list[str]:
    """Return the peak of the same run by FSDP2 and by ZeRO-3; no line if its weights are not in shards."""
    if not plan.by_sharding:
        return []
    names = {"fsdp2": "FSDP2", "zero3": "ZeRO-3"}
    lines = ["The same run by who divides the weights, GiB at the peak:"]
    for sharding, other in plan.by_sharding.items():
        name = names[sharding] + " *" * (sharding == plan.setup.sharding)
        fault = "" if other.fits else "  does not fit"
        lines.append(f"  {name:<9}{other.peak.total / GIB:>7.1f} in {other.peak.name}{fault}")
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
        "num_steps": plan.setup.num_steps,
        "run_seconds": plan.run_seconds,
        "slowest_rank": 1.0 if plan.setup.step.balanced else plan.setup.step.slowest_rank,
        "splits": [split.figures() for split in plan.splits],
        "peak_bytes_by_sharding": {name: other.peak.total for name, other in plan.by_sharding.items()},
        "setup": asdict(plan.setup),
    }
    Path(path).write_text(json.dumps(content, indent=1))
