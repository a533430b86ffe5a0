"""`rlt plan`: predict the memory of `rlt fit` or `rlt predict`, phase by phase, before anything is loaded.

    settings ─ read_setup ─▶ Setup ─ list_phases ─▶ Phases ─ print_plan ─▶ table and verdict

Each phase adds up the parts that exist at the same time; the largest phase is the predicted peak. The
formulas follow what this package, PyTorch's FSDP2 and DeepSpeed allocate; sizes are bytes. Activations are
not guessed: the model's own forward and backward run on fake tensors, which have shapes but no memory.
Nothing is downloaded: a model's configuration comes from this machine, and rows that are not on it are
assumed to be as long as the settings allow.
"""

from __future__ import annotations

import copy
import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlt_lightning.callbacks import Checkpoint, RolloutCallback
from rlt_lightning.callbacks.rollout_checks import count_student_tokens
from rlt_lightning.datamodules import (
    ScoringData,
    StratosDataModule,
    StudentLikelihoodData,
    StudentOPDData,
)
from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.engines import Engine
from rlt_lightning.engines.slots import find_architecture_fault
from rlt_lightning.models.embedded import DEFAULT_MODEL, MINIATURES, WHEEL_SHA256, cache_folder
from rlt_lightning.models.kernels import find_blocks, packing_pays
from rlt_lightning.models.load import meta_model
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.models.packed import disable_dropout, scored_hidden_states
from rlt_lightning.models.quantised import nf4_bytes, quantisable_layers, require_settings
from rlt_lightning.models.weights import FILE_BYTES
from rlt_lightning.modules import OPDModule, RLTModule
from rlt_lightning.modules.base import OnPolicyModule, PolicyModule, require_precision, require_whole_models
from rlt_lightning.modules.optimizer import states_8bit_bytes
from rlt_lightning.modules.phases import list_heads, resident_bytes
from rlt_lightning.numerics.head import block_size
from rlt_lightning.numerics.packing import (
    Layout,
    MicroBatch,
    PackedSequences,
    ScoredSequence,
    SequenceLengths,
    micro_batches,
)
from rlt_lightning.strategies import NAMED
from rlt_lightning.strategies.fsdp2 import whole_gradients_fit
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.types import InputError

GIB = 2**30
RUNTIME = 2 * GIB  # stated: CUDA context, libraries' workspaces, NCCL, and what fragmentation wastes
GPUS = {"A100": 79.3, "H100": 79.6, "H200": 140.4, "B200": 178.4}  # memory that the driver shows, GiB
# Assumed of rows that are not on this machine: means as parts of the longest, the solution as a part of the
# prompt.
MEAN_FRAC, MEAN_PROMPT_FRAC, SOLUTION_FRAC = 0.3, 1 / 16, 0.5

