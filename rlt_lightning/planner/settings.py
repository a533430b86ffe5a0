"""Turn the settings of a fit into the inputs of its plan.

settings of trainer, module, data, rollouts
  ├─ read_processes ─▶ Processes ─ read_device ─▶ Device
  ├─ read_step ──────▶ Step (rows on this machine are read and tokenised)
  ├─ read_model ─────▶ LanguageModel, of policy and student (their shapes are traced, nothing is loaded)
  └─ read_worker ────▶ PlannedWorkers
                          └──────────────────────▶ Setup
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.datamodules import StratosDataModule
from rlt_lightning.datamodules.sources import EMBEDDED
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.modules.meter import flops
from rlt_lightning.numerics.head import block_size
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.planner.inputs import LanguageModel, Setup, Step
from rlt_lightning.planner.options import PlanOptions
from rlt_lightning.planner.processes import Processes, read_device, read_processes
from rlt_lightning.planner.shapes import Shape, activations
from rlt_lightning.planner.workers import push_bandwidth, read_worker
from rlt_lightning.pretrained import meta_model
from rlt_lightning.types import SFTExample

# Lightning's defaults of DeepSpeed, in numbers of weights.
REDUCE_BUCKET, SUB_GROUP = 200_000_000, 10**12


def read_setup(
    trainer: Any,
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
) -> Setup:
    """Collect the inputs of the plan.

    Args:
        trainer: The settings of the trainer, parsed and not instantiated.
        module: The module, which has loaded nothing.
        data: The datamodule, which has read nothing.
        rollouts: The callback that would bring completions.
        options: The options of the plan.

    Raises:
        InputError: If a setting is wrong, or the planner does not know the strategy.
    """
    notes: list[str] = []
    processes = read_processes(trainer, options, notes)
    device = read_device(options, processes, notes)
    step = read_step(module, data, rollouts, options, processes.number, notes)
    policy = read_model(module.pretrained, module.dtype_name, module.lora, module, processes, step)
    callbacks = read_callbacks(trainer, notes)
    # An adapter's matrices are in fp32, whatever type the model's weights have.
    trained_bytes = policy.weight_bytes if module.lora is None else 4
    setup = Setup(
        device=device,
        sharding=processes.sharding,
        num_processes=processes.number,
        processes_per_machine=processes.per_machine,
        policy=policy,
        student=None,
        with_reference=False,
        shares_base=module.lora is not None and "ReferenceSync" not in callbacks,
        forwards_per_step=module.forwards_per_step,
        master_bytes=4 if processes.use_deepspeed else trained_bytes,
        grad_bytes=4 if processes.use_deepspeed and processes.mixed else trained_bytes,
        offload_frozen=False,
        # Offloading does nothing on a CPU, whose processes have the host's memory only.
        offload_optimizer=bool(processes.strategy.get("offload_optimizer")) and not processes.on_cpu,
        offload_parameters=bool(processes.strategy.get("offload_parameters")) and not processes.on_cpu,
        bucket_numel=int(processes.strategy.get("reduce_bucket_size", REDUCE_BUCKET)),
        sub_group_numel=int(processes.strategy.get("sub_group_size", SUB_GROUP)),
        step=step,
        logits_bytes=logits_bytes(module, processes.on_cpu),
        hf_sequences=0,
        recompute_teacher=False,
        worker=None,
        mfu=options.mfu,
        checkpointing=module.gradient_checkpointing,
        push_bandwidth=push_bandwidth(rollouts.engine, options),
        decode_rate=options.decode_tokens_per_s,
        notes=notes,
    )
    if isinstance(module, RLTModule):
        worker = read_worker(rollouts.engine, policy, trainer.devices, options, notes)
        setup = replace(with_rollouts(setup, module, rollouts, processes), worker=worker)
    return replace(setup, notes=[*model_notes(setup), *notes])


def read_callbacks(trainer: Any, notes: list[str]) -> str:
    """Return the paths of all callbacks, and note what is left out of the plan."""
    callbacks = " ".join(str(callback.class_path) for callback in trainer.callbacks or [])
    if "EvaluateEvery" in callbacks:
        notes.append("evaluations while training are left out: their time, and memory of answers in process")
    return callbacks


def with_rollouts(setup: Setup, module: RLTModule, rollouts: RolloutCallback, processes: Processes) -> Setup:
    """Add to a setup what reinforcement learning needs beside training: sampling and frozen models."""
    student = None
    if module.student_name:
        student = read_model(module.student_name, module.student_dtype, None, module, processes, setup.step)
    return replace(
        setup,
        student=student,
        with_reference=bool(module.policy_loss.kl_coef),
        offload_frozen=module.offload_frozen,
        hf_sequences=rollouts.engine.describe().sequences_in_process,
        recompute_teacher=recomputes_teacher(module, rollouts),
    )


def read_model(
    name: str, dtype: str, lora: LoRA | None, module: PolicyModule, processes: Processes, step: Step
) -> LanguageModel:
    """Describe one model as the run holds it, from its configuration."""
    model = meta_model(name, dtype, module.attn_implementation, module.trust_remote_code)
    weight_bytes = next(model.parameters()).element_size()
    if lora is not None:
        add_adapter(model, lora, module.seed)
    if processes.cast_models:
        model = model.to(torch.bfloat16)
    product_bytes = next(model.parameters()).element_size()
    shares_prefix = step.group_size > 1 and module.layout in ("auto", "shared_prefix")
    traced = activations(
        model,
        step.row_tokens,
        prefix=min(step.prompt_length, step.row_tokens // 2) if shares_prefix else 0,
        checkpointing=module.gradient_checkpointing,
        autocast=processes.mixed and not processes.cast_models,
    )
    return LanguageModel(
        name=name,
        shape=Shape.of(model),
        weight_bytes=product_bytes if processes.use_deepspeed else weight_bytes,
        product_bytes=product_bytes,
        activations=traced,
        flops_per_token=flops(model, 1, 0, 0),
        flops_per_pair=flops(model, 0, 1, 0),
        flops_per_scored=flops(model, 0, 0, 1),
    )


def model_notes(setup: Setup) -> list[str]:
    """Return a line with the size of each model, for the page."""
    models = {"policy": setup.policy, "student": setup.student}
    return [
        f"{role} {model.name}, {model.shape.weights / 1e9:.3g} billion weights"
        for role, model in models.items()
        if model
    ]


def logits_bytes(module: PolicyModule, on_cpu: bool) -> int:
    """Return the bytes of one tile of logits, which depend on the kind of device."""
    sized_as = torch.empty(0, device="cpu" if on_cpu else "meta")
    return 2**20 * block_size(module.head.logits_mib, sized_as)


def read_step(
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
    num_processes: int,
    notes: list[str],
) -> Step:
    """Return the sequences of one optimizer step.

    Rows that lie on this machine are read and tokenised. Otherwise the limits count as the longest lengths.
    """
    rlt = module if isinstance(module, RLTModule) else None
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
        prompt_limit = data.max_prompt_length if rlt else 0
        longest = prompt_limit if options.prompt_length is None else options.prompt_length
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
    return Step(
        num_processes=num_processes,
        prompts=data.prompts_per_step,
        group_size=rlt.group_size if rlt else 1,
        prompt_length=longest,
        completion_length=rest,
        mean_prompt_length=mean,
        mean_completion_length=mean_rest,
        micro_batch_tokens=module.micro_batch_tokens,
        layout=module.layout,
    )


def recomputes_teacher(module: RLTModule, rollouts: RolloutCallback) -> bool:
    """Return whether the teacher runs once more for the reward; see `StudentScorer`."""
    reward = module.reward
    return isinstance(reward, RLTReward) and (
        module.teacher_log_probs == "recompute"
        or reward.kl_estimator == "exact"
        or not rollouts.engine.reports_log_probs
        or rollouts.sampling.truncates
        or rollouts.sampling.temperature != reward.teacher_temperature
    )
