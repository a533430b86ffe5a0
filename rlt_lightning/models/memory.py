"""What a run keeps in memory, phase by phase: plain arithmetic on its `Setup`, in bytes.

Only parts that exist at the same time add up, so each phase has its own sum. The formulas follow what this
package, PyTorch's FSDP2 and DeepSpeed allocate. Activations are not guessed: the model's own forward and
backward run on fake tensors, which have shapes but no memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlt_lightning.models.kernels import find_blocks, packing_pays
from rlt_lightning.models.packed import disable_dropout, scored_hidden_states
from rlt_lightning.models.weights import FILE_BYTES
from rlt_lightning.numerics.packing import (
    Layout,
    MicroBatch,
    PackedSequences,
    ScoredSequence,
    SequenceLengths,
    micro_batches,
)

GIB = 2**30
Sharding = Literal["whole", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Verb = Literal["fit", "predict", "test"]
Scorer = Literal["frozen", "policy", "reference"]
Sizes = dict[str, float]  # part -> bytes on one device

# Stated: a sleeping vLLM worker; vLLM's activations and graphs.
ASLEEP, WORKER_OVERHEAD = 1.5 * GIB, 3 * GIB
# Tiles of logits, and of what is computed from them, that a head holds at a time: in a forward pass, traced
# are 3.3; in a backward pass, 2.8; in that of a divergence, where two halves are a tile, 3.5 to 5.5.
HEAD_TILES, BACKWARD_TILES, PAIR_TILES = 4, 3, 6
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
    processes_per_machine: int
    policy: LanguageModel
    step: Step
    master_bytes: int  # per number of the optimizer's weights and moments
    grad_bytes: int  # per number of accumulated gradients
    logits_bytes: int  # of one tile of logits
    notes: tuple[str, ...] = ()  # assumptions, for the page
    verb: Verb = "fit"
    shares_base: bool = False  # whether the reference is the policy without its adapter
    offload_frozen: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    bucket_numel: int = REDUCE_BUCKET  # gradients that are reduced together
    sub_group_numel: int = SUB_GROUP  # weights that DeepSpeed ZeRO-3 steps together
    worker: PlannedWorkers | None = None
    hf_sequences: int = 0  # completions that the trainer's processes sample at once; 0 if workers sample
    students: tuple[LanguageModel, ...] = ()  # none if the reward asks no model
    teacher_passes: int = 0  # forwards of the teacher in the score phase
    scorer: Scorer = "frozen"  # whose weights the students have
    with_reference: bool = False
    loads_policy: bool = True  # False: only workers hold the model, which they load themselves
    teacher: LanguageModel | None = None  # of on-policy distillation: it reads each row before the policy
    is_own_teacher: bool = False  # whether that is the policy itself, without further weights
    compares_words: bool = False  # whether the loss needs both models' logits at a time

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
    """Adds up the memory of live tensors, without the model's own."""

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


