"""The inputs of a plan: the user's options, device, models, workers, sequences. Sizes are bytes.

PlanOptions, settings of the run ─ settings.read_setup ─▶ Setup ─▶ memory.py, time.py ─▶ verdict.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Literal

from rlt_lightning.numerics.packing import Layout, MicroBatch, SequenceLengths, micro_batches
from rlt_lightning.plan.models import Activations, Shape
from rlt_lightning.types import InputError

Sharding = Literal["whole", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Verb = Literal["fit", "predict", "test"]
Scorer = Literal["frozen", "policy", "reference"]
# Memory that the driver shows, GiB; dense bf16 products, FLOP/s; memory bandwidth, bytes/s. From NVIDIA's
# data sheets of the SXM cards.
GPUS = {
    "A100": (79.3, 312e12, 2.0e12),
    "H100": (79.6, 989e12, 3.35e12),
    "H200": (140.4, 989e12, 4.8e12),
    "B200": (178.4, 2250e12, 7.7e12),
}
CUDA_GIB = 2.0  # stated: CUDA context, libraries' workspaces, NCCL, and what fragmentation wastes
CPU_BANDWIDTH = 20e9  # stated, bytes/s


@dataclass(frozen=True)
class PlanOptions:
    """What a plan needs to know beyond the settings of the run.

    Args:
        verb: What is planned: fit or predict; None: predict where settings say so that only `rlt predict`
            reads. An evaluation is always planned as `rlt test`.
        device: H100, H200, A100, B200 or cpu; auto: cpu where trainer.accelerator says so, else H100.
        device_gib: Memory of one device, GiB; None: the device's, or this machine's shared by processes.
        tflops: Peak of its matrix products, TFLOP/s; None: the device's, or measured on this CPU.
        bandwidth_gb_s: Rate of its memory, GB/s; None: the device's.
        mfu: Part of the peak that products reach, counting the ones that gradient checkpointing repeats.
        prompt_length: Longest prompt, tokens; None: data.max_prompt_length, in fine-tuning 0.
        completion_length: Longest completion, tokens; None: the sampling limit, in fine-tuning
            data.max_length less the prompt.
        mean_prompt_length: Mean of prompts, tokens; None: of the rows, or 1/16 of the longest.
        mean_completion_length: Mean of completions, tokens; None: of the rows, or 0.3 of the longest.
            Memory is for the longest lengths, time for lengths with these means.
        gpu_memory_utilization: Part of a GPU that a vLLM worker takes; launch.arguments take precedence.
        tensor_parallel_size: GPUs that share a copy of the weights, for workers that are named by URL.
        decode_tokens_per_s: Rate of one copy; None: from its memory bandwidth and mfu.
        push_gb_s: Rate at which weights reach workers, GB/s; None: 0.8 by gloo or disk, 50 by NCCL.
        json: File that the plan is also written to.
    """

    verb: Literal["fit", "predict"] | None = None
    device: str = "auto"
    device_gib: float | None = None
    tflops: float | None = None
    bandwidth_gb_s: float | None = None
    mfu: float = 0.4
    prompt_length: int | None = None
    completion_length: int | None = None
    mean_prompt_length: int | None = None
    mean_completion_length: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    decode_tokens_per_s: float | None = None
    push_gb_s: float | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", *GPUS):
            raise InputError(f"plan.device must be auto, cpu, {', '.join(GPUS)}, but is {self.device}.")
        numbers = (
            "device_gib",
            "tflops",
            "bandwidth_gb_s",
            "prompt_length",
            "completion_length",
            "mean_prompt_length",
            "mean_completion_length",
            "push_gb_s",
        )
        for name in (*numbers, "decode_tokens_per_s", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"plan.{name} must be above 0, but is {value}.")
        if self.json is not None and not Path(self.json).resolve().parent.is_dir():
            raise InputError(f"plan.json must be in a folder that exists, but is {self.json}.")
        parts = {"mfu": self.mfu, "gpu_memory_utilization": self.gpu_memory_utilization}
        for name, value in parts.items():
            if not 0 < value <= 1:
                raise InputError(f"plan.{name} must be above 0 and at most 1, but is {value}.")


@dataclass(frozen=True)
class Device:
    """What one process computes on.

    Args:
        name: The user's name for it, such as H100 or cpu.
        memory: Bytes that one process may use.
        flops: Peak of matrix products, per second.
        bandwidth: Rate of its memory, bytes per second.
        reserved: Bytes taken before any tensor exists: interpreter and libraries, or CUDA's context.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    reserved: float

    @property
    def is_cpu(self) -> bool:
        """Return whether the device is a CPU."""
        return self.name == "cpu"


