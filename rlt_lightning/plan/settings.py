"""Turn the settings of a run into the inputs of its plan.

settings of trainer, module, data, rollouts
  ├─ verb_of ────────▶ fit, predict or test
  ├─ read_processes ─▶ Processes ─ read_device ─▶ Device
  ├─ read_step ──────▶ Step (rows on this machine are read and tokenised)
  ├─ read_model ─────▶ LanguageModel, of all models (their shapes are traced, nothing is loaded)
  └─ read_worker ────▶ PlannedWorkers
                          └──────────────────────▶ Setup
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlt_lightning.callbacks import ResponseCallback, RolloutCallback
from rlt_lightning.datamodules import EvaluationDataModule, StratosDataModule
from rlt_lightning.engines.decoders import architecture_fault
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.models.quantised import nf4_bytes, quantisable_layers, require_settings
from rlt_lightning.modules import EvaluationModule, OPDModule, RLTModule
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.modules.meter import flops
from rlt_lightning.modules.optimizer import states_8bit_bytes
from rlt_lightning.modules.sampled import SampledModule
from rlt_lightning.numerics.head import block_size
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.plan.inputs import LanguageModel, Setup, Step, Verb
from rlt_lightning.plan.known import Models
from rlt_lightning.plan.options import PlanOptions
from rlt_lightning.plan.processes import Processes, read_device, read_processes
from rlt_lightning.plan.rows import read_step, scores_given
from rlt_lightning.plan.shapes import Shape, activations
from rlt_lightning.plan.verbs import (
    as_prediction,
    loads_own_model,
    require_questions,
    verb_of,
    workers_device,
)
from rlt_lightning.plan.workers import push_bandwidth, read_worker
from rlt_lightning.pretrained import meta_model

# Lightning's defaults of DeepSpeed, in numbers of weights.
REDUCE_BUCKET, SUB_GROUP = 200_000_000, 10**12


def read_setup(
    trainer: Any,
    module: PolicyModule | EvaluationModule,
    data: StratosDataModule | EvaluationDataModule,
    rollouts: RolloutCallback | ResponseCallback,
    options: PlanOptions,
) -> Setup:
    """Collect the inputs of the plan.

    Args:
        trainer: The settings of the trainer, parsed and not instantiated.
        module: The module, which has loaded nothing.
        data: The datamodule, which has read nothing.
        rollouts: The callback that would bring completions or responses.
        options: The options of the plan.

    Raises:
        InputError: If a setting is wrong, or the planner does not know the strategy.
    """
    with TemporaryDirectory(prefix="rlt-plan-") as scratch:
        notes: list[str] = []
        models = Models(Path(scratch), notes)
        if isinstance(data, EvaluationDataModule):
            require_questions(data)
        policy, callback = as_prediction(module, rollouts)
        verb = verb_of(data, callback, options, notes)
        if verb != "test" or not loads_own_model(rollouts.engine):
            return setup_of(verb, trainer, policy, data, callback, options, models, notes)
        trainer = workers_device(trainer, rollouts.engine)
        setup = setup_of(verb, trainer, policy, data, callback, options, models, notes)
        return without_policy(setup)


def setup_of(
    verb: Verb,
    trainer: Any,
    module: PolicyModule,
    data: StratosDataModule | EvaluationDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
    models: Models,
    notes: list[str],
) -> Setup:
    """Collect the inputs of the plan, with the models that `models` finds."""
    processes = read_processes(trainer, options, notes)
    device = read_device(options, processes, notes)
    step = read_step(verb, module, data, rollouts, options, processes.number, models, notes)
    policy = read_model(module.pretrained, module.dtype_name, module.lora, module, processes, step, models)
    callbacks = read_callbacks(trainer, notes)
    # An adapter's matrices are in fp32, whatever type the model's weights have.
    trained_bytes = policy.weight_bytes if module.lora is None else 4
    setup = Setup(
        device=device,
        sharding=processes.sharding,
        num_processes=processes.number,
        processes_per_machine=processes.per_machine,
        policy=policy,
        students=(),
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
        verb=verb,
    )
    if isinstance(module, SampledModule):
        worker = read_worker(rollouts.engine, policy, trainer.devices, options, notes)
        setup = with_rollouts(replace(setup, worker=worker), module, rollouts)
        notes += refill_notes(setup, rollouts)
    if isinstance(module, RLTModule):
        setup = with_students(setup, module, rollouts, processes, models)
        setup = with_given(setup, module) if scores_given(data) else setup
    if isinstance(module, OPDModule):
        setup = with_teacher(setup, module, processes, models)
    return replace(setup, notes=[*model_notes(setup), *notes])


def without_policy(setup: Setup) -> Setup:
    """Return the setup of a run whose workers load the model themselves: it plans the GPU of one."""
    worker = setup.worker
    if worker is None or setup.device.is_cpu:
        return replace(setup, loads_policy=False)
    device, alone = replace(setup.device, reserved=0.0), replace(worker, colocated=True, sleeps=False)
    return replace(setup, loads_policy=False, device=device, worker=alone)


def read_callbacks(trainer: Any, notes: list[str]) -> str:
    """Return the paths of all callbacks, and note what is left out of the plan."""
    callbacks = " ".join(str(callback.class_path) for callback in trainer.callbacks or [])
    if "EvaluateEvery" in callbacks:
        notes.append("evaluations while training are left out: their time, and memory of answers in process")
    return callbacks


def with_rollouts(setup: Setup, module: SampledModule, rollouts: RolloutCallback) -> Setup:
    """Add to a setup how completions are sampled."""
    return replace(
        setup,
        asynchronous=rollouts.asynchronous and setup.trains,
        offload_frozen=module.offload_frozen,
        hf_sequences=rollouts.engine.describe().sequences_in_process,
    )


def with_students(
    setup: Setup, module: RLTModule, rollouts: RolloutCallback, processes: Processes, models: Models
) -> Setup:
    """Add to a setup the frozen models of reinforcement learning and predictions, and when they score."""
    dtype = module.student_dtype
    students = tuple(
        read_model(name, dtype, None, module, processes, setup.step.of_reader(number), models)
        for number, name in enumerate(module.students.names)
    )
    outside = not rollouts.engine.in_process and not rollouts.engine.takes_turns
    return replace(
        setup,
        scores_early=outside and rollouts.score_early and setup.trains,
        students=students,
        exact_kl=isinstance(module.reward, RLTReward) and module.reward.kl_estimator == "exact",
        with_reference=bool(module.policy_loss.kl_coef) and setup.trains,
        recompute_teacher=recomputes_teacher(module, rollouts),
    )


def with_given(setup: Setup, module: RLTModule) -> Setup:
    """Return the setup of a run whose completions are given: nobody samples them.

    Nobody has told their log-probs, so the teacher runs where these count.
    """
    asks_teacher = isinstance(module.reward, RLTReward)
    return replace(setup, worker=None, hf_sequences=0, recompute_teacher=asks_teacher)


def with_teacher(setup: Setup, module: OPDModule, processes: Processes, models: Models) -> Setup:
    """Add to a setup the teacher of on-policy distillation: another model, a copy, or the policy itself."""
    compares = module.estimator == "full"
    if module.teacher_name is None and not module.copies_student:
        return replace(setup, teacher=setup.policy, is_own_teacher=True, compares_words=compares)
    name = module.teacher_name or module.pretrained
    dtype = module.teacher_dtype if module.teacher_name else module.dtype_name
    teacher = read_model(name, dtype, None, module, processes, setup.step.of_reader(0), models)
    return replace(setup, teacher=teacher, compares_words=compares)


def refill_notes(setup: Setup, rollouts: RolloutCallback) -> list[str]:
    """Return a line about dynamic sampling, whose cost depends on rewards that nobody knows yet."""
    dynamic = rollouts.dynamic_sampling
    if dynamic is None or not setup.trains:
        return []
    most = 1 + dynamic.max_rounds
    return [
        f"dynamic sampling: a step samples and scores up to {most} x {setup.step.prompts} problems and takes "
        f"up to {most} times the seconds given for that; how many is not known before the run"
    ]


def read_model(
    name: str,
    dtype: str,
    lora: LoRA | None,
    module: PolicyModule,
    processes: Processes,
    step: Step,
    models: Models,
) -> LanguageModel:
    """Describe one model as the run holds it, from its configuration."""
    whole = processes.sharding in ("whole", "ddp")
    require_settings(module.lora, module.optimizer_config, whole, installed=False)
    model = meta_model(models.folder(name), dtype, module.attn_implementation, module.trust_remote_code)
    weight_bytes = next(model.parameters()).element_size()
    in_4_bits: list[int] = []
    if lora is not None and lora.base == "4bit":
        in_4_bits = [layer.weight.numel() for _, layer in quantisable_layers(model)]
    if lora is not None:
        add_adapter(model, lora, module.seed)
    if processes.cast_models:
        model = model.to(torch.bfloat16)
    product_bytes = next(model.parameters()).element_size()
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    shares_prefix = step.group_size > 1 and module.layout in ("auto", "shared_prefix")
    uses_slots = architecture_fault(model) is None
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
        nf4_numel=sum(in_4_bits),
        nf4_bytes=sum(map(nf4_bytes, in_4_bits)),
        # Autocast casts fp32 weights once more.
        nf4_whole=max(in_4_bits, default=0) * (6 if processes.mixed and weight_bytes == 4 else weight_bytes),
        states_8bit=states_8bit_bytes(trained) if module.optimizer_config.states == "8bit" else None,
        kv_bytes=2 if processes.mixed and uses_slots else product_bytes,
        uses_slots=uses_slots,
    )


def model_notes(setup: Setup) -> list[str]:
    """Return a line with the size of each model, for the page."""
    models = [("policy", setup.policy), *(("student", student) for student in setup.students)]
    models += [("teacher", setup.copied_teacher)] if setup.copied_teacher else []
    return [f"{role} {model.name}, {model.shape.weights / 1e9:.3g} billion weights" for role, model in models]


def logits_bytes(module: PolicyModule, on_cpu: bool) -> int:
    """Return the bytes of one tile of logits, which depend on the kind of device."""
    sized_as = torch.empty(0, device="cpu" if on_cpu else "meta")
    return 2**20 * block_size(module.head.logits_mib, sized_as)


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