def list_heads(config: Any) -> list[tuple[int, int]]:
    """Return how many attention heads each layer has, and their size; 0 heads where there is no attention."""
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    found = []
    for layer in layers:
        heads = getattr(layer, "num_attention_heads", None) or 0
        found.append((heads, getattr(layer, "head_dim", None) or layer.hidden_size // max(1, heads)))
    return found


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
    end, and those of one block twice (as they are computed, and as they are sent).

    DeepSpeed ZeRO-3 keeps up to 1e9 weights and fetches ahead. A backward adds the gradients that are not in
    the bucket yet; a full bucket is copied to be sent.
    """
    if setup.shards == 1:
        return float(model.nf4_whole)
    shape, size = model.shape, model.product_bytes
    if setup.sharding == "fsdp2":
        outside, block = shape.outside * size, shape.block * size
        whole = outside + max(outside, 3 * block)
        return whole + (outside + 2 * shape.block * setup.grad_bytes if backward else 0.0)
    live = min(shape.weights, LIVE_NUMEL + PREFETCH_NUMEL) * size
    if not backward:
        return live
    sent = setup.bucket_numel * setup.grad_bytes if shape.trained > setup.bucket_numel else 0
    return live + shape.largest * size + sent


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
    own = setup.policy.shape.trained / setup.state_shards
    if setup.offload_optimizer:
        return 0.0
    if setup.is_deepspeed:
        together = min(own, setup.sub_group_numel) if setup.sharding == "zero3" else own
        return together * setup.master_bytes * (3 if setup.device.is_cpu else 2)
    if setup.policy.states_8bit is not None:
        # On a GPU one kernel does all in place; on a CPU five copies of a tensor in fp32 are made.
        return 5 * 4 * setup.policy.shape.largest_trained if setup.device.is_cpu else 0.0
    if setup.device.is_cpu:
        return 2 * setup.policy.shape.largest_trained * setup.master_bytes / setup.shards
    return own * setup.master_bytes


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
    policy = count_weight_bytes(setup, setup.policy, frozen=False) if setup.loads_policy else 0.0
    parts = {"runtime": setup.device.reserved, "policy weights": policy}
    for part, models in setup.frozen_models.items():
        parts[part] = sum((count_weight_bytes(setup, model, frozen=True) for model in models), start=0.0)
    parts["optimizer states"] = count_optimizer_bytes(setup) if keeps_states else 0.0
    parts["gradient buckets"] = count_bucket_bytes(setup) if keeps_gradients else 0.0
    if setup.worker and setup.worker.colocated and not setup.device.is_cpu:
        parts["vLLM worker"] = ASLEEP if setup.worker.sleeps else count_awake_bytes(setup, setup.worker)
    return parts | {"gradients": count_gradient_bytes(setup) if keeps_gradients else 0.0}


def list_start_parts(setup: Setup) -> Sizes | None:
    """Return what lies on a device while models are loaded, at the worst moment; None if none is.

    One process, DDP and DeepSpeed's stages 1 and 2 load whole models onto the device, in the types of the
    settings: the trained one, students, then the reference or a teacher. Offloaded ones are loaded into main
    memory, as is what becomes 4 bits on a GPU. DeepSpeed then casts the trained model's weights and makes its
    fp32 ones, while frozen models still have the type in which they were loaded.

    FSDP2 and stage 3 fill the shards of all models tensor by tensor, so one tensor is whole at a time.
    """
    frozen = setup.frozen_models
    models = [setup.policy] * setup.loads_policy + [model for group in frozen.values() for model in group]
    if not models:
        return None
    # DeepSpeed's stage 3 casts each tensor before it is divided.
    size = {id(m): m.weight_bytes if setup.sharding == "zero3" else m.loaded_bytes for m in models}
    on_host = setup.offload_parameters or (setup.offload_frozen and not setup.device.is_cpu)
    parts = {"runtime": setup.device.reserved, "policy weights": 0.0}
    if setup.loads_policy and not setup.offload_parameters:
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
        {"student weights": lasting["student weights"] + own}
        | list_forward_parts(replace(setup, step=setup.step.with_scoring_prompts(number)), student)
        for number, (student, own) in enumerate(zip(setup.students, returned, strict=True))
    ]
    if setup.teacher_passes:
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
    """Return what of a teacher's shards is whole while the policy's head is: the teacher's own head."""
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
    found = max(moments, key=lambda parts: sum(parts.values()))
    if setup.copied_teacher is not None:
        returned = count_returned_bytes(setup, setup.copied_teacher)
        found = {"teacher weights": lasting["teacher weights"] + returned} | found
    return found | {"half-precision copies": policy.activations.copies, "gathered": gathered}


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

    A run that does not train has no checkpoint. If no model computes anything either, only texts are judged.
    """
    lasting, host = list_lasting_parts(setup), list_host_parts(setup)
    start = list_start_parts(setup)
    if start is not None:
        yield Phase("start", start, host)
    computing = {name: parts for name, list_parts in PHASES.items() if (parts := list_parts(setup, lasting))}
    for name, parts in computing.items():
        yield Phase(name, lasting | parts, host)
    if setup.trains:
        # The whole tensors of one file.
        written = {"checkpoint file": min(FILE_BYTES, setup.policy.shape.trained * setup.master_bytes)}
        on_cpu = setup.device.is_cpu
        yield Phase(
            "checkpoint", lasting | written if on_cpu else lasting, host if on_cpu else host | written
        )
    elif start is None and not computing:
        yield Phase("judge", lasting, host)


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


def count_kv_tokens(setup: Setup, worker: PlannedWorkers) -> float:
    """Return how many tokens' keys and values fit beside the weights of one copy, over its GPUs."""
    gpus = worker.tensor_parallel_size
    room = gpus * (worker.gpu_memory_utilization * setup.device.memory - WORKER_OVERHEAD)
    room -= setup.policy.shape.weights * worker.weight_bytes
    return max(0.0, room / (setup.policy.shape.kv_per_token * worker.weight_bytes))