@dataclass(frozen=True)
class LanguageModel:
    """A model, and what a row of tokens costs in it."""

    name: str
    shape: Shape
    weight_bytes: int  # per number, in storage
    product_bytes: int  # per number, when gathered for matrix products
    activations: Activations
    flops_per_token: float  # of a forward, without the head
    flops_per_pair: float  # per pair of tokens where one attends to the other
    flops_per_scored: float  # per token in the head
    states_8bit: int | None = None  # bytes of the optimizer's states, if they are in 8 bits
    nf4_numel: int = 0  # weights in 4 bits
    nf4_bytes: int = 0  # of all of them, with scales and tables
    nf4_whole: int = 0  # bytes of the largest of these layers while it computes
    kv_bytes: int = 4  # per number in the key-value cache of HFEngine
    uses_slots: bool = True  # whether that is the engine's own cache rather than transformers'
    loaded_bytes: int = 4  # per number, as it is loaded: DeepSpeed casts whole weights later

    @property
    def frozen_weights(self) -> int:
        """Return the weights of a copy that is not trained: without the adapter, if there is one."""
        shape = self.shape
        return shape.weights - (shape.trained if shape.trained < shape.weights else 0)

    @property
    def stored_bytes(self) -> float:
        """Return the bytes of all weights in storage; beside a base in 4 bits the adapter is in fp32."""
        if not self.nf4_numel:
            return self.shape.weights * self.weight_bytes
        plain = self.shape.weights - self.nf4_numel - self.shape.trained
        return self.nf4_bytes + plain * self.weight_bytes + 4 * self.shape.trained


@dataclass(frozen=True)
class PlannedWorkers:
    """The vLLM workers of a run, all alike.

    A copy of the weights lies on one or several GPUs, which sample together.
    """

    num_gpus: int  # over all workers
    tensor_parallel_size: int  # GPUs that share one copy of the weights
    weight_bytes: int  # per number
    gpu_memory_utilization: float  # part of a GPU's memory that vLLM takes
    max_sequences: int  # completions in flight at a time, per copy
    push_bytes: int  # per number that is pushed
    only_adapter: bool  # whether only the adapter is pushed, rather than all weights
    bucket_bytes: int  # gathered from the trainer's ranks at once
    colocated: bool  # whether they share GPUs with the trainer
    sleeps: bool  # whether they sleep while the trainer trains
    push_bandwidth: float = 1e9  # bytes per second, at which weights reach them
    pushed: bool = True  # whether they get the trainer's weights

    @property
    def num_copies(self) -> int:
        """Return the number of copies of the weights."""
        return self.num_gpus // self.tensor_parallel_size


