"""Decide whether a run fits, and say what to change if it does not."""

from __future__ import annotations

from dataclasses import dataclass

from rlt_lightning.modules.meter import GIB
from rlt_lightning.planner.inputs import Setup
from rlt_lightning.planner.memory import Phase, phases
from rlt_lightning.planner.timing import Timing, rows_at_once, timings


@dataclass(frozen=True)
class Plan:
    """The memory and the time of a step."""

    setup: Setup
    phases: list[Phase]
    timings: list[Timing]

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
            advice = [text for name, _ in parts for text in remedies(self.setup, name)]
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
    return Plan(setup, list(phases(setup)), timings(setup))


def remedies(setup: Setup, part: str) -> list[str]:
    """Return settings that make a part smaller and are not set yet."""
    whole = setup.sharding in ("whole", "ddp")
    shard = "--config configs/overlays/zero3.yaml"
    if setup.num_processes == 1:
        shard += " on several devices"
    step = setup.step
    longest = step.prompt_length + step.completion_length
    frozen = setup.shards == 1 and not setup.offload_frozen
    wide = bool(setup.student and setup.student.weight_bytes > 2)
    choices = {
        "activations": [
            (not setup.checkpointing, "--model.gradient_checkpointing true"),
            (step.micro_batch_tokens > longest, "a lower --model.micro_batch_tokens"),
            (step.micro_batch_tokens <= longest, f"shorter sequences than {longest} tokens"),
        ],
        "optimizer states": [
            (whole, shard),
            (setup.is_deepspeed, "--config configs/overlays/cpu_offload.yaml"),
        ],
        "step workspace": [
            (setup.sharding == "zero3", "a sub_group_size of the strategy, such as 500000000"),
        ],
        "gradients": [(whole, shard)],
        "policy weights": [(setup.shards == 1, shard)],
        "reference weights": [(frozen, "--model.offload_frozen true")],
        "student weights": [
            (wide, "--model.student_dtype bfloat16"),
            (frozen, "--model.offload_frozen true"),
        ],
        "head": [(True, "a lower --model.head.logits_mib")],
        "kv cache": [(True, "a lower max_sequences of the engine, or vLLM workers")],
        "vLLM worker": [(True, "workers on other GPUs, or a lower --gpu-memory-utilization")],
    }
    return [text for holds, text in choices.get(part, []) if holds]