SHAPES = files("rlt_lightning.models") / "shapes.yaml"  # of published models
Sharding = Literal["whole", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Verb = Literal["fit", "predict"]
Scorer = Literal["frozen", "policy", "reference"]
Sizes = dict[str, float]  # part -> bytes on one device

ASLEEP = 1.5 * GIB  # stated: a sleeping vLLM worker
# Tiles of logits, and of what is computed from them, that a head holds at a time: in a forward pass, traced
# are 3.3; in a backward pass, 2.8; in that of a divergence, where two halves are a tile, 3.5 to 5.5.
HEAD_TILES, BACKWARD_TILES, PAIR_TILES = 4, 3, 6
# Stated, of rollouts.jsonl: text of a token, and what a completion's row has beside it.
TEXT_BYTES, ROW_BYTES = 4, 2000
DRAW_BYTES = 32  # per row and word while HFEngine draws a token: logits, weights, some in float64
# DeepSpeed's limits, in numbers of weights or gradients: gathered at a time by stage 3
# (stage3_max_live_parameters), fetched ahead (stage3_prefetch_bucket_size), sent together by stage 1 with
# bfloat16; then Lightning's defaults of reduce_bucket_size and sub_group_size.
LIVE_NUMEL, PREFETCH_NUMEL, SENT_NUMEL = 10**9, 5 * 10**7, 5 * 10**8
REDUCE_BUCKET, SUB_GROUP = 200_000_000, 10**12


@dataclass(frozen=True)
class Device:
    """What one process computes on."""

    name: str  # such as H100 or cpu
    memory: float  # that one process may use
    reserved: float  # taken before any tensor exists: interpreter and libraries, or CUDA's context

    @property
    def is_cpu(self) -> bool:
        """Return whether the device is a CPU."""
        return self.name == "cpu"


@dataclass(frozen=True)
class Shape:
    """Numbers of a model's weights, and of its keys and values per token."""

    weights: int  # in all; tied weights count once
    trained: int  # in the optimizer
    block: int  # in the largest transformer block
    num_blocks: int
    outside: int  # outside the blocks: embedding, last norm, head
    largest: int  # in the largest tensor
    largest_trained: int  # in the largest tensor of the optimizer
    hidden_size: int
    num_words: int  # of the head
    head_trained: int  # in the head's gradient; 0 if the head is frozen
    kv_per_token: int  # keys and values of all layers

    @classmethod
    def from_model(cls, model: Any) -> Shape:
        """Count the weights of a model, which may be on the meta device."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        per_block = [sum(p.numel() for p in block.parameters()) for block in find_blocks(model)]
        sizes = [p.numel() for p in model.parameters()]
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        kv_heads = getattr(config, "num_key_value_heads", None)
        return cls(
            weights=sum(sizes),
            trained=sum(trained),
            block=max(per_block),
            num_blocks=len(per_block),
            outside=sum(sizes) - sum(per_block),
            largest=max(sizes),
            largest_trained=max(trained),
            hidden_size=config.hidden_size,
            num_words=head.out_features,
            head_trained=head.weight.numel() if head.weight.requires_grad else 0,
            kv_per_token=sum(2 * (kv_heads or heads) * size for heads, size in list_heads(config)),
        )


@dataclass(frozen=True)
class Activations:
    """Bytes of one row of tokens in the transformer, without embedding and head."""

    kept: int  # from the forward to the backward pass
    copies: int  # weights in half precision, which autocast keeps for a whole step
    backward: int  # added by one block's backward at its peak, recomputed activations included
    forward: int  # peak of a forward without gradient


@dataclass(frozen=True)
class LanguageModel:
    """A model as a run holds it."""

    name: str
    shape: Shape
    activations: Activations  # of the largest row
    weight_bytes: int  # per number, in storage
    product_bytes: int  # per number, when gathered for matrix products
    loaded_bytes: int = 4  # per number, as it is loaded: DeepSpeed casts whole weights later
    states_8bit: int | None = None  # bytes of the optimizer's states, if they are in 8 bits
    nf4_numel: int = 0  # weights in 4 bits
    nf4_bytes: int = 0  # of all of them, with scales and tables
    nf4_whole: int = 0  # bytes of the largest of these layers while it computes
    kv_bytes: int = 4  # per number in the key-value cache of HFEngine
    uses_slots: bool = True  # whether that is the engine's own cache rather than transformers'

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
    """The vLLM workers of a run, all alike."""

    num_gpus: int  # over all workers
    tensor_parallel_size: int  # GPUs that share one copy of the weights
    weight_bytes: int  # per number
    gpu_memory_utilization: float  # part of a GPU's memory that vLLM takes
    push_bytes: int  # per number that is pushed
    only_adapter: bool  # whether only the adapter is pushed, rather than all weights
    bucket_bytes: int  # gathered from the trainer's ranks at once
    colocated: bool  # whether they share GPUs with the trainer
    sleeps: bool  # whether they sleep while the trainer trains
    pushed: bool = True  # whether they get the trainer's weights


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
    # Longest prompt of each model that reads completions after another one than they were sampled from: a
    # student with its own tokens, a scorer, the teacher of on-policy distillation. None: the same prompt.
    scoring_prompts: tuple[int | None, ...] = ()

    def with_scoring_prompts(self, number: int) -> Step:
        """Return the step with a scoring model's prompts; its completions are as long as those sampled."""
        length = self.scoring_prompts[number] if self.scoring_prompts else None
        return self if length is None else replace(self, prompt_length=length)

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that one process computes."""
        return -(-self.prompts // self.num_processes) * self.group_size

    def split_rows(self, prompt_length: int, completion_length: int, room: int) -> list[MicroBatch]:
        """Return the rows of one process whose sequences all have one length."""
        sequences = [
            SequenceLengths(number // self.group_size, prompt_length, completion_length)
            for number in range(self.num_sequences)
        ]
        return micro_batches(sequences, room, self.layout)

    @property
    def mean_rows(self) -> list[MicroBatch]:
        """Return the rows in which sequences of mean length are packed."""
        return self.split_rows(self.mean_prompt_length, self.mean_completion_length, self.micro_batch_tokens)

    @property
    def row_tokens(self) -> int:
        """Return the tokens of the largest row: a full one, or the longest sequence.

        A row holds at most `micro_batch_tokens`; a longer sequence gets a row to itself, and a step may have
        fewer tokens.
        """
        longest = self.prompt_length + self.completion_length
        if self.layout == "single":
            return longest
        room = max(longest, self.micro_batch_tokens)
        rows = self.split_rows(self.prompt_length, self.completion_length, room)
        return min(room, sum(row.num_tokens for row in rows))

    @property
    def scored_tokens(self) -> int:
        """Return the tokens of the largest row that the head scores: all but one prompt."""
        tokens = self.row_tokens
        return tokens - self.prompt_length if tokens > self.prompt_length else tokens


@dataclass(frozen=True)
class Setup:
    """All inputs of a plan."""

    device: Device
    sharding: Sharding
    policy: LanguageModel
    step: Step
    master_bytes: int  # per number of the optimizer's weights and moments
    grad_bytes: int  # per number of accumulated gradients
    logits_bytes: int  # of one tile of logits
    verb: Verb = "fit"
    shares_base: bool = False  # whether the reference is the policy without its adapter
    offload_frozen: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    bucket_numel: int = REDUCE_BUCKET  # gradients that are reduced together
    sub_group_numel: int = SUB_GROUP  # weights that DeepSpeed ZeRO-3 steps together
    keeps_whole: bool = False  # whether FSDP2 keeps whole gradients until an update's last micro-batch
    worker: PlannedWorkers | None = None
    hf_sequences: int = 0  # completions that the trainer's processes sample at once; 0 if workers sample
    students: tuple[LanguageModel, ...] = ()  # none if the reward asks no model
    teacher_runs: bool = False  # whether the teacher runs once more in the score phase
    scorer: Scorer = "frozen"  # whose weights the students have
    with_reference: bool = False
    teacher: LanguageModel | None = None  # of on-policy distillation: it reads each row before the policy
    is_policy_teacher: bool = False  # whether that is the policy itself, without further weights
    compares_words: bool = False  # whether the loss needs both models' logits at a time
    reference_moves: bool = False  # whether ReferenceSync writes it
    samples: bool = False  # whether completions are sampled and recorded

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
        return None if self.is_policy_teacher else self.teacher

    @property
    def copies_reference(self) -> bool:
        """Return whether the reference is a second copy of the policy's weights."""
        return (self.with_reference or self.scorer == "reference") and not self.shares_base

    @property
    def frozen_models(self) -> dict[str, list[LanguageModel]]:
        """Return the frozen models that have weights of their own, by part of the table."""
        return {
            "reference weights": [self.policy] if self.copies_reference else [],
            "student weights": list(self.students) if self.scorer == "frozen" else [],
            "teacher weights": [self.copied_teacher] if self.copied_teacher else [],
        }

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


def trace_activations(
    model: Any, num_tokens: int, prefix: int = 0, checkpointing: bool = False, autocast: bool = False
) -> Activations:
    """Trace a row of tokens through one block and through two; further blocks need what the second needs.

    The trace uses the CPU's kernels, whose flash attention keeps what a GPU's keeps. Gradients of weights
    exist from the start, as they do from the second row of a step on.

    Args:
        model: The model, on the meta device; it is not changed.
        num_tokens: Tokens of the row.
        prefix: Tokens of the row that all sequences share; 0: two sequences that share nothing.
        checkpointing: Whether blocks are computed again in the backward pass.
        autocast: Whether products are in bfloat16.
    """
    rest = num_tokens - prefix
    sizes = (rest // 2, rest - rest // 2) if rest > 3 else (rest,)
    # Only the last token is scored: the head's part is counted elsewhere.
    scored = [[False] * (prefix + size - 1) + [True] for size in sizes]
    sequences = [
        ScoredSequence([0] * prefix, [0] * size, mask) for size, mask in zip(sizes, scored, strict=True)
    ]
    family = tuple(range(len(sequences)))
    families = (family,) if prefix else tuple((i,) for i in family)
    packed = PackedSequences.from_sequences(sequences, families)
    kept: list[int] = []
    for number in (1, 2):
        small = keep_first_blocks(model, number)
        if checkpointing:
            small.gradient_checkpointing_enable({"use_reentrant": False})
        precision = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with FakeTensorMode(allow_non_fake_inputs=True), precision:
            small.to_empty(device="cpu")
            # The gradient of the embedding is counted elsewhere.
            small.get_input_embeddings().weight.requires_grad_(False)
            for parameter in small.parameters():
                parameter.grad = torch.empty_like(parameter)
            with LiveBytes(small) as live, torch.no_grad():
                scored_hidden_states(small, packed)
            forward = live.peak
            torch.clear_autocast_cache()
            with LiveBytes(small) as live:
                hidden = scored_hidden_states(small, packed)
                kept.append(live.now)
                live.peak = live.now
                hidden.backward(torch.empty_like(hidden))
            backward = live.peak - kept[-1]
    cast = [p for p in find_blocks(model)[0].parameters() if p.dim() > 1 and p.dtype == torch.float32]
    copied = 2 * sum(p.numel() for p in cast if p.requires_grad) if autocast else 0
    num_blocks = len(find_blocks(model))
    return Activations(
        kept=kept[0] - copied + (num_blocks - 1) * (kept[1] - kept[0] - copied),
        copies=num_blocks * copied,
        backward=backward,
        forward=forward,
    )


class LiveBytes(TorchDispatchMode):
    """Adds up the memory of live tensors, without the model's own tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in tensors if tensor is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note its results."""
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self.note(tensor.untyped_storage())
        return results

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count new memory until it is freed."""
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        """Take off memory that was freed."""
        self.now -= self.sizes.pop(key)


def keep_first_blocks(model: Any, number: int) -> Any:
    """Return a copy of a model with only its first blocks, in training mode and without dropout."""
    first = find_blocks(model)[0]
    parent, name, all_blocks = next(
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and child[0] is first
    )
    setattr(parent, name, all_blocks[:number])
    try:
        small = copy.deepcopy(model).train()
    finally:
        setattr(parent, name, all_blocks)
    disable_dropout(small)
    return small


# Memory: plain arithmetic


@dataclass(frozen=True)
class Phase:
    """The worst moment of a phase: sizes on a device, and in the host's memory per process."""

    name: str
    device: Sizes
    host: Sizes

    @property
    def total(self) -> float:
        """Return the bytes on the device."""
        return sum(self.device.values())


def count_weight_bytes(setup: Setup, model: LanguageModel, frozen: bool) -> float:
    """Return the weights of one model on one device, whole or a shard; none while they are offloaded."""
    if (frozen and setup.offload_frozen and not setup.device.is_cpu) or setup.offload_parameters:
        return 0.0
    # A separate reference has whole weights, even beside a policy in 4 bits.
    size = model.frozen_weights * model.weight_bytes if frozen else model.stored_bytes
    return size / setup.shards


def count_gathered_bytes(setup: Setup, model: LanguageModel, backward: bool) -> float:
    """Return the whole weights that sharding gathers for a pass and, in a backward, their whole gradients.

    Without shards these are only the weights of the layer in 4 bits that is computing.

    FSDP2 holds three things in a pass: the weights outside the blocks, one block, and the next block with the
    buffer that it arrives in. A backward adds gradients: those of the weights outside the blocks until its
    end, and those of one block twice (as they are computed, and as they are sent). Where they are added up
    once per update, those of all trained weights are whole until then, in place of their shards.

    DeepSpeed ZeRO-3 keeps up to 1e9 weights and fetches ahead. A backward adds the gradients that are not in
    the bucket yet; a full bucket is copied to be sent.
    """
    if setup.shards == 1:
        return float(model.nf4_whole)
    shape, size = model.shape, model.product_bytes
    if setup.sharding == "fsdp2":
        outside, block = shape.outside * size, shape.block * size
        whole = outside + max(outside, 3 * block)
        if not backward:
            return whole
        if setup.keeps_whole:
            kept = shape.trained * setup.grad_bytes - count_gradient_bytes(setup)
            return whole + kept + shape.block * setup.grad_bytes
        return whole + outside + 2 * shape.block * setup.grad_bytes
    live = min(shape.weights, LIVE_NUMEL + PREFETCH_NUMEL) * size
    if not backward:
        return live
    sent = setup.bucket_numel * setup.grad_bytes if shape.trained > setup.bucket_numel else 0
    return live + shape.largest * size + sent


def keeps_whole_gradients(setup: Setup, chosen: bool | Literal["auto"]) -> bool:
    """Return whether FSDP2 keeps whole gradients within a step; `chosen` is its reduce_every_micro_batch."""
    if setup.sharding != "fsdp2" or chosen != "auto":
        return setup.sharding == "fsdp2" and not chosen
    free = setup.device.memory
    if not setup.device.is_cpu:
        parts = list_lasting_parts(setup)
        free -= sum(parts[part] for part in parts if part not in ("optimizer states", "gradients"))
    return whole_gradients_fit(setup.policy.shape.trained * setup.grad_bytes, free)


def count_bucket_bytes(setup: Setup) -> float:
    """Return the buffers in which gradients travel between processes.

    DDP has a buffer for each gradient. DeepSpeed has `reduce_bucket_size` numbers, twice in stages 1 and 2,
    since one buffer is filled while the other travels; stage 1 of half-precision weights sends 5e8 at a time.
    A CPU takes only the memory that is written to.
    """
    trained = setup.policy.shape.trained
    if setup.sharding == "ddp":
        return trained * setup.grad_bytes
    if not setup.is_deepspeed:
        return 0.0
    if setup.sharding == "zero1" and setup.policy.weight_bytes < setup.grad_bytes:
        return min(trained, SENT_NUMEL) * setup.grad_bytes
    if setup.device.is_cpu:
        return min(setup.bucket_numel, trained) * setup.grad_bytes
    return setup.bucket_numel * setup.grad_bytes * (1 if setup.sharding == "zero3" else 2)


def count_gradient_bytes(setup: Setup) -> float:
    """Return the gradients of all trained weights: in shards, except under DDP and stage 1.

    DeepSpeed accumulates them in `grad_bytes`; stage 1 keeps them whole until the last row of a step.
    """
    shards = 1 if setup.sharding in ("whole", "ddp", "zero1") else setup.num_processes
    on_host = setup.offload_optimizer and setup.sharding != "zero1"
    return 0.0 if on_host else setup.policy.shape.trained * setup.grad_bytes / shards


def count_optimizer_bytes(setup: Setup) -> float:
    """Return AdamW's two moments and, if weights are in half precision, the fp32 weights that it steps."""
    if setup.policy.states_8bit is not None:
        return setup.policy.states_8bit
    master = setup.is_deepspeed and (
        setup.policy.weight_bytes != setup.master_bytes or setup.sharding != "zero3"
    )
    per_weight = (2 + master) * setup.master_bytes
    return setup.policy.shape.trained * per_weight / setup.state_shards


def count_workspace_bytes(setup: Setup) -> float:
    """Return what an optimizer step allocates for its own duration.

    AdamW computes the roots of the second moments: on a GPU for all weights at a time, on a CPU for one
    tensor, twice. DeepSpeed has a single tensor, or in stage 3 one per `sub_group_size`, and also copies the
    gradients into a flat tensor. States in main memory are stepped there, in one pass.
    """
    stepped = setup.policy.shape.trained / setup.state_shards
    if setup.offload_optimizer:
        return 0.0
    if setup.is_deepspeed:
        together = min(stepped, setup.sub_group_numel) if setup.sharding == "zero3" else stepped
        return together * setup.master_bytes * (3 if setup.device.is_cpu else 2)
    if setup.policy.states_8bit is not None:
        # On a GPU one kernel does all in place; on a CPU five copies of a tensor in fp32 are made.
        return 5 * 4 * setup.policy.shape.largest_trained if setup.device.is_cpu else 0.0
    if setup.device.is_cpu:
        return 2 * setup.policy.shape.largest_trained * setup.master_bytes / setup.shards
    return stepped * setup.master_bytes


def count_kv_bytes(setup: Setup) -> float:
    """Return keys and values while HFEngine samples, and what it needs to draw a token.

    With the engine's own cache a prompt's keys and values exist once, and those of a layer are copied as
    their room doubles. With transformers' cache every row repeats its prompt, and one layer at a time exists
    twice.
    """
    step, policy = setup.step, setup.policy
    token = policy.shape.kv_per_token * policy.kv_bytes
    if policy.uses_slots:
        rows = min(setup.hf_sequences, step.num_sequences)
        prompts = min(rows, -(-step.num_sequences // step.group_size))
        sampled = rows * step.completion_length * (1 + 0.5 / policy.shape.num_blocks)
        tokens = sampled + prompts * step.prompt_length
    else:
        per_turn = max(1, setup.hf_sequences // step.group_size) * step.group_size
        rows = min(per_turn, step.num_sequences)
        tokens = rows * (step.prompt_length + step.completion_length) * (1 + 1 / policy.shape.num_blocks)
    return tokens * token + rows * DRAW_BYTES * policy.shape.num_words


def list_lasting_parts(setup: Setup) -> Sizes:
    """Return what lies on a device from one step to the next."""
    # PyTorch keeps the gradients of the step before until the next update; DeepSpeed frees most.
    keeps_gradients = setup.trains and (setup.holds_gradients or not setup.is_deepspeed)
    keeps_states = setup.trains and not setup.offload_optimizer
    policy = count_weight_bytes(setup, setup.policy, frozen=False)
    parts = {"runtime": setup.device.reserved, "policy weights": policy}
    for part, models in setup.frozen_models.items():
        parts[part] = sum((count_weight_bytes(setup, model, frozen=True) for model in models), start=0.0)
    parts["optimizer states"] = count_optimizer_bytes(setup) if keeps_states else 0.0
    parts["gradient buckets"] = count_bucket_bytes(setup) if keeps_gradients else 0.0
    if setup.worker and setup.worker.colocated and not setup.device.is_cpu:
        parts["vLLM worker"] = ASLEEP if setup.worker.sleeps else count_awake_bytes(setup, setup.worker)
    return parts | {"gradients": count_gradient_bytes(setup) if keeps_gradients else 0.0}


def list_start_parts(setup: Setup) -> Sizes:
    """Return what lies on a device while models are loaded, at the worst moment.

    One process, DDP and DeepSpeed's stages 1 and 2 load whole models onto the device, in the types of the
    settings: the trained one, students, then the reference or a teacher. Offloaded ones are loaded into main
    memory, as is what becomes 4 bits on a GPU. DeepSpeed then casts the trained model's weights and makes its
    fp32 ones, while frozen models still have the type in which they were loaded.

    FSDP2 and stage 3 fill the shards of all models tensor by tensor, so one tensor is whole at a time.
    """
    frozen = setup.frozen_models
    models = [setup.policy, *(model for group in frozen.values() for model in group)]
    # DeepSpeed's stage 3 casts each tensor before it is divided.
    size = {id(m): m.weight_bytes if setup.sharding == "zero3" else m.loaded_bytes for m in models}
    on_host = setup.offload_parameters or (setup.offload_frozen and not setup.device.is_cpu)
    parts = {"runtime": setup.device.reserved, "policy weights": 0.0}
    if not setup.offload_parameters:
        whole = setup.policy.shape.weights * size[id(setup.policy)]
        stays = setup.policy.nf4_numel and not setup.device.is_cpu
        parts["policy weights"] = (setup.policy.stored_bytes if stays else whole) / setup.shards
    for part, group in frozen.items():
        loaded = sum(model.frozen_weights * size[id(model)] for model in group)
        parts[part] = 0.0 if on_host else loaded / setup.shards
    if setup.shards > 1:
        return parts | {"gathered": float(max(m.shape.largest * size[id(m)] for m in models))}
    if not setup.is_deepspeed or not setup.trains:
        return parts
    kept = setup.holds_gradients
    engine = parts | {
        "policy weights": count_weight_bytes(setup, setup.policy, frozen=False),
        # The weights that DeepSpeed's stages 1 and 2 step.
        "optimizer states": 0.0
        if setup.offload_optimizer
        else setup.policy.shape.trained * setup.master_bytes / setup.state_shards,
        "gradient buckets": count_bucket_bytes(setup) if kept else 0.0,
        "gradients": count_gradient_bytes(setup) if kept else 0.0,
    }
    return max(parts, engine, key=lambda moment: sum(moment.values()))


def list_generate_parts(setup: Setup, lasting: Sizes) -> Sizes | None:
    """Return what sampling needs: in the trainer's own processes, or of a GPU that a worker shares."""
    if not setup.hf_sequences:
        samples = setup.worker is not None and not setup.trains
        return list_awake_parts(setup, lasting) if samples else None
    parts = {
        "kv cache": count_kv_bytes(setup),
        "gathered": count_gathered_bytes(setup, setup.policy, backward=False),
    }
    rows = min(setup.hf_sequences, setup.step.num_sequences)
    exact = setup.policy.weight_bytes == setup.policy.kv_bytes == 4
    if (
        setup.device.is_cpu
        and setup.shards == 1
        and exact
        and packing_pays(rows, setup.step.completion_length)
    ):
        parts["packed weights"] = float(setup.policy.shape.weights * 4)
    return parts


def list_push_parts(setup: Setup, lasting: Sizes) -> Sizes | None:
    """Return what a push needs: the bucket of gathered weights, and a worker that is awake."""
    worker = setup.worker
    if worker is None or not worker.pushed:
        return None
    largest = setup.policy.shape.largest * setup.policy.weight_bytes if setup.shards > 1 else 0
    gathered = float(max(min(worker.bucket_bytes, count_pushed_bytes(setup, worker)), largest))
    return list_awake_parts(setup, lasting) | {"gathered": gathered}


def list_awake_parts(setup: Setup, lasting: Sizes) -> Sizes:
    """Return what a worker that is awake takes of a GPU that it shares with the trainer."""
    worker = setup.worker
    return {"vLLM worker": count_awake_bytes(setup, worker)} if worker and "vLLM worker" in lasting else {}


def list_score_parts(setup: Setup, lasting: Sizes) -> Sizes | None:
    """Return what the largest forward of a reward needs: a student's or, if it is run, the teacher's.

    Offloaded students come back one at a time, and an offloaded reference that scores does too.
    """
    if not setup.students:
        return None
    if setup.scorer != "frozen":
        [model], kept = setup.students, lasting["reference weights"]
        if setup.scorer == "reference" and setup.copies_reference:
            kept += count_returned_bytes(setup, model)
        reads = replace(setup, step=setup.step.with_scoring_prompts(0))
        return {"reference weights": kept} | list_forward_parts(reads, model)
    returned = [count_returned_bytes(setup, student) for student in setup.students]
    forwards = [
        {"student weights": lasting["student weights"] + weights}
        | list_forward_parts(replace(setup, step=setup.step.with_scoring_prompts(number)), student)
        for number, (student, weights) in enumerate(zip(setup.students, returned, strict=True))
    ]
    if setup.teacher_runs:
        weights_of = {"student weights": lasting["student weights"] + max(returned)}
        forwards.append(weights_of | list_forward_parts(setup, setup.policy))
    return max(forwards, key=lambda parts: sum(parts.values()))


def list_reference_parts(setup: Setup, lasting: Sizes) -> Sizes | None:
    """Return what the reference's forward needs."""
    if not setup.with_reference:
        return None
    reference = lasting["reference weights"] + count_returned_bytes(setup, setup.policy)
    return {"reference weights": reference} | list_forward_parts(setup, setup.policy)


def list_forward_parts(setup: Setup, model: LanguageModel) -> Sizes:
    """Return what a forward without gradient needs beside weights."""
    return {
        "activations": model.activations.forward,
        "head": count_head_forward(setup, model, setup.step.scored_tokens),
        "gathered": count_gathered_bytes(setup, model, backward=False),
    }


def count_head_forward(setup: Setup, model: LanguageModel, num_scored: int) -> float:
    """Return the hidden states of scored tokens, in fp32 on a CPU, and the tiles of logits."""
    return num_scored * model.shape.hidden_size * 4 + HEAD_TILES * setup.logits_bytes


def count_head_grad(setup: Setup) -> float:
    """Return the whole gradient of the head's weight; the embedding's is as large."""
    return setup.policy.shape.head_trained * setup.policy.product_bytes


def count_head_backward(setup: Setup, num_scored: int) -> float:
    """Return hidden states and their gradients, in fp32, the weight's gradient, and the tiles of logits.

    A divergence from a teacher keeps the teacher's hidden states too, and more tiles.
    """
    sizes, tiles = 2 * setup.policy.shape.hidden_size, BACKWARD_TILES
    if setup.teacher is not None and setup.compares_words:
        sizes, tiles = sizes + setup.teacher.shape.hidden_size, PAIR_TILES
    return num_scored * sizes * 4 + tiles * setup.logits_bytes + count_head_grad(setup)


def count_gathered_head(setup: Setup) -> float:
    """Return the teacher's head, which is gathered from its shards while the policy's head is."""
    teacher = setup.copied_teacher
    if setup.shards == 1 or teacher is None or not setup.compares_words:
        return 0.0
    # FSDP2 gathers all weights outside the blocks together.
    shape = teacher.shape
    return (shape.outside if setup.sharding == "fsdp2" else shape.largest) * teacher.product_bytes


def list_train_parts(setup: Setup, lasting: Sizes) -> Sizes | None:
    """Return what forward and backward need at their worst moment, which is one of four.

    1. The head's backward begins: all activations are kept.
    2. The last block's backward: its own needs are added.
    3. The embedding's backward, at the end: no activations, but one more whole gradient.
    4. In on-policy distillation the teacher's forward, before the policy's.

    The first and largest row of a step creates its gradients during the backward, unless they have memory of
    their own. For the next row, which may be smaller, they exist already.
    """
    if not setup.trains:
        return None
    policy, scored = setup.policy, setup.step.scored_tokens
    grads, sent = count_gradient_bytes(setup), count_bucket_bytes(setup)
    kept, block = policy.activations.kept, policy.activations.backward
    states = scored * policy.shape.hidden_size * 4
    moments: list[Sizes] = [
        {"gradients": grads, "gradient buckets": sent, "activations": block, "head": count_head_grad(setup)}
    ]
    tokens = [row.num_tokens for row in setup.step.mean_rows[:2]]
    for number, count in enumerate(tokens):
        part = count / tokens[0]
        grow = number == 0 and not setup.holds_gradients
        early = lasting["gradient buckets"] if grow and setup.device.is_cpu else sent
        moments += [
            {
                "gradients": 0.0 if grow else grads,
                "gradient buckets": early,
                "activations": part * kept,
                "head": count_head_backward(setup, round(part * scored)),
            },
            {
                "gradients": min(grads, count_head_grad(setup)) if grow else grads,
                "gradient buckets": early,
                "activations": part * (kept + block),
                "head": part * states,
            },
        ]
    gathered = count_gathered_bytes(setup, policy, backward=True) + count_gathered_head(setup)
    if setup.teacher is not None:
        reads = list_forward_parts(replace(setup, step=setup.step.with_scoring_prompts(0)), setup.teacher)
        gathered = max(gathered, reads["gathered"])
        moments.append({"gradients": grads, "gradient buckets": sent} | reads)
    worst = max(moments, key=lambda parts: sum(parts.values()))
    if setup.copied_teacher is not None:
        returned = count_returned_bytes(setup, setup.copied_teacher)
        worst = {"teacher weights": lasting["teacher weights"] + returned} | worst
    return worst | {"half-precision copies": policy.activations.copies, "gathered": gathered}


def list_step_parts(setup: Setup, lasting: Sizes) -> Sizes | None:
    """Return what the optimizer's step needs."""
    if not setup.trains:
        return None
    return {"step workspace": count_workspace_bytes(setup), "gradients": count_gradient_bytes(setup)}


# What each phase adds to the lasting parts, or holds in their place; None where a run has no such phase.
PHASES: dict[str, Callable[[Setup, Sizes], Sizes | None]] = {
    "generate": list_generate_parts,
    "push": list_push_parts,
    "score": list_score_parts,
    "reference": list_reference_parts,
    "train": list_train_parts,
    "step": list_step_parts,
}


def list_phases(setup: Setup) -> Iterator[Phase]:
    """Yield the start, and every phase of a step from the second on, when moments and gradients exist.

    A run that does not train has no checkpoint.
    """
    lasting, host = list_lasting_parts(setup), list_host_parts(setup)
    yield Phase("start", list_start_parts(setup), host)
    for name, list_parts in PHASES.items():
        if (parts := list_parts(setup, lasting)) is not None:
            yield Phase(name, lasting | parts, host)
    if setup.trains:
        # The whole tensors of one file.
        written = {"checkpoint file": min(FILE_BYTES, setup.policy.shape.trained * setup.master_bytes)}
        on_cpu = setup.device.is_cpu
        yield Phase(
            "checkpoint", lasting | written if on_cpu else lasting, host if on_cpu else host | written
        )


def count_returned_bytes(setup: Setup, model: LanguageModel) -> float:
    """Return the weights of an offloaded frozen model, which come back while it computes."""
    offloaded = setup.offload_frozen and not setup.device.is_cpu
    return model.frozen_weights * model.weight_bytes if offloaded else 0.0


def count_awake_bytes(setup: Setup, worker: PlannedWorkers) -> float:
    """Return what a vLLM worker takes of the GPU that it shares with the trainer."""
    return worker.gpu_memory_utilization * setup.device.memory


def list_host_parts(setup: Setup) -> Sizes:
    """Return what each process keeps in the host's memory rather than on the device."""
    parts: Sizes = {}
    if setup.device.is_cpu:
        return parts
    frozen = {
        part: float(sum(model.frozen_weights * model.weight_bytes for model in models))
        for part, models in setup.frozen_models.items()
        if models
    }
    if setup.offload_frozen:
        parts |= frozen
    policy, worker = setup.policy, setup.worker
    if setup.offload_parameters:
        whole = policy.shape.weights * policy.weight_bytes + sum(frozen.values())
        parts["weights"] = whole / setup.shards
    if setup.offload_optimizer and setup.trains:
        parts["optimizer states"] = count_optimizer_bytes(setup)
        # As they are accumulated, and as they are stepped.
        parts["gradients"] = 2 * policy.shape.trained * setup.master_bytes / setup.state_shards
    if worker and worker.colocated and worker.sleeps and worker.only_adapter:
        # Any other worker drops its weights, since a push brings them.
        parts["sleeping worker"] = policy.shape.weights * worker.weight_bytes / worker.tensor_parallel_size
    return parts


def count_pushed_bytes(setup: Setup, worker: PlannedWorkers) -> float:
    """Return the weights, or those of an adapter, that travel to each worker."""
    shape = setup.policy.shape
    return (shape.trained if worker.only_adapter else shape.weights) * worker.push_bytes


def count_checkpoint_bytes(setup: Setup) -> float:
    """Return the size of one checkpoint: trained weights and the optimizer's two moments."""
    trained = setup.policy.shape.trained
    moments = 2 * trained * setup.master_bytes
    if setup.policy.states_8bit is not None:
        moments = setup.policy.states_8bit
    return trained * setup.master_bytes + moments


def list_disk_parts(setup: Setup, checkpoint: Checkpoint, num_steps: int) -> dict[str, float]:
    """Return the bytes of a training run's files at their largest, by what they are.

    Args:
        setup: The inputs of the plan.
        checkpoint: The callback that writes checkpoints.
        num_steps: Optimizer steps of the run; -1 where only the data would tell.
    """
    if not setup.trains:
        return {}
    every, number = checkpoint._every_n_train_steps, checkpoint.save_top_k
    size = count_checkpoint_bytes(setup)
    if number == -1 and every and num_steps > 0:
        number = math.ceil(num_steps / every)
        parts = {f"{number} checkpoints": number * size}
    elif number == -1:
        # Time or the data decide how many there are.
        parts = {"each of all checkpoints": size}
    elif number == 0:
        parts = {}
    else:
        # The next one is whole before the oldest is deleted.
        number += 1
        parts = {f"{number} checkpoints": number * size}
    shape = setup.policy.shape
    per_weight = setup.master_bytes if shape.trained == shape.weights else setup.policy.weight_bytes
    parts["model"] = float(setup.policy.frozen_weights * per_weight)
    if setup.copies_reference and setup.reference_moves:
        parts["reference"] = 2.0 * setup.policy.frozen_weights * setup.policy.weight_bytes
    if setup.samples:
        step = setup.step
        row = TEXT_BYTES * step.mean_completion_length + ROW_BYTES
        recorded = "rollouts.jsonl" if num_steps > 0 else "rollouts.jsonl of a step"
        parts[recorded] = float(max(1, num_steps) * step.prompts * step.group_size * row)
    return parts


def format_disk(parts: dict[str, float]) -> str:
    """Return the line on the files of a run."""
    listed = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in parts.items())
    return f"disk: {sum(parts.values()) / GIB:,.1f} GiB: {listed}."


def print_plan(
    trainer: Any,
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    checkpoint: Checkpoint,
    options: PlanOptions,
) -> int:
    """Print what a run would need.

    Args:
        trainer: The settings of the trainer, parsed and not instantiated.
        module: The module, which has loaded nothing.
        data: The datamodule, which has read nothing.
        rollouts: The callback that would bring completions.
        checkpoint: The callback that would write checkpoints.
        options: The options of the plan.

    Returns:
        The exit status: 1 if something does not fit.

    Raises:
        InputError: If a setting is wrong, or the shape of a model is not known here.
    """
    setup, notes = read_setup(trainer, module, data, rollouts, options)
    phases = list(list_phases(setup))
    problem = find_problem(setup, phases)
    peak = find_peak(phases)
    lines = [f"rlt {setup.verb} on {setup.num_processes} x {setup.device.name}: {setup.sharding}", ""]
    lines += [*format_memory(phases), "", "Assumed:", *(f"  {note}" for note in notes), ""]
    verdict = f"fits: {peak.total / GIB:.1f} GiB of {setup.device.memory / GIB:.1f}, in {peak.name}."
    lines.append(problem or verdict)
    if disk := list_disk_parts(setup, checkpoint, int(trainer.max_steps or -1)):
        lines.append(format_disk(disk))
    print("\n".join(lines))
    if options.json:
        content = {
            "fits": problem is None,
            "problem": problem,
            "device_bytes": setup.device.memory,
            "peak_phase": peak.name,
            "peak_bytes": peak.total,
            "disk": disk,
            "phases": {p.name: {"device": p.device, "host": p.host, "total": p.total} for p in phases},
        }
        Path(options.json).write_text(json.dumps(content, indent=1))
    return int(problem is not None)


# Settings of the run -> Setup


@dataclass(frozen=True)
class PlanOptions:
    """What a plan needs to know beyond the settings of the run.

    Args:
        device: H100, H200, A100, B200 or cpu; auto: cpu where trainer.accelerator says so, else H100.
        device_gib: Memory of one device, GiB; None: the device's, or this machine's shared by processes.
        prompt_length: Longest prompt, tokens; None: that of the rows, else data.max_prompt_length.
        completion_length: Longest completion, tokens; None: the sampling limit, in fine-tuning that of the
            rows, else data.max_length less the prompt.
        json: File that the plan is also written to.
    """

    device: str = "auto"
    device_gib: float | None = None
    prompt_length: int | None = None
    completion_length: int | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", *GPUS):
            raise InputError(f"plan.device must be auto, cpu, {', '.join(GPUS)}, but is {self.device}.")
        for name in ("device_gib", "prompt_length", "completion_length"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"plan.{name} must be above 0, but is {value}.")
        if self.json is not None and not Path(self.json).resolve().parent.is_dir():
            raise InputError(f"plan.json must be in a folder that exists, but is {self.json}.")


def read_setup(
    trainer: Any,
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
) -> tuple[Setup, list[str]]:
    """Return the inputs of a plan, and what they assume; see `print_plan`."""
    # Settings that only `rlt predict` reads.
    predicts = isinstance(data, ScoringData) or data.student_context is not None
    predicts |= rollouts.num_traces > 1 or rollouts.max_resamples > 0
    verb: Verb = "predict" if predicts else "fit"
    precision = str(trainer.precision or "32-true")
    precision = {"bf16": "bf16-mixed", "32": "32-true"}.get(precision, precision)
    require_precision(precision)
    mixed = precision == "bf16-mixed"
    on_cpu = options.device == "cpu" or (options.device == "auto" and trainer.accelerator == "cpu")
    per_machine = len(list_devices(trainer.devices, on_cpu))
    num_processes = per_machine * int(trainer.num_nodes)
    sharding, strategy = read_sharding(trainer.strategy, num_processes)
    require_settings(module.lora, module.optimizer_config, sharding in ("whole", "ddp"), installed=False)
    if isinstance(module, OnPolicyModule):
        require_whole_models(module.offload_frozen, sharding in ("fsdp2", "zero3"))
    use_deepspeed = sharding.startswith("zero")
    # Measured on a CPU, so before the steps below take more memory.
    device = read_device(options, on_cpu, per_machine)
    with TemporaryDirectory(prefix="rlt-plan-") as scratch:
        step, length_note = read_step(verb, module, data, rollouts, options, num_processes, Path(scratch))
        read = partial(read_model, module, mixed, sharding, Path(scratch))
        policy = read(module.pretrained, module.dtype_name, module.lora, step)
        callbacks = " ".join(str(callback.class_path) for callback in trainer.callbacks or [])
        # An adapter's matrices are in fp32, whatever type the model's weights have.
        trained_bytes = policy.weight_bytes if module.lora is None else 4
        setup = Setup(
            device=device,
            sharding=sharding,
            policy=policy,
            step=step,
            master_bytes=4 if use_deepspeed else trained_bytes,
            grad_bytes=4 if use_deepspeed and mixed else trained_bytes,
            logits_bytes=2**20
            * block_size(module.head.logits_mib, torch.empty(0, device="cpu" if on_cpu else "meta")),
            verb=verb,
            shares_base=module.lora is not None and "ReferenceSync" not in callbacks,
            reference_moves="ReferenceSync" in callbacks,
            samples=isinstance(module, OnPolicyModule),
            # Offloading does nothing on a CPU, whose processes have the host's memory only.
            offload_optimizer=bool(strategy.get("offload_optimizer")) and not on_cpu,
            offload_parameters=bool(strategy.get("offload_parameters")) and not on_cpu,
            bucket_numel=int(strategy.get("reduce_bucket_size", REDUCE_BUCKET)),
            sub_group_numel=int(strategy.get("sub_group_size", SUB_GROUP)),
        )
        if isinstance(module, OnPolicyModule):
            gpus = [] if on_cpu else list_devices(trainer.devices, on_cpu)
            rollouts.choose_engine(gpus, module, installed=True)
            setup = replace(
                setup,
                worker=read_worker(rollouts.engine, policy, trainer.devices),
                hf_sequences=rollouts.engine.describe().sequences_in_process,
                offload_frozen=module.offload_frozen,
            )
        if isinstance(module, RLTModule):
            setup = add_students(setup, module, data, rollouts, read)
        if isinstance(module, OPDModule):
            is_policy = module.teacher_name is None and not module.copies_student
            name = module.teacher_name or module.pretrained
            dtype = module.teacher_dtype if module.teacher_name else module.dtype_name
            setup = replace(
                setup,
                teacher=policy if is_policy else read(name, dtype, None, step.with_scoring_prompts(0)),
                is_policy_teacher=is_policy,
                compares_words=module.estimator == "full",
            )
    reduces = strategy.get("reduce_every_micro_batch", "auto")
    setup = replace(setup, keeps_whole=keeps_whole_gradients(setup, reduces))
    models = [("policy", policy)]
    models += [("student", model) for model in setup.frozen_models["student weights"]]
    models += [("teacher", model) for model in setup.frozen_models["teacher weights"]]
    notes = [
        f"{role} {model.name}, {model.shape.weights / 1e9:.3g} billion weights" for role, model in models
    ]
    notes += [length_note, f"rows of up to {step.row_tokens} tokens"]
    if setup.worker:
        shared = ", shared with the trainer" * setup.worker.colocated
        notes.append(f"vLLM on {setup.worker.num_gpus} GPUs{shared}")
    return setup, notes


def add_students(
    setup: Setup,
    module: RLTModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    read: Callable[[str, str, LoRA | None, Step], LanguageModel],
) -> Setup:
    """Add to a setup the models that score completions; `read` is `read_model` of a name and its type."""
    step = setup.step
    setup = replace(
        setup,
        students=tuple(
            read(name, module.student_dtype, None, step.with_scoring_prompts(number))
            for number, name in enumerate(module.students.names)
        ),
        with_reference=bool(module.policy_loss.kl_coef) and setup.trains,
        teacher_runs=reads_teacher(module, rollouts),
    )
    if module.students.model is not None:
        # The policy reads thoughts with solutions too; where it trains on them, its activations are theirs.
        reader, reads = setup.policy, step.with_scoring_prompts(0)
        if reads.row_tokens > step.row_tokens:
            longer = read(module.pretrained, module.dtype_name, module.lora, reads)
            reader = replace(reader, activations=longer.activations)
        setup = replace(
            setup,
            policy=reader if module.answer_weight and setup.trains else setup.policy,
            students=(reader,),
            scorer="policy" if module.students.model == "policy" else "reference",
        )
    if isinstance(data, ScoringData):
        # Nobody has told the log-probs of given completions, so the teacher runs where these count.
        runs = setup.teacher_runs or module.reward.has_tokens
        setup = replace(setup, worker=None, hf_sequences=0, teacher_runs=runs)
    return setup


def reads_teacher(module: RLTModule, rollouts: RolloutCallback) -> bool:
    """Return whether the teacher runs once more for the reward."""
    reward = module.reward.find_kl(rollouts.sampling.temperature)
    return reward is not None and (
        reward.kl_estimator == "exact"
        or module.teacher_log_probs == "recompute"
        or not rollouts.engine.reports_log_probs
        or rollouts.sampling.truncates
        or rollouts.sampling.temperature != reward.teacher_temperature
    )


def list_devices(devices: Any, on_cpu: bool) -> list[int]:
    """Return the ids of the devices that train on one machine, from trainer.devices."""
    if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
        devices = int(devices)
    if devices in ("auto", -1):
        devices = 1 if on_cpu else max(1, torch.cuda.device_count())
    if isinstance(devices, int):
        return list(range(devices))
    words = devices.split(",") if isinstance(devices, str) else devices
    return [int(word) for word in words if str(word).strip()]


def read_sharding(strategy: Any, num_processes: int) -> tuple[Sharding, dict[str, Any]]:
    """Return how a strategy divides the weights, and its settings.

    Raises:
        InputError: If the planner does not know the strategy, or there is no process.
    """
    if num_processes < 1:
        raise InputError("A run must have at least one process. Raise trainer.devices or trainer.num_nodes.")
    settings: dict[str, Any] = {}
    if isinstance(strategy, str) and strategy in NAMED:
        kind, settings = NAMED[strategy]
        name = kind.__name__
    elif isinstance(strategy, str):
        name = "DDPStrategy" if strategy.startswith("ddp") else strategy
    else:
        settings = dict(strategy.get("init_args") or {}) | dict(strategy.get("dict_kwargs") or {})
        name = str(strategy.get("class_path")).rpartition(".")[2]
    known: dict[str, Sharding] = {
        "auto": "ddp" if num_processes > 1 else "whole",
        "DDPStrategy": "ddp",
        "SingleDeviceStrategy": "whole",
        "FSDP2": "fsdp2",
        "DeepSpeed1": "zero1",
        "DeepSpeed2": "zero2",
        "DeepSpeed3": "zero3",
    }
    if name == "DeepSpeed":
        name += str(settings.get("stage", 3))
    if name not in known:
        raise InputError(f"trainer.strategy must be one of auto, ddp, {', '.join(NAMED)}, but is {name}.")
    return known[name], settings


def read_device(options: PlanOptions, on_cpu: bool, processes_per_machine: int) -> Device:
    """Return the device of one process: this CPU, measured, or a GPU by its data sheet."""
    if not on_cpu:
        name = "H100" if options.device == "auto" else options.device
        return Device(name, GIB * (options.device_gib or GPUS[name]), RUNTIME)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = GIB * options.device_gib if options.device_gib else machine / processes_per_machine
    return Device("cpu", memory, resident_bytes() or 0.5 * GIB)


def read_worker(engine: Engine, policy: LanguageModel, devices: Any) -> PlannedWorkers | None:
    """Return what the settings say of the workers that sample; None if the engine has none.

    Args:
        engine: The engine, not started.
        policy: The model that they sample with.
        devices: trainer.devices, to find out whether workers share GPUs with the trainer.
    """
    settings = engine.describe().workers
    if settings is None:
        return None
    launch, num_gpus, size, weight_bytes, utilization = settings.launch, settings.num_workers, 1, 2, 0.9
    colocated = False
    if launch is not None:
        size = launch.tensor_parallel_size
        num_gpus = launch.num_workers * size * launch.data_parallel_size
        weight_bytes = 4 if launch.dtype == "float32" else 2
        words = [word for argument in launch.arguments for word in argument.split("=")]
        if "--gpu-memory-utilization" in words:
            utilization = float(words[words.index("--gpu-memory-utilization") + 1])
        workers_on = {gpu for ids in launch.gpus or [[0]] for gpu in ids}
        colocated = not workers_on.isdisjoint(list_devices(devices, False))
    return PlannedWorkers(
        num_gpus=num_gpus,
        tensor_parallel_size=size,
        weight_bytes=weight_bytes,
        gpu_memory_utilization=utilization,
        push_bytes=min(policy.weight_bytes, weight_bytes),
        only_adapter=engine.takes_adapters,
        bucket_bytes=settings.push_bytes,
        colocated=colocated,
        sleeps=engine.takes_turns,
        pushed=settings.push_backend is not None,
    )


# Lengths of sequences: of rows and tokenizers that are on this machine, else the settings' limits

# Longest and mean length of prompts and of completions; longest prompts of scoring models, as in `Step`.
Lengths = tuple[tuple[int, int], tuple[int, int], tuple[int | None, ...]]


def read_step(
    verb: Verb,
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
    num_processes: int,
    scratch: Path,
) -> tuple[Step, str]:
    """Return the sequences of one step or batch, and a line on where their lengths come from."""
    given = isinstance(data, ScoringData)  # rows bring their completions
    samples = isinstance(module, OnPolicyModule) and not given
    limit = rollouts.sampling.max_completion_length if samples else None
    missing = find_missing(data, scratch)
    if options.prompt_length is None and missing is None:
        prompt, completion, scoring = read_rows(verb, data, scratch, limit)
        source = "of the rows"
    else:
        prompt, completion, scoring = assume_lengths(data, options, limit)
        source = "given" if options.prompt_length else f"limits, for {missing} is not on this machine"
    if options.completion_length is not None:
        completion = assume_mean(options.completion_length)
    if verb == "fit":
        prompts = data.prompts_per_step
        group_size = module.group_size if isinstance(module, OnPolicyModule) else 1
    else:
        prompts, group_size = data.val_batch_size, 1 if given else rollouts.num_traces
        if verb == "predict":  # each process gets whole batches
            prompts *= num_processes
    note = f"prompts of up to {prompt[0]} tokens ({source}), completions of up to {completion[0]}"
    if not prompt[0]:  # data.max_length limits both together
        note = f"examples of up to {completion[0]} tokens ({source})"
    if lengths := [length for length in scoring if length is not None]:
        note += f"; models that score read prompts, with solutions, of up to {max(lengths)} tokens"
    step = Step(
        num_processes=num_processes,
        prompts=prompts,
        group_size=group_size,
        prompt_length=prompt[0],
        completion_length=completion[0],
        mean_prompt_length=prompt[1],
        mean_completion_length=completion[1],
        micro_batch_tokens=module.micro_batch_tokens,
        layout=module.layout,
        scoring_prompts=scoring,
    )
    return step, note


def find_missing(data: StratosDataModule, scratch: Path) -> str | None:
    """Return a source or tokenizer that decides lengths and is not on this machine; None if all are."""
    sources: list[Any] = [data.format_options.format_from, *data.sources]
    for path in (source for source in sources if isinstance(source, str) and source not in EMBEDDED):
        # A configuration's name may follow a file or a folder.
        if not any(Path(place).expanduser().exists() for place in (path, path.partition(":")[0])):
            return path
    for name in filter(None, (data.tokenizer_name, *data.student_names)):
        if not (find_folder(name, scratch) / "tokenizer.json").is_file():
            return f"the tokenizer of {name}"
    return None


def read_rows(verb: Verb, data: StratosDataModule, scratch: Path, limit: int | None) -> Lengths:
    """Read and tokenise the rows; `limit` is that of completions, None where rows bring them."""
    data = copy.copy(data)
    data.output_dir = None
    data.tokenizer_name = str(find_folder(str(data.tokenizer_name), scratch))
    if data.val_sources:
        # These rows may be on the hub, and val_rows counts them.
        data.val_sources, data.val_rows = [], 0
    data.student_names = tuple(str(find_folder(name, scratch)) for name in data.student_names)
    data.setup(verb)
    items = data.all_items
    if items.is_examples:
        prompts = data.items.sum_columns("num_prompt")
        return measure(prompts), measure(data.items.sum_columns("token_ids") - prompts), ()
    scoring: tuple[int | None, ...]
    if isinstance(data, StudentOPDData):
        scoring = (int(items.sum_columns("teacher_view").max()),)
    elif isinstance(data, StudentLikelihoodData):
        scoring = tuple(int(fixed.max()) for fixed in count_student_tokens(data))
    else:
        scoring = tuple(
            int(fixed.max()) if isinstance(chat_format, CrossTokenizerFormat) else None
            for chat_format, fixed in zip(data.student_views.formats, count_student_tokens(data), strict=True)
        )
    completions = measure(items.sum_columns("completion_ids")) if limit is None else assume_mean(limit)
    return measure(items.sum_columns("teacher_prefix", "think_prefix")), completions, scoring


def assume_lengths(data: StratosDataModule, options: PlanOptions, limit: int | None) -> Lengths:
    """Return lengths by the settings' limits."""
    longest = options.prompt_length or (0 if limit is None else data.max_prompt_length)
    completion = assume_mean(limit or max(1, data.max_length - longest))
    mean = round(MEAN_PROMPT_FRAC * longest)
    solution = round(SOLUTION_FRAC * mean)
    if isinstance(data, StudentOPDData):  # only the teacher reads the solution
        return (longest, mean - solution), completion, (longest,)
    # Of a likelihood reward only the scorer reads the solution.
    scorers = max(1, len(data.student_names)) if isinstance(data, StudentLikelihoodData) else 0
    return (longest, mean), completion, (longest + solution,) * scorers


def assume_mean(longest: int) -> tuple[int, int]:
    """Return the longest completion and an assumed mean."""
    return longest, max(1, round(MEAN_FRAC * longest))


def measure(lengths: Any) -> tuple[int, int]:
    """Return the longest and the mean length, which is at least 1."""
    return int(max(lengths)), max(1, round(float(sum(lengths)) / len(lengths)))


# Models, of which only the configuration is read


def find_folder(name: str, scratch: Path) -> Path:
    """Return a folder on this machine that holds at least the model's config.json.

    Args:
        name: The model, as settings name it.
        scratch: A folder in which the configuration of a known model is written.

    Raises:
        InputError: If there is none. It never asks the hub or a package registry.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if name in MINIATURES:
        return MINIATURES[name]
    places = [Path(name).expanduser()]
    if name == DEFAULT_MODEL:
        places = [cache_folder() / f"{DEFAULT_MODEL}-{WHEEL_SHA256[:12]}"]
    with suppress(HFValidationError):  # a path, no hub id
        cached = try_to_load_from_cache(name, "config.json")
        places += [Path(cached).parent] if isinstance(cached, str) else []
    for place in places:
        if (place / "config.json").is_file():
            return place
    config = read_known_configs().get(name)
    if config is None:
        near = get_close_matches(name, read_known_configs(), n=3) or ["Qwen/Qwen2.5-7B-Instruct"]
        raise InputError(
            f"rlt plan must know the shape of '{name}', but it is no folder with a config.json, not in the "
            f"hub's cache, and none of the published models that it knows, such as {', '.join(near)}. "
            "Download its config.json into a folder, and name the folder."
        )
    folder = scratch / name.replace("/", "--")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def read_known_configs() -> dict[str, dict[str, Any]]:
    """Return the fields of config.json that decide sizes, by the names of published models."""
    return {
        name: family["config"] | size["config"]
        for family in yaml.safe_load(SHAPES.read_text())
        for size in family["sizes"]
        for name in size["names"]
    }


def read_model(
    module: PolicyModule,
    mixed: bool,
    sharding: Sharding,
    scratch: Path,
    name: str,
    dtype: str,
    lora: LoRA | None,
    step: Step,
) -> LanguageModel:
    """Describe one model as the run holds it, from its configuration.

    Args:
        module: The module, for how it computes.
        mixed: Whether matrix products are in bfloat16 of fp32 weights.
        sharding: How weights are divided.
        scratch: See `find_folder`.
        name: The model.
        dtype: Type of its weights.
        lora: The adapter that is trained, if there is one.
        step: The sequences that it reads.
    """
    folder = str(find_folder(name, scratch))
    model = meta_model(folder, dtype, module.attn_implementation, module.trust_remote_code)
    weight_bytes = next(model.parameters()).element_size()
    in_4_bits: list[int] = []
    if lora is not None:
        if lora.base == "4bit":
            in_4_bits = [layer.weight.numel() for _, layer in quantisable_layers(model)]
        add_adapter(model, lora, module.seed)
    # Sharding strategies cast whole models to bfloat16, rather than each product's operands.
    cast = mixed and sharding not in ("whole", "ddp")
    if cast:
        model = model.to(torch.bfloat16)
    product_bytes = next(model.parameters()).element_size()
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    shares_prefix = step.group_size > 1 and module.layout in ("auto", "shared_prefix")
    uses_slots = find_architecture_fault(model) is None
    return LanguageModel(
        name=name,
        shape=Shape.from_model(model),
        activations=trace_activations(
            model,
            step.row_tokens,
            prefix=min(step.prompt_length, step.row_tokens // 2) if shares_prefix else 0,
            checkpointing=module.gradient_checkpointing,
            autocast=mixed and not cast,
        ),
        weight_bytes=product_bytes if sharding.startswith("zero") else weight_bytes,
        product_bytes=product_bytes,
        loaded_bytes=weight_bytes,
        states_8bit=states_8bit_bytes(trained) if module.optimizer_config.states == "8bit" else None,
        nf4_numel=sum(in_4_bits),
        nf4_bytes=sum(map(nf4_bytes, in_4_bits)),
        # Autocast casts fp32 weights once more.
        nf4_whole=max(in_4_bits, default=0) * (6 if mixed and weight_bytes == 4 else weight_bytes),
        kv_bytes=2 if mixed and uses_slots else product_bytes,
        uses_slots=uses_slots,
    )


# The verdict and the table


SHARD = "--config hardware/fsdp2 on several devices, or hardware/cpu_offload"
OFFLOAD = "--model.offload_frozen true or bfloat16 as their type"
REMEDIES = {
    "activations": "--model.gradient_checkpointing true, a lower --model.micro_batch_tokens, shorter rows",
    "policy weights": SHARD,
    "gradients": SHARD,
    "optimizer states": SHARD,
    "step workspace": "a sub_group_size of DeepSpeed's stage 3, such as 500000000",
    "reference weights": OFFLOAD,
    "student weights": OFFLOAD,
    "teacher weights": OFFLOAD,
    "head": "a lower --model.head.logits_mib",
    "kv cache": "a lower max_sequences of the engine, or vLLM workers",
    "vLLM worker": "workers on other GPUs, or a lower --gpu-memory-utilization",
}


def find_peak(phases: Sequence[Phase]) -> Phase:
    """Return the phase that needs most memory."""
    return max(phases, key=lambda phase: phase.total)


def find_problem(setup: Setup, phases: Sequence[Phase]) -> str | None:
    """Return a line that says what does not fit, and what to set; None if all phases fit."""
    peak, memory = find_peak(phases), setup.device.memory
    if peak.total <= memory:
        return None
    parts = sorted(peak.device.items(), key=lambda item: -item[1])[:3]
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    advice = dict.fromkeys(REMEDIES[name] for name, _ in parts if name in REMEDIES)
    return (
        f"does not fit: {peak.total / GIB:.1f} GiB of {memory / GIB:.1f} in {peak.name}. "
        f"Largest: {largest}. Try {'; '.join(advice) or 'more or larger devices'}."
    )


def format_memory(phases: Sequence[Phase]) -> list[str]:
    """Return a table of parts by phases, with the peak marked, and the host's memory at the end."""
    host = {name: size for phase in phases for name, size in phase.host.items() if size}
    columns = [(phase.name, phase.device) for phase in phases] + [("host", host)] * bool(host)
    # The parts in the order in which the phases have them.
    order = dict.fromkeys(name for _, parts in columns for name in parts)
    names = [name for name in order if any(parts.get(name) for _, parts in columns)]
    rows = [["GiB of one process", *(name for name, _ in columns)]]
    for name in names:
        sizes = [parts.get(name, 0.0) / GIB for _, parts in columns]
        rows.append([name, *(f"{size:.2f}" if size >= 0.005 else "." for size in sizes)])
    totals = [f"{sum(parts.values()) / GIB:.2f}" for _, parts in columns]
    totals[list(phases).index(find_peak(phases))] += "*"
    rows.append(["total (* the peak)", *totals])
    first, *widths = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    return [
        f"{name:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]