@dataclass(frozen=True)
class Step:
    """The sequences of one optimizer step, or of one batch of a run that does not train."""

    num_processes: int
    prompts: int  # over all processes
    group_size: int  # sequences per prompt
    prompt_length: int  # the longest, tokens
    completion_length: int
    mean_prompt_length: int
    mean_completion_length: int
    micro_batch_tokens: int
    layout: Layout
    mean_solution_length: int = 0  # what the student scores after a completion; part of the prompt
    # Lengths of completions are taken as lognormal. Standard deviations of their logarithm, between problems
    # and within the group of one.
    spread_between: float = 0.0
    spread_within: float = 0.0
    balanced: bool = False  # whether ranks get equal tokens rather than equal numbers of problems
    # Prompts of each model that reads completions after another one than they were sampled from, the longest
    # and the mean: a student with its own tokens, or the teacher of on-policy distillation. None: the same.
    scoring_prompts: tuple[tuple[int, int] | None, ...] = ()
    num_batches: int | None = None  # in an epoch; None: unknown

    def with_scoring_prompts(self, number: int) -> Step:
        """Return the step with a scoring model's prompts; its completions are as long as those sampled."""
        lengths = self.scoring_prompts[number] if self.scoring_prompts else None
        if lengths is None:
            return self
        return replace(self, prompt_length=lengths[0], mean_prompt_length=lengths[1])

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that one process computes."""
        return -(-self.prompts // self.num_processes) * self.group_size

    def sequences(self, prompt_length: int, completion_length: int) -> list[SequenceLengths]:
        """Return the sequences of one process, all of the same length."""
        numbers = range(self.num_sequences)
        return [SequenceLengths(i // self.group_size, prompt_length, completion_length) for i in numbers]

    @property
    def mean_square(self) -> float:
        """Return the mean of squared lengths of completions, as a multiple of their squared mean."""
        return math.exp(self.spread_between**2 + self.spread_within**2)

    def expect_longest(self, number: int) -> float:
        """Return the expected length of the longest of so many completions, tokens."""
        spread = math.hypot(self.spread_between, self.spread_within)
        typical = self.mean_completion_length / math.sqrt(self.mean_square)
        longest = max(self.mean_completion_length, typical * math.exp(spread * expected_largest(number)))
        return min(self.completion_length, longest)

    @property
    def slowest_rank(self) -> float:
        """Return the tokens of the slowest rank as a multiple of the mean, if ranks get whole problems.

        The tokens of a rank are a mean over its problems, so they vary less than those of one problem:

            variance = var(between) / problems + var(within) / completions,   var(s) = exp(s^2) - 1
        """
        problems = self.num_sequences / self.group_size
        variance = math.expm1(self.spread_between**2) / problems
        variance += math.expm1(self.spread_within**2) / self.num_sequences
        sampled = self.mean_completion_length * self.group_size
        part = sampled / (sampled + self.mean_prompt_length)  # prompts vary less; they are taken as equal
        return 1 + part * math.sqrt(variance) * expected_largest(self.num_processes)

    @property
    def load(self) -> float:
        """Return the work of the slowest rank as a multiple of `mean_sequences`."""
        if not self.balanced:
            return self.slowest_rank
        return self.prompts * self.group_size / (self.num_processes * self.num_sequences)

    @property
    def mean_sequences(self) -> list[SequenceLengths]:
        """Return the sequences of one process, all of mean length."""
        return self.sequences(self.mean_prompt_length, self.mean_completion_length)

    @property
    def mean_rows(self) -> list[MicroBatch]:
        """Return the rows in which the mean sequences are packed."""
        return micro_batches(self.mean_sequences, self.micro_batch_tokens, self.layout)

    @property
    def row_tokens(self) -> int:
        """Return the tokens of the largest row: a full one, or the longest sequence.

        A row holds at most `micro_batch_tokens`; a longer sequence gets a row to itself, and a step may have
        fewer tokens.
        """
        longest = self.prompt_length + self.completion_length
        room = max(longest, self.micro_batch_tokens)
        if self.layout == "single":
            return longest
        rows = micro_batches(self.sequences(self.prompt_length, self.completion_length), room, self.layout)
        return min(room, sum(row.num_tokens for row in rows))

    @property
    def scored_tokens(self) -> int:
        """Return the tokens of the largest row that the head scores: all but one prompt."""
        tokens = self.row_tokens
        return tokens - self.prompt_length if tokens > self.prompt_length else tokens


def expected_largest(number: int) -> float:
    """Return the expected largest of so many standard normal draws (Blom, 1958); 0 for a single one."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


