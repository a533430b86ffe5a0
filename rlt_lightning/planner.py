"""Memory, step time and what would not fit, from a set-up alone: arithmetic, nothing is run.

Memory is added up phase by phase, since what is there at the same time decides; the largest phase is the
prediction. Formulas follow what this package, PyTorch's FSDP2 and DeepSpeed allocate. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlt_lightning.numerics.packing import Extent, Layout, MicroBatch, micro_batches
from rlt_lightning.shapes import Activations, Shape
from rlt_lightning.sharding import FILE_BYTES

Sharding = Literal["whole", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Sizes = dict[str, float]  # part -> bytes on one device
HEAD_TILES = 4  # of logits and what is made of them, at a time; tests/test_planner.py traces them
DRAW_BYTES = 32  # per row and word while HFEngine draws a token: logits, and sums in float64
LIVE_NUMEL = 10**9  # weights that DeepSpeed ZeRO-3 keeps gathered (stage3_max_live_parameters)
GIB = 2**30
ASLEEP = 1.5 * GIB  # stated: what a vLLM worker that sleeps keeps of a GPU
WORKER_OVERHEAD = 3 * GIB  # stated: vLLM's own activations and graphs, per GPU
HOST_BANDWIDTH = 20e9  # stated, bytes per second and process: offloaded states, and the way there
SENT_NUMEL = 5 * 10**8  # gradients that its stage 1 with bfloat16 sends together
PREFETCH_NUMEL = 5 * 10**7  # and fetches ahead (stage3_prefetch_bucket_size)


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


@dataclass(frozen=True)
class Phase:
    """What lies on a device, and in the host's memory per process, at the worst moment of a phase."""

    name: str
    device: Sizes
    host: Sizes

    @property
    def total(self) -> float:
        """On the device."""
        return sum(self.device.values())


def weights(setup: Setup, model: LanguageModel, frozen: bool) -> float:
    """Of one model on one device: whole, or a shard; a frozen one that is offloaded is not there."""
    if (frozen and setup.offload_frozen and not setup.device.is_cpu) or setup.offload_parameters:
        return 0.0
    return model.shape.weights * model.weight_bytes / setup.shards


def gathered(setup: Setup, model: LanguageModel, backward: bool) -> float:
    """Whole weights that sharding brings together for a pass, and in a backward their whole gradients.

    FSDP2 holds what is outside the blocks for the whole pass, one block, and the next with the buffer that it
    arrives in. A backward adds the gradients: outside the blocks until its end, and twice a block (as they
    are computed, and as they are sent). DeepSpeed ZeRO-3 keeps up to 1e9 weights, fetches ahead, and needs
    the gradients of what it has not yet put into the bucket; a bucket that is full is copied to be sent.
    """
    if setup.shards == 1:
        return 0.0
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


def buckets(setup: Setup) -> float:
    """Buffers that gradients travel in between processes.

    DDP: all of them, at once. DeepSpeed: `reduce_bucket_size` numbers, in stages 1 and 2 twice, since one is
    filled while the other travels; stage 1 of half-precision weights sends 5e8 at a time. A CPU takes only
    what is written to.
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


def gradients(setup: Setup) -> float:
    """Of all trained weights, from the first backward on: in shards but for DDP and stage 1.

    DeepSpeed accumulates them in `grad_bytes`; stage 1 keeps them whole until the last row of a step.
    """
    shards = 1 if setup.sharding in ("whole", "ddp", "zero1") else setup.num_processes
    on_host = setup.offload_optimizer and setup.sharding != "zero1"
    return 0.0 if on_host else setup.policy.shape.trained * setup.grad_bytes / shards


def optimizer_states(setup: Setup) -> float:
    """AdamW's two moments and, where weights are held in less, the fp32 weights that it steps."""
    master = setup.is_deepspeed and (
        setup.policy.weight_bytes != setup.master_bytes or setup.sharding != "zero3"
    )
    per_weight = (2 + master) * setup.master_bytes
    return setup.policy.shape.trained * per_weight / setup.state_shards


def step_workspace(setup: Setup) -> float:
    """What an optimizer step needs for a moment.

    AdamW makes the roots of the second moments: on a GPU of all weights at a time, on a CPU twice those of
    one tensor, and DeepSpeed has but one tensor, or in stage 3 one per `sub_group_size`. It also copies their
    gradients into a flat one. States in main memory are stepped there, in one pass.
    """
    own = setup.policy.shape.trained / setup.state_shards
    if setup.offload_optimizer:
        return 0.0
    if setup.is_deepspeed:
        together = min(own, setup.sub_group_numel) if setup.sharding == "zero3" else own
        return together * setup.master_bytes * (3 if setup.device.is_cpu else 2)
    if setup.device.is_cpu:
        return 2 * setup.policy.shape.largest_trained * setup.master_bytes / setup.shards
    return own * setup.master_bytes


