"""Memory of a run from its set-up alone: arithmetic, nothing is run. Sizes are bytes.

It is added up phase by phase, since what is there at the same time decides. Formulas follow what this
package, PyTorch's FSDP2 and DeepSpeed allocate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlt_lightning.models.weights import FILE_BYTES
from rlt_lightning.modules.meter import GIB
from rlt_lightning.planner.inputs import LanguageModel, Setup, Worker

Sizes = dict[str, float]  # part -> bytes on one device
HEAD_TILES = 4  # logits, and what is made of them, that the head holds at a time
DRAW_BYTES = 32  # per row and word while HFEngine draws a token: logits, and sums in float64
LIVE_NUMEL = 10**9  # weights that DeepSpeed ZeRO-3 keeps gathered (stage3_max_live_parameters)
ASLEEP = 1.5 * GIB  # stated: what a vLLM worker that sleeps keeps of a GPU
SENT_NUMEL = 5 * 10**8  # gradients that its stage 1 with bfloat16 sends together
PREFETCH_NUMEL = 5 * 10**7  # and fetches ahead (stage3_prefetch_bucket_size)


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
    reference_weights = weights(setup, policy, frozen=True) if setup.copies_reference else 0.0
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
        parts["reference weights"] = setup.copies_reference * policy.shape.weights * policy.weight_bytes
    if setup.offload_parameters:
        models = [policy] + ([policy] if setup.copies_reference else []) + ([student] if student else [])
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
