"""What a plan is made of: device, models, workers, sequences. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlt_lightning.numerics.packing import Extent, Layout, MicroBatch, micro_batches
from rlt_lightning.planner.shapes import Activations, Shape

Sharding = Literal["whole", "ddp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Device:
    """What weights, activations and time are measured by.

    Args:
        name: As the user calls it.
        memory: Bytes that one process may use.
        flops: Peak of matrix products, per second.
        bandwidth: Of its memory, bytes per second.
        reserved: Bytes that are gone before any tensor is made: interpreter and libraries, or CUDA's context.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    reserved: float

    @property
    def is_cpu(self) -> bool:
        """Whether it is one."""
        return self.name == "cpu"


@dataclass(frozen=True)
class LanguageModel:
    """A model of the set-up, and what a row of tokens costs in it."""

    name: str
    shape: Shape
    weight_bytes: int  # per number, as it is held
    product_bytes: int  # per number, as sharding gathers it for products
    activations: Activations
    flops_per_token: float  # of a forward, the head left out
    flops_per_pair: float  # of tokens that see each other
    flops_per_scored: float  # in the head


@dataclass(frozen=True)
class Worker:
    """What samples outside the trainer's processes."""

    num_gpus: int  # over all workers
    tensor_parallel_size: int  # that share one copy of the weights
    weight_bytes: int  # per number
    gpu_memory_utilization: float  # part of a GPU's memory that vLLM takes
    max_sequences: int  # in work at a time, per copy
    push_bytes: int  # per number that travels
    only_adapter: bool  # travels, rather than all weights
    bucket_bytes: int  # gathered from the trainer's ranks at once
    colocated: bool  # with a process of the trainer on one GPU
    sleeps: bool  # while that one trains

    @property
    def num_copies(self) -> int:
        """Of the weights."""
        return self.num_gpus // self.tensor_parallel_size


@dataclass(frozen=True)
class Step:
    """The sequences of one optimizer step."""

    num_processes: int
    prompts: int  # over all processes
    group_size: int  # sequences per prompt
    prompt_length: int  # the longest, tokens
    completion_length: int
    mean_prompt_length: int
    mean_completion_length: int
    micro_batch_tokens: int
    layout: Layout

    @property
    def num_sequences(self) -> int:
        """That one process computes."""
        return -(-self.prompts // self.num_processes) * self.group_size

    def sequences(self, prompt_length: int, completion_length: int) -> list[Extent]:
        """Those of one process, all of the same length."""
        numbers = range(self.num_sequences)
        return [Extent(i // self.group_size, prompt_length, completion_length) for i in numbers]

    @property
    def mean_sequences(self) -> list[Extent]:
        """Those of one process, all of mean length."""
        return self.sequences(self.mean_prompt_length, self.mean_completion_length)

    @property
    def mean_rows(self) -> list[MicroBatch]:
        """The rows in which they go through a model."""
        return micro_batches(self.mean_sequences, self.micro_batch_tokens, self.layout)

    @property
    def row_tokens(self) -> int:
        """Tokens of the largest row: full, or as long as the longest sequence.

        A row holds `micro_batch_tokens` at most, but a longer sequence goes alone, and a step may have fewer.
        """
        longest = self.prompt_length + self.completion_length
        room = max(longest, self.micro_batch_tokens)
        if self.layout == "single":
            return longest
        rows = micro_batches(self.sequences(self.prompt_length, self.completion_length), room, self.layout)
        return min(room, sum(row.num_tokens for row in rows))


@dataclass(frozen=True)
class Setup:
    """All that the plan is made of; see `rlt_lightning.plan_command` for where it comes from."""

    device: Device
    sharding: Sharding
    num_processes: int
    processes_per_machine: int
    policy: LanguageModel
    student: LanguageModel | None
    with_reference: bool
    shares_base: bool  # the reference is the policy without its adapter
    forwards_per_step: int  # what a forward and its backward count as
    master_bytes: int  # per number, of what the optimizer steps; the moments' too
    grad_bytes: int  # per number, of gradients that wait for the step
    offload_frozen: bool
    offload_optimizer: bool
    offload_parameters: bool
    bucket_numel: int  # of gradients that are reduced together
    sub_group_numel: int  # of weights that DeepSpeed ZeRO-3 steps together
    step: Step
    logits_bytes: int
    hf_sequences: int  # that HFEngine samples at once; 0: it does not
    recompute_teacher: bool  # in the score phase
    worker: Worker | None
    mfu: float  # part of the peak that products reach
    checkpointing: bool
    push_bandwidth: float  # bytes per second
    decode_rate: float | None  # tokens per second of one copy; None: from bandwidth and flops
    notes: list[str]  # what was assumed

    @property
    def copies_reference(self) -> bool:
        """Whether the reference has weights of its own."""
        return self.with_reference and not self.shares_base

    @property
    def shards(self) -> int:
        """In how many parts weights lie."""
        return self.num_processes if self.sharding in ("fsdp2", "zero3") else 1

    @property
    def state_shards(self) -> int:
        """In how many parts optimizer states lie."""
        return 1 if self.sharding in ("whole", "ddp") else self.num_processes

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients, and the buckets they travel in, have memory of their own from the beginning.

        DeepSpeed's stage 3 does so, and its stage 1 for the gradients of half-precision weights. Stages 1 and
        2 make both in a backward and free them with the step.
        """
        in_half = self.policy.weight_bytes < self.grad_bytes
        return self.sharding == "zero3" or (self.sharding == "zero1" and in_half)

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed steps the optimizer."""
        return self.sharding.startswith("zero")