def head_forward(setup: Setup, model: LanguageModel, num_scored: int) -> float:
    """Hidden states of scored tokens, in fp32 on a CPU, and tiles of logits."""
    return num_scored * model.shape.hidden_size * 4 + HEAD_TILES * setup.logits_bytes


def head_grad(setup: Setup) -> float:
    """The whole gradient of the head's weight; the embedding's is as large."""
    return setup.policy.shape.head_trained * setup.policy.product_bytes


def head_backward(setup: Setup, num_scored: int) -> float:
    """As forward; and the gradients of states, in fp32, and of the weight, before that is added."""
    states = num_scored * setup.policy.shape.hidden_size * 4
    return head_forward(setup, setup.policy, num_scored) + states + head_grad(setup)


def cache(setup: Setup) -> float:
    """Keys and values while HFEngine samples, each layer's twice as it grows, and the drawing of a token."""
    per_turn = max(1, setup.hf_sequences // setup.step.group_size) * setup.step.group_size
    rows = min(per_turn, setup.step.num_sequences)
    shape, size = setup.policy.shape, setup.policy.weight_bytes
    length = setup.step.prompt_length + setup.step.completion_length
    return rows * (
        length * shape.kv_per_token * size * (1 + 1 / shape.num_blocks) + DRAW_BYTES * shape.num_words
    )


def phases(setup: Setup) -> Iterator[Phase]:
    """Every phase of a step from the second on, when moments and gradients are there."""
    policy, student = setup.policy, setup.student
    tokens = setup.step.row_tokens
    scored = tokens - setup.step.prompt_length if tokens > setup.step.prompt_length else tokens
    copied = setup.with_reference and not setup.shares_base
    reference_weights = weights(setup, policy, frozen=True) if copied else 0.0
    always = {
        "runtime": setup.device.reserved,
        "policy weights": weights(setup, policy, frozen=False),
        "reference weights": reference_weights,
        "student weights": weights(setup, student, frozen=True) if student else 0.0,
        "optimizer states": 0.0 if setup.offload_optimizer else optimizer_states(setup),
    }
    lasting = setup.holds_gradients or not setup.is_deepspeed
    always["gradient buckets"] = buckets(setup) if lasting else 0.0
    sampling = dict(always)
    if setup.worker and setup.worker.colocated and not setup.device.is_cpu:
        sampling["vLLM worker"] = setup.worker.gpu_memory_utilization * setup.device.memory
        always["vLLM worker"] = ASLEEP if setup.worker.sleeps else sampling["vLLM worker"]
    host = host_memory(setup)
    # PyTorch's of the step before stay until the next update.
    grads = {"gradients": gradients(setup) if lasting else 0.0}

    def phase(name: str, **parts: float) -> Phase:
        named = {key.replace("_", " "): value for key, value in parts.items()}
        return Phase(name, merged(always, grads, named), host)

    def back_on_device(model: LanguageModel) -> float:
        """A frozen model comes back for its turn."""
        offloaded = setup.offload_frozen and not setup.device.is_cpu
        return model.shape.weights * model.weight_bytes if offloaded else 0.0

    if setup.hf_sequences:
        yield phase("generate", kv_cache=cache(setup), gathered=gathered(setup, policy, False))
    if setup.worker:
        largest = policy.shape.largest * policy.weight_bytes if setup.shards > 1 else 0
        bucket = {
            "gathered": float(max(min(setup.worker.bucket_bytes, pushed(setup, setup.worker)), largest))
        }
        yield Phase("push", merged(sampling, grads, bucket), host)
    if student:
        forwards = [student, policy] if setup.recompute_teacher else [student]
        turns = [
            {
                "student_weights": back_on_device(student),
                "activations": model.activations.forward,
                "head": head_forward(setup, model, scored),
                "gathered": gathered(setup, model, False),
            }
            for model in forwards
        ]
        yield phase("score", **max(turns, key=lambda parts: sum(parts.values())))
    if setup.with_reference:
        yield phase(
            "reference",
            reference_weights=back_on_device(policy),
            activations=policy.activations.forward,
            head=head_forward(setup, policy, scored),
            gathered=gathered(setup, policy, False),
        )
    yield train_phase(setup, phase("train"), scored)
    step = phase("step", step_workspace=step_workspace(setup))
    yield Phase(step.name, step.device | {"gradients": gradients(setup)}, host)
    written = {"checkpoint file": file_buffer(setup)}
    on_cpu = setup.device.is_cpu
    yield Phase(
        "checkpoint",
        merged(always, grads, written if on_cpu else {}),
        merged(host, {} if on_cpu else written),
    )


def train_phase(setup: Setup, base: Phase, scored: int) -> Phase:
    """Forward and backward at their worst moment, which is one of three.

    The head's backward begins: all activations are kept. The last block's: its own needs besides. The
    embedding's, at the end: no activations, but a whole gradient more. In the first and largest row of a step
    gradients come into being as the backward goes on, unless they have memory of their own; in the next,
    which may be smaller, they are there.
    """
    policy = setup.policy
    grads, sent = gradients(setup), buckets(setup)
    kept, block = policy.activations.kept, policy.activations.backward
    states = scored * policy.shape.hidden_size * 4
    moments: list[Sizes] = [
        {"gradients": grads, "gradient buckets": sent, "activations": block, "head": head_grad(setup)}
    ]
    tokens = [row.num_tokens for row in setup.step.mean_rows[:2]]
    for number, count in enumerate(tokens):
        part = count / tokens[0]
        grow = number == 0 and not setup.holds_gradients
        early = base.device["gradient buckets"] if grow and setup.device.is_cpu else sent
        moments += [
            {
                "gradients": 0.0 if grow else grads,
                "gradient buckets": early,
                "activations": part * kept,
                "head": head_backward(setup, round(part * scored)),
            },
            {
                "gradients": min(grads, head_grad(setup)) if grow else grads,
                "gradient buckets": early,
                "activations": part * (kept + block),
                "head": part * states,
            },
        ]
    worst = max(moments, key=lambda parts: sum(parts.values()))
    others = {
        "half-precision copies": policy.activations.copies,
        "gathered": gathered(setup, policy, backward=True),
    }
    return Phase(base.name, base.device | worst | others, base.host)


def host_memory(setup: Setup) -> Sizes:
    """What is kept in the host's memory rather than on the device, per process."""
    policy, student = setup.policy, setup.student
    trained = policy.shape.trained
    parts: Sizes = {}
    if setup.device.is_cpu:
        return parts
    if setup.offload_frozen:
        parts["student weights"] = student.shape.weights * student.weight_bytes if student else 0.0
        copied = setup.with_reference and not setup.shares_base
        parts["reference weights"] = copied * policy.shape.weights * policy.weight_bytes
    if setup.offload_parameters:
        copied = setup.with_reference and not setup.shares_base
        models = [policy] + ([policy] if copied else []) + ([student] if student else [])
        parts["weights"] = sum(m.shape.weights * m.weight_bytes for m in models) / setup.shards
    if setup.offload_optimizer:
        parts["optimizer states"] = optimizer_states(setup)
        # As they are accumulated, and as they are stepped.
        parts["gradients"] = 2 * trained * setup.master_bytes / setup.state_shards
    worker = setup.worker
    if worker and worker.colocated and worker.sleeps:
        parts["sleeping worker"] = policy.shape.weights * worker.weight_bytes / worker.tensor_parallel_size
    return parts


def file_buffer(setup: Setup) -> float:
    """Whole tensors of one file that a process holds as it writes a checkpoint."""
    return min(FILE_BYTES, setup.policy.shape.trained * setup.master_bytes)


def pushed(setup: Setup, worker: Worker) -> float:
    """Of weights, or of an adapter, on their way to a worker."""
    shape = setup.policy.shape
    return (shape.trained if worker.only_adapter else shape.weights) * worker.push_bytes


def merged(*sizes: Sizes) -> Sizes:
    """Add up by part."""
    total: Sizes = {}
    for parts in sizes:
        for name, size in parts.items():
            total[name] = total.get(name, 0.0) + size
    return total


# Time


@dataclass(frozen=True)
class Timing:
    """What a phase is expected to take, and of what that is made."""

    name: str
    seconds: float
    reason: str


def forward_flops_of_step(setup: Setup, model: LanguageModel) -> float:
    """One forward over all sequences of a step, of all processes, at their mean lengths."""
    means, rows = setup.step.mean_sequences, setup.step.mean_rows
    tokens = sum(row.num_tokens for row in rows)
    pairs = sum(pairs_of(row, means) for row in rows)
    scored = sum(extent.num_rest for extent in means)
    per_process = model.flops_per_token * tokens + model.flops_per_pair * pairs
    return setup.num_processes * (per_process + model.flops_per_scored * scored)


def pairs_of(row: MicroBatch, sequences: list[Extent]) -> float:
    """Pairs of tokens that see each other: in the prefix, in each rest, and between the two."""
    pairs = 0.0
    for family in row.families:
        prefix = sequences[family[0]].num_prefix
        rests = [sequences[i].num_rest for i in family]
        pairs += prefix * (prefix + 1) / 2 + sum(rest * (rest + 1) / 2 + rest * prefix for rest in rests)
    return pairs


def kv_capacity(setup: Setup, worker: Worker) -> float:
    """Tokens whose keys and values fit beside the weights of one copy, over its GPUs."""
    gpus = worker.tensor_parallel_size
    room = gpus * (worker.gpu_memory_utilization * setup.device.memory - WORKER_OVERHEAD)
    room -= setup.policy.shape.weights * worker.weight_bytes
    return max(0.0, room / (setup.policy.shape.kv_per_token * worker.weight_bytes))


def rows_at_once(setup: Setup, worker: Worker) -> float:
    """Completions in work at a time in one copy: as many as fit at full length, are there, and are allowed.

    A group shares its prompt's keys and values.
    """
    per_row = setup.step.completion_length + setup.step.prompt_length / setup.step.group_size
    in_step = setup.step.prompts * setup.step.group_size / worker.num_copies
    return min(kv_capacity(setup, worker) / per_row, in_step, worker.max_sequences)


def decode_seconds(setup: Setup, weight_bytes: int, num_gpus: int, rows: float, length: float) -> float:
    """One step of decoding: a token for each of `rows`, which are `length` tokens long so far.

    It reads all weights and all keys and values once, and multiplies every weight with every row: the slower
    of the two decides.
    """
    shape, device = setup.policy.shape, setup.device
    read = (shape.weights + rows * length * shape.kv_per_token) * weight_bytes
    products = rows * (setup.policy.flops_per_token + setup.policy.flops_per_scored)
    return max(read / device.bandwidth, products / (device.flops * setup.mfu)) / num_gpus


def generate_timing(setup: Setup) -> Timing:
    """Sampling: every copy works through its completions, and the longest one takes its own time."""
    worker = setup.worker
    copies = worker.num_copies if worker else setup.num_processes
    gpus = worker.tensor_parallel_size if worker else 1
    size = worker.weight_bytes if worker else setup.policy.weight_bytes
    if worker and not setup.device.is_cpu:
        rows = rows_at_once(setup, worker)
    else:
        rows = min(setup.hf_sequences or 64, setup.step.num_sequences)
    if rows < 1:
        return Timing("generate", float("inf"), "no completion of full length fits into a worker")
    mean = setup.step.mean_prompt_length / setup.step.group_size + setup.step.mean_completion_length / 2
    step = decode_seconds(setup, size, gpus, rows, mean)
    rate = setup.decode_rate or rows / step
    tokens = setup.step.prompts * setup.step.group_size * setup.step.mean_completion_length
    longest = setup.step.mean_prompt_length + setup.step.completion_length / 2
    alone = decode_seconds(setup, size, gpus, 1, longest)
    seconds = max(tokens / (copies * rate), setup.step.completion_length * alone)
    reason = f"{tokens:,} tokens, {copies} copies at {rate:,.0f} tokens/s, {rows:,.0f} at once"
    return Timing("generate", seconds, reason)


def timings(setup: Setup) -> list[Timing]:
    """What each phase of a step takes at the stated rates; waiting and communication are not in it."""
    policy, student = setup.policy, setup.student
    rate = setup.num_processes * setup.device.flops * setup.mfu
    forward = forward_flops_of_step(setup, policy)
    found = []
    if student:
        found.append(generate_timing(setup))
    if setup.worker:
        size = pushed(setup, setup.worker)
        reason = f"{size / 1e9:.1f} GB at {setup.push_bandwidth / 1e9:g} GB/s"
        found.append(Timing("push", size / setup.push_bandwidth, reason))
    if student:
        work = forward_flops_of_step(setup, student) + (forward if setup.recompute_teacher else 0.0)
        found.append(Timing("score", work / rate, f"{work / 1e15:.3g} PFLOP"))
    passes = setup.forwards_per_step + setup.checkpointing + setup.with_reference
    reason = f"{passes * forward / 1e15:.3g} PFLOP: {passes} forwards' worth"
    found.append(Timing("train", passes * forward / rate, reason))
    if setup.offload_optimizer:
        own = policy.shape.trained / setup.state_shards
        moved = own * (setup.grad_bytes + policy.weight_bytes) + own * 2 * 3 * setup.master_bytes
        reason = f"{moved / 1e9:.1f} GB of states and gradients at {HOST_BANDWIDTH / 1e9:g} GB/s"
        found.append(Timing("step", moved / HOST_BANDWIDTH, reason))
    return found


# The plan


@dataclass(frozen=True)
class Plan:
    """What a step needs and takes."""

    setup: Setup
    phases: list[Phase]
    timings: list[Timing]

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether all of it does."""
        return not self.problems()

    def problems(self) -> list[str]:
        """What does not fit, and what to change."""
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
    """Work everything out."""
    return Plan(setup, list(phases(setup)), timings(setup))


def remedies(setup: Setup, part: str) -> list[str]:
    """Settings that make a part smaller, and are not set yet."""
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
        "vLLM worker": [(True, "workers on GPUs of their own, or that take less of it")],
    }
    return [text for holds, text in choices.get(part, []) if holds]
