"""The inputs of a plan: device, models, workers, sequences. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlt_lightning.numerics.packing import Extent, Layout, MicroBatch, micro_batches
from rlt_lightning.plan.shapes import Activations, Shape

Sharding = Literal["whole", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Verb = Literal["fit", "predict", "test"]


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
    max_sequences: int  # completions in work at a time, per copy
    push_bytes: int  # per number that is pushed
    only_adapter: bool  # whether only the adapter is pushed, rather than all weights
    bucket_bytes: int  # gathered from the trainer's ranks at once
    colocated: bool  # whether they share GPUs with the trainer
    sleeps: bool  # whether they sleep while the trainer trains
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
    # Standard deviations of the logarithm of lengths, between problems and within the group of one.
    spread_between: float = 0.0
    spread_within: float = 0.0
    balanced: bool = False  # whether ranks get equal tokens rather than equal numbers of problems
    # Prompts of each model that reads completions after another one than they were sampled from, the longest
    # and the mean: a student with its own tokens, or the teacher of on-policy distillation. None: the same.
    reader_prompts: tuple[tuple[int, int] | None, ...] = ()

    def of_reader(self, number: int) -> Step:
        """Return the step with a reader's prompts; its completions are as long as those sampled."""
        lengths = self.reader_prompts[number] if self.reader_prompts else None
        if lengths is None:
            return self
        return replace(self, prompt_length=lengths[0], mean_prompt_length=lengths[1])

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that one process computes."""
        return -(-self.prompts // self.num_processes) * self.group_size

    def sequences(self, prompt_length: int, completion_length: int) -> list[Extent]:
        """Return the sequences of one process, all of the same length."""
        numbers = range(self.num_sequences)
        return [Extent(i // self.group_size, prompt_length, completion_length) for i in numbers]

    @property
    def mean_sequences(self) -> list[Extent]:
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


@dataclass(frozen=True)
class Setup:
    """All inputs of a plan; `rlt_lightning.plan.settings.read_setup` reads them from a config."""

    device: Device
    sharding: Sharding
    num_processes: int
    processes_per_machine: int
    policy: LanguageModel
    students: tuple[LanguageModel, ...]  # none if the reward asks no model
    with_reference: bool
    shares_base: bool  # whether the reference is the policy without its adapter
    forwards_per_step: int  # forwards that a forward and its backward cost
    master_bytes: int  # per number of the optimizer's weights and moments
    grad_bytes: int  # per number of accumulated gradients
    offload_frozen: bool
    offload_optimizer: bool
    offload_parameters: bool
    bucket_numel: int  # gradients that are reduced together
    sub_group_numel: int  # weights that DeepSpeed ZeRO-3 steps together
    step: Step
    logits_bytes: int  # of one tile of logits
    hf_sequences: int  # completions that the trainer's processes sample at once; 0 if workers sample
    recompute_teacher: bool  # whether the score phase runs the teacher, too
    worker: PlannedWorkers | None
    mfu: float  # part of the peak that products reach
    checkpointing: bool
    push_bandwidth: float  # bytes per second
    decode_rate: float | None  # tokens per second of one copy; None: from bandwidth and flops
    notes: list[str]  # assumptions, for the page
    asynchronous: bool = False  # whether the next step is sampled while this one trains
    scores_early: bool = False  # whether completions are scored while others are sampled
    verb: Verb = "fit"
    exact_kl: bool = False  # whether the teacher runs once more with each student
    loads_policy: bool = True  # False: only workers hold the model, which they load themselves
    teacher: LanguageModel | None = None  # of on-policy distillation: it reads each row before the policy
    is_own_teacher: bool = False  # whether that is the policy itself, without further weights
    compares_words: bool = False  # whether the loss needs both models' logits at a time

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
        return self.with_reference and not self.shares_base

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