@dataclass(frozen=True)
class Setup:
    """All inputs of a plan; `rlt_lightning.plan.settings.read_setup` reads them from a config."""

    device: Device
    sharding: Sharding
    processes_per_machine: int
    policy: LanguageModel
    shares_base: bool  # whether the reference is the policy without its adapter
    forwards_per_step: int  # forwards that a forward and its backward cost
    master_bytes: int  # per number of the optimizer's weights and moments
    grad_bytes: int  # per number of accumulated gradients
    offload_optimizer: bool
    offload_parameters: bool
    bucket_numel: int  # gradients that are reduced together
    sub_group_numel: int  # weights that DeepSpeed ZeRO-3 steps together
    step: Step
    logits_bytes: int  # of one tile of logits
    mfu: float  # part of the peak that products reach
    checkpointing: bool
    decode_rate: float | None  # tokens per second of one copy; None: from bandwidth and flops
    notes: list[str]  # assumptions, for the page
    worker: PlannedWorkers | None = None
    hf_sequences: int = 0  # completions that the trainer's processes sample at once; 0 if workers sample
    students: tuple[LanguageModel, ...] = ()  # none if the reward asks no model
    teacher_passes: int = 0  # forwards of the teacher in the score phase
    scorer: Scorer = "frozen"  # whose weights the students have
    student_dtype: str = "student_dtype"  # the setting of the model that chooses the students' type
    trains_solutions: bool = False  # whether a step has a second backward, of the solutions: the answer term
    with_reference: bool = False
    offload_frozen: bool = False
    asynchronous: bool = False  # whether the next step is sampled while this one trains
    scores_early: bool = False  # whether completions are scored while others are sampled
    verb: Verb = "fit"
    loads_policy: bool = True  # False: only workers hold the model, which they load themselves
    teacher: LanguageModel | None = None  # of on-policy distillation: it reads each row before the policy
    is_own_teacher: bool = False  # whether that is the policy itself, without further weights
    compares_words: bool = False  # whether the loss needs both models' logits at a time
    num_steps: int | None = None  # of the whole run, or batches of one that does not train; None: unknown

    @property
    def num_processes(self) -> int:
        """Return the number of processes on all machines."""
        return self.step.num_processes

    @property
    def trains(self) -> bool:
        """Return whether there are gradients and an optimizer; other runs only sample and score."""
        return self.verb == "fit"

    @property
    def copied_teacher(self) -> LanguageModel | None:
        """Return the teacher of on-policy distillation, if it has weights beside the policy's."""
        return None if self.is_own_teacher else self.teacher

    @property
    def copies_reference(self) -> bool:
        """Return whether the reference is a second copy of the policy's weights."""
        return (self.with_reference or self.scorer == "reference") and not self.shares_base

    @property
    def frozen_students(self) -> tuple[LanguageModel, ...]:
        """Return the students that have weights of their own."""
        return self.students if self.scorer == "frozen" else ()

    @property
    def shards(self) -> int:
        """Return the number of parts that weights are divided into."""
        return self.num_processes if self.sharding in ("fsdp2", "zero3") else 1

    @property
    def state_shards(self) -> int:
        """Return the number of parts that optimizer states are divided into."""
        return 1 if self.sharding in ("whole", "ddp") else self.num_processes

    @property
    def holds_gradients(self) -> bool:
        """Return whether gradients and their buckets keep their memory from step to step.

        They do in DeepSpeed's stage 3 and, for half-precision weights, in stage 1. Stage 2, and stage 1 in
        fp32, allocate both in a backward and free them with the step.
        """
        in_half = self.policy.weight_bytes < self.grad_bytes
        return self.sharding == "zero3" or (self.sharding == "zero1" and in_half)

    @property
    def is_deepspeed(self) -> bool:
        """Return whether DeepSpeed steps the optimizer."""
        return self.sharding.startswith("zero")
