"""Compute the memory of a run from its setup: plain arithmetic, in bytes; nothing is run.

Only parts that exist at the same time add up, so each phase of a step has its own sum. The formulas follow
what this package, PyTorch's FSDP2 and DeepSpeed allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rlt_lightning.models.kernels import packing_pays
from rlt_lightning.models.weights import FILE_BYTES
from rlt_lightning.modules.phases import GIB
from rlt_lightning.plan.inputs import LanguageModel, PlannedWorkers, Setup

Sizes = dict[str, float]  # part -> bytes on one device
# Tiles of logits, and of what is computed from them, that a head holds at a time: in a forward pass, traced
# are 3.3; in a backward pass, 2.8; in that of a divergence, where two halves are a tile, 3.5 to 5.5.
HEAD_TILES, BACKWARD_TILES, PAIR_TILES = 4, 3, 6
DRAW_BYTES = 32  # per row and word while HFEngine draws a token: logits, weights, some in float64
ASLEEP = 1.5 * GIB  # stated: what a sleeping vLLM worker keeps of a GPU
# DeepSpeed's limits, in numbers of weights or gradients.
LIVE_NUMEL = 10**9  # gathered at a time by stage 3 (stage3_max_live_parameters)
PREFETCH_NUMEL = 5 * 10**7  # fetched ahead by stage 3 (stage3_prefetch_bucket_size)
SENT_NUMEL = 5 * 10**8  # sent together by stage 1 with bfloat16


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
    policy = setup.policy
    # PyTorch keeps the gradients of the step before until the next update; DeepSpeed frees most.
    keeps_gradients = setup.trains and (setup.holds_gradients or not setup.is_deepspeed)
    keeps_states = setup.trains and not setup.offload_optimizer
    parts = {
        "runtime": setup.device.reserved,
        "policy weights": count_weight_bytes(setup, policy, frozen=False) if setup.loads_policy else 0.0,
        "reference weights": count_weight_bytes(setup, policy, frozen=True)
        if setup.copies_reference
        else 0.0,
        "student weights": sum(
            (count_weight_bytes(setup, one, frozen=True) for one in setup.frozen_students), start=0.0
        ),
        "teacher weights": count_weight_bytes(setup, setup.copied_teacher, frozen=True)
        if setup.copied_teacher
        else 0.0,
        "optimizer states": count_optimizer_bytes(setup) if keeps_states else 0.0,
        "gradient buckets": count_bucket_bytes(setup) if keeps_gradients else 0.0,
    }
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
    frozen = {
        "reference weights": [setup.policy] if setup.copies_reference else [],
        "student weights": list(setup.frozen_students),
        "teacher weights": [setup.copied_teacher] if setup.copied_teacher else [],
    }
    models = [*([setup.policy] if setup.loads_policy else []), *(one for m in frozen.values() for one in m)]
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
    for part, ones in frozen.items():
        loaded = sum(one.frozen_weights * size[id(one)] for one in ones)
        parts[part] = 0.0 if on_host else loaded / setup.shards
    if setup.shards > 1:
        return parts | {"gathered": float(max(m.shape.largest * size[id(m)] for m in models))}
    if not setup.is_deepspeed or not setup.trains:
        return parts
    kept = setup.holds_gradients
    engine = parts | {
        "policy weights": count_weight_bytes(setup, setup.policy, frozen=False),
        "optimizer states": 0.0 if setup.offload_optimizer else count_master_bytes(setup),
        "gradient buckets": count_bucket_bytes(setup) if kept else 0.0,
        "gradients": count_gradient_bytes(setup) if kept else 0.0,
    }
    return max(parts, engine, key=lambda moment: sum(moment.values()))


def count_master_bytes(setup: Setup) -> float:
    """Return the weights that DeepSpeed's stages 1 and 2 step."""
    return setup.policy.shape.trained * setup.master_bytes / setup.state_shards


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
    if (start := list_start_parts(setup)) is not None:
        yield Phase("start", start, host)
    found = {name: parts_of(setup, lasting) for name, parts_of in PHASES.items()}
    computing = {name: parts for name, parts in found.items() if parts is not None}
    for name, parts in computing.items():
        yield Phase(name, lasting | parts, host)
    if not setup.trains:
        if not computing:
            yield Phase("judge", lasting, host)
        return
    written = {"checkpoint file": count_file_bytes(setup)}
    if setup.device.is_cpu:
        yield Phase("checkpoint", lasting | written, host)
    else:
        yield Phase("checkpoint", lasting, host | written)


def count_returned_bytes(setup: Setup, model: LanguageModel) -> float:
    """Return the weights of an offloaded frozen model, which come back while it computes."""
    offloaded = setup.offload_frozen and not setup.device.is_cpu
    return model.frozen_weights * model.weight_bytes if offloaded else 0.0


def count_awake_bytes(setup: Setup, worker: PlannedWorkers) -> float:
    """Return what a vLLM worker takes of the GPU that it shares with the trainer."""
    return worker.gpu_memory_utilization * setup.device.memory


def list_host_parts(setup: Setup) -> Sizes:
    """Return what each process keeps in the host's memory rather than on the device."""
    policy, students = setup.policy, setup.frozen_students
    trained = policy.shape.trained
    parts: Sizes = {}
    if setup.device.is_cpu:
        return parts
    if setup.offload_frozen:
        parts["student weights"] = float(sum(one.shape.weights * one.weight_bytes for one in students))
        parts["reference weights"] = setup.copies_reference * policy.frozen_weights * policy.weight_bytes
        if (teacher := setup.copied_teacher) is not None:
            parts["teacher weights"] = float(teacher.shape.weights * teacher.weight_bytes)
    if setup.offload_parameters:
        frozen = [*([policy] if setup.copies_reference else []), *students]
        models = [policy, *frozen, *([setup.copied_teacher] if setup.copied_teacher else [])]
        parts["weights"] = sum(m.shape.weights * m.weight_bytes for m in models) / setup.shards
    if setup.offload_optimizer and setup.trains:
        parts["optimizer states"] = count_optimizer_bytes(setup)
        # As they are accumulated, and as they are stepped.
        parts["gradients"] = 2 * trained * setup.master_bytes / setup.state_shards
    worker = setup.worker
    if worker and worker.colocated and worker.sleeps and worker.only_adapter:
        # Any other worker drops its weights, since a push brings them.
        parts["sleeping worker"] = policy.shape.weights * worker.weight_bytes / worker.tensor_parallel_size
    return parts


def count_file_bytes(setup: Setup) -> float:
    """Return the whole tensors of one file, which a process holds while it writes a checkpoint."""
    return min(FILE_BYTES, setup.policy.shape.trained * setup.master_bytes)


def count_pushed_bytes(setup: Setup, worker: PlannedWorkers) -> float:
    """Return the weights, or those of an adapter, that travel to each worker."""
    shape = setup.policy.shape
    return (shape.trained if worker.only_adapter else shape.weights) * worker.push_bytes
