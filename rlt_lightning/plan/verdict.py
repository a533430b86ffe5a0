"""Decide whether a run fits, and say what to change if it does not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rlt_lightning.modules.phases import GIB
from rlt_lightning.plan.inputs import Setup
from rlt_lightning.plan.memory import Phase, list_phases
from rlt_lightning.plan.time import StepTime, estimate_step, rows_at_once


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

    @property
    def peak(self) -> Phase:
        """Return the phase that needs most memory."""
        return max(self.phases, key=lambda phase: phase.total)

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
            found.append(
                f"does not fit: {self.peak.total / GIB:.1f} GiB of {have / GIB:.1f} in {self.peak.name}. "
                f"Largest: {largest}. Try {'; '.join(dict.fromkeys(advice)) or 'more or larger devices'}."
            )
        worker = self.setup.worker
        if worker and not self.setup.device.is_cpu and rows_at_once(self.setup, worker) < 1:
            size, length = worker.tensor_parallel_size, self.setup.step.completion_length
            found.append(
                f"does not fit: a vLLM worker has no room for a completion of {length} tokens beside its "
                f"weights. Try a tensor_parallel_size above {size}, or a lower "
                "--rollouts.sampling.max_completion_length."
            )
        return found


def make_plan(setup: Setup) -> Plan:
    """Compute memory and time of a step."""
    return Plan(setup, list(list_phases(setup)), estimate_step(setup), compare_splits(setup))


def compare_splits(setup: Setup) -> list[Split]:
    """Return the splits of one machine's GPUs: as configured, in halves, by turns, the fastest asynchronous.

    There are none for a run that does not train, without vLLM workers on the trainer's machine or without
    shards: a model that every GPU holds whole is better trained on few GPUs.
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
    ahead = [divide_gpus(setup, n, gpus, asynchronous=True) for n in range(size, gpus, size)]
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
    shard = "--config overlays/zero3"
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
            (wide, "--model.student_dtype bfloat16"),
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
