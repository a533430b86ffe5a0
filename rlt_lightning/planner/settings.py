"""From the settings of a fit to what its plan is made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.datamodules import StratosDataModule
from rlt_lightning.datamodules.sources import EMBEDDED
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.base import PolicyModule, require_precision
from rlt_lightning.modules.meter import GIB, flops, matmul_rate, resident_bytes
from rlt_lightning.numerics.head import block_size
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.planner.inputs import Device, LanguageModel, Setup, Sharding, Step
from rlt_lightning.planner.options import CPU_BANDWIDTH, CUDA_GIB, GPUS, PlanOptions
from rlt_lightning.planner.shapes import Shape, activations
from rlt_lightning.planner.workers import PUSH_GB_S, count_devices, push_backend, worker_of
from rlt_lightning.pretrained import meta_model
from rlt_lightning.types import InputError, SFTExample

ZERO: dict[int, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}
REDUCE_BUCKET, SUB_GROUP = 200_000_000, 10**12  # Lightning's defaults


def read_setup(
    trainer: Any,
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
) -> Setup:
    """Collect what the plan is made of.

    Args:
        trainer: The settings of the trainer, parsed and not instantiated.
        module: The module, which has loaded nothing.
        data: The datamodule, which has read nothing.
        rollouts: The callback that would bring completions.
        options: Of the plan.
    """
    notes: list[str] = []
    on_cpu = options.device == "cpu" or (options.device == "auto" and trainer.accelerator == "cpu")
    reserved = (
        (resident_bytes() or 0.5 * GIB) if on_cpu else CUDA_GIB * GIB
    )  # before shapes are traced, which takes memory
    per_node = count_devices(trainer.devices, on_cpu, notes)
    num_processes = per_node * int(trainer.num_nodes)
    sharding, settings = sharding_named(trainer.strategy, num_processes)
    precision = {"bf16": "bf16-mixed", "32": "32-true", "None": "32-true"}.get(str(trainer.precision))
    precision = precision or str(trainer.precision)
    require_precision(precision)
    deepspeed, mixed = sharding.startswith("zero"), precision == "bf16-mixed"
    in_half = mixed and (deepspeed or sharding == "fsdp2")  # cast as a whole rather than product by product
    device = device_of(options, on_cpu, per_node, mixed, reserved, notes)
    rlt = module if isinstance(module, RLTModule) else None
    lengths = sequence_lengths(rlt, data, rollouts, options, notes)
    group_size = rlt.group_size if rlt else 1
    step = Step(
        num_processes, data.prompts_per_step, group_size, *lengths, module.micro_batch_tokens, module.layout
    )

    def language_model(name: str, dtype: str, lora: LoRA | None = None) -> LanguageModel:
        held = meta_model(name, dtype, module.attn_implementation, module.trust_remote_code)
        weight_bytes = next(held.parameters()).element_size()
        if lora is not None:
            add_adapter(held, lora, module.seed)
        if in_half:
            held = held.to(torch.bfloat16)
        shared = group_size > 1 and module.layout in ("auto", "shared_prefix")
        prefix = min(step.prompt_length, step.row_tokens // 2) if shared else 0
        traced = activations(
            held, step.row_tokens, prefix, module.gradient_checkpointing, mixed and not in_half
        )
        product_bytes = next(held.parameters()).element_size()
        return LanguageModel(
            name=name,
            shape=Shape.of(held),
            weight_bytes=product_bytes if deepspeed else weight_bytes,
            product_bytes=product_bytes,
            activations=traced,
            flops_per_token=flops(held, 1, 0, 0),
            flops_per_pair=flops(held, 0, 1, 0),
            flops_per_scored=flops(held, 0, 0, 1),
        )

    policy = language_model(module.pretrained, module.dtype_name, module.lora)
    student = language_model(rlt.student_name, rlt.student_dtype) if rlt and rlt.student_name else None
    with_reference = bool(rlt and rlt.policy_loss.kl_coef)
    syncs = any("ReferenceSync" in str(callback.class_path) for callback in trainer.callbacks or [])
    trained_bytes = 4 if module.lora is not None else policy.weight_bytes  # A and B are in fp32
    engine = rollouts.engine
    worker = worker_of(engine, policy, trainer.devices, options, notes) if rlt else None
    notes[:0] = [
        f"{role} {model.name}, {model.shape.weights / 1e9:.3g} billion weights"
        for role, model in (("policy", policy), ("student", student))
        if model
    ]
    sized_as = torch.empty(0, device="cpu" if on_cpu else "meta")
    return Setup(
        device=device,
        sharding=sharding,
        num_processes=num_processes,
        processes_per_machine=per_node,
        policy=policy,
        student=student,
        with_reference=with_reference,
        shares_base=module.lora is not None and not syncs,
        forwards_per_step=module.forwards_per_step,
        master_bytes=4 if deepspeed else trained_bytes,
        grad_bytes=4 if deepspeed and mixed else trained_bytes,
        offload_frozen=bool(rlt and rlt.offload_frozen),
        offload_optimizer=bool(settings.get("offload_optimizer")) and not on_cpu,  # there is one memory
        offload_parameters=bool(settings.get("offload_parameters")) and not on_cpu,
        bucket_numel=int(settings.get("reduce_bucket_size", REDUCE_BUCKET)),
        sub_group_numel=int(settings.get("sub_group_size", SUB_GROUP)),
        step=step,
        logits_bytes=2**20 * block_size(module.head.logits_mib, sized_as),
        hf_sequences=engine.describe().sequences_in_process if rlt else 0,
        recompute_teacher=bool(rlt and recomputes(rlt, rollouts)),
        worker=worker,
        mfu=options.mfu,
        checkpointing=module.gradient_checkpointing,
        push_bandwidth=1e9 * (options.push_gb_s or PUSH_GB_S.get(push_backend(engine), 1.0)),
        decode_rate=options.decode_tokens_per_s,
        notes=notes,
    )


def sharding_named(strategy: Any, num_processes: int) -> tuple[Sharding, dict[str, Any]]:
    """How a strategy lays weights out, and its settings.

    Raises:
        InputError: For one that is not known here.
    """
    if isinstance(strategy, str):
        if strategy == "auto":
            return ("ddp" if num_processes > 1 else "whole"), {}
        if strategy.startswith("ddp"):
            return "ddp", {}
    else:
        settings = dict(strategy.get("init_args") or {}) | dict(strategy.get("dict_kwargs") or {})
        name = str(strategy.get("class_path")).rpartition(".")[2]
        if name == "FSDP2":
            return "fsdp2", settings
        if name == "DeepSpeed" and int(settings.get("stage", 3)) in ZERO:
            return ZERO[int(settings.get("stage", 3))], settings
        if name in ("DDPStrategy", "SingleDeviceStrategy"):
            return ("ddp" if name == "DDPStrategy" else "whole"), {}
    raise InputError(
        "rlt plan knows the strategies auto, ddp, rlt_lightning.strategies.FSDP2 and "
        f"rlt_lightning.strategies.DeepSpeed of stage 1 to 3, but trainer.strategy is {strategy}. Use one."
    )


def device_of(
    options: PlanOptions, on_cpu: bool, per_node: int, mixed: bool, reserved: float, notes: list[str]
) -> Device:
    """What one process computes on."""
    name = "cpu" if on_cpu else "H100" if options.device == "auto" else options.device
    if on_cpu:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        gib, bandwidth = pages * size / GIB / per_node, CPU_BANDWIDTH
        dtype = torch.bfloat16 if mixed else torch.float32
        peak = 1e12 * options.tflops if options.tflops else matmul_rate(torch.device("cpu"), dtype)
    else:
        gib, peak, bandwidth = GPUS[name]
        peak = 1e12 * options.tflops if options.tflops else peak
    if options.device == "auto" and not on_cpu:
        notes.append("trainer.accelerator is not cpu and plan.device not set: planned for an H100")
    return Device(
        name=name,
        memory=GIB * (options.device_gib or gib),
        flops=peak,
        bandwidth=1e9 * options.bandwidth_gb_s if options.bandwidth_gb_s else bandwidth,
        reserved=reserved,
    )


def sequence_lengths(
    rlt: RLTModule | None,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
    notes: list[str],
) -> tuple[int, int, int, int]:
    """Longest prompt and completion, and the means of both, tokens.

    Rows that lie on this machine are read and tokenised; else the limits are taken for the longest.
    """
    limit = rollouts.sampling.max_completion_length if rlt else 0
    is_local = all(source in EMBEDDED or Path(source).exists() for source in data.sources)
    if options.prompt_length is None and is_local:
        data.setup("fit")
        if rlt:
            prompts, rests = [len(p.teacher_prompt) for p in data.problems], [limit]
        else:
            examples = [example for example in data.items if isinstance(example, SFTExample)]
            rests = [sum(example.loss_mask) for example in examples]
            prompts = [len(example.token_ids) - n for example, n in zip(examples, rests, strict=True)]
        longest, mean = max(prompts), round(sum(prompts) / len(prompts))
        rest, mean_rest = max(rests), max(1, round(sum(rests) / len(rests)))
        source = f"read from the {len(prompts)} rows of {data.source}"
    else:
        limit_of_prompts = data.max_prompt_length if rlt else 0
        longest = limit_of_prompts if options.prompt_length is None else options.prompt_length
        rest = limit or data.max_length - longest
        mean, mean_rest = round(options.mean_frac * longest), max(1, round(options.mean_frac * rest))
        source = "given" if options.prompt_length is not None else "the settings' limits"
    if rlt or options.completion_length is not None:
        rest = options.completion_length or rest
        mean_rest = max(1, round(options.mean_frac * rest))
    notes.append(
        f"prompts of up to {longest} tokens, {mean} on average ({source}); completions of up to {rest}, "
        f"{mean_rest} on average"
    )
    return longest, rest, mean, mean_rest


def recomputes(module: RLTModule, rollouts: RolloutCallback) -> bool:
    """Whether the teacher runs once more to be scored; see `StudentScorer`."""
    reward = module.reward
    return isinstance(reward, RLTReward) and (
        module.teacher_log_probs == "recompute"
        or reward.kl_estimator == "exact"
        or not rollouts.engine.reports_log_probs
        or rollouts.sampling.truncates
        or rollouts.sampling.temperature != reward.teacher_temperature
    )
