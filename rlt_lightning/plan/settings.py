"""Turn the settings of a run into the inputs of its plan.

settings of trainer, module, data, rollouts
  ├─ choose_verb ────▶ fit, predict or test; an evaluation is read as a prediction without a student
  ├─ read_processes ─▶ Processes ─ read_device ─▶ Device
  ├─ read_step ──────▶ Step (lengths.py: rows on this machine are read and tokenised)
  ├─ read_model ─────▶ LanguageModel, of all models (models.py: shapes are traced, nothing is loaded)
  └─ read_worker ────▶ PlannedWorkers
                          └──────────────────────▶ Setup
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlt_lightning.callbacks import ResponseCallback, RolloutCallback
from rlt_lightning.datamodules import EvaluationDataModule, StratosDataModule
from rlt_lightning.engines import Engine
from rlt_lightning.engines.base import Sampling
from rlt_lightning.engines.slots import find_architecture_fault
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.models.quantised import nf4_bytes, quantisable_layers, require_settings
from rlt_lightning.modules import (
    CorrectnessReward,
    EvaluationModule,
    LikelihoodModule,
    OPDModule,
    RLTModule,
)
from rlt_lightning.modules.base import PolicyModule, count_steps, require_precision
from rlt_lightning.modules.on_policy import OnPolicyModule
from rlt_lightning.modules.optimizer import states_8bit_bytes
from rlt_lightning.modules.phases import GIB, count_flops, matmul_rate, resident_bytes
from rlt_lightning.numerics.head import block_size
from rlt_lightning.numerics.likelihood import find_kl_reward
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.plan.inputs import (
    CPU_BANDWIDTH,
    CUDA_GIB,
    GPUS,
    Device,
    LanguageModel,
    PlannedWorkers,
    PlanOptions,
    Scorer,
    Setup,
    Sharding,
    Step,
    Verb,
)
from rlt_lightning.plan.lengths import has_completions, read_step
from rlt_lightning.plan.models import Models, Shape, trace_activations
from rlt_lightning.pretrained import meta_model
from rlt_lightning.strategies import NAMED
from rlt_lightning.types import InputError

# Lightning's defaults of DeepSpeed, in numbers of weights.
REDUCE_BUCKET, SUB_GROUP = 200_000_000, 10**12
ZERO_STAGES: dict[int, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}
# Other names of the precisions that the modules accept.
PRECISIONS = {"bf16": "bf16-mixed", "32": "32-true", "None": "32-true"}
# Stated, GB/s; docs/planning.md says where each comes from.
PUSH_GB_S = {"gloo": 0.8, "disk": 0.8, "nccl": 50.0}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
        policy, callback = convert_evaluation(module, rollouts)
        verb = choose_verb(data, callback, options, notes)
        if verb != "test" or not loads_own_model(rollouts.engine):
            return build_setup(verb, trainer, policy, data, callback, options, models, notes)
        trainer = use_worker_device(trainer, rollouts.engine)
        setup = build_setup(verb, trainer, policy, data, callback, options, models, notes)
        return drop_policy(setup)


def build_setup(
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
        processes_per_machine=processes.per_machine,
        policy=policy,
        shares_base=module.lora is not None and "ReferenceSync" not in callbacks,
        forwards_per_step=module.forwards_per_step,
        master_bytes=4 if processes.use_deepspeed else trained_bytes,
        grad_bytes=4 if processes.use_deepspeed and processes.mixed else trained_bytes,
        # Offloading does nothing on a CPU, whose processes have the host's memory only.
        offload_optimizer=bool(processes.strategy.get("offload_optimizer")) and not processes.on_cpu,
        offload_parameters=bool(processes.strategy.get("offload_parameters")) and not processes.on_cpu,
        bucket_numel=int(processes.strategy.get("reduce_bucket_size", REDUCE_BUCKET)),
        sub_group_numel=int(processes.strategy.get("sub_group_size", SUB_GROUP)),
        step=step,
        logits_bytes=count_logits_bytes(module, processes.on_cpu),
        mfu=options.mfu,
        checkpointing=module.gradient_checkpointing,
        decode_rate=options.decode_tokens_per_s,
        notes=notes,
        verb=verb,
        num_steps=count_run_steps(verb, trainer, step),
    )
    if isinstance(module, OnPolicyModule):
        worker = read_worker(rollouts.engine, policy, trainer.devices, options, notes)
        setup = add_rollouts(replace(setup, worker=worker), module, rollouts)
        notes += note_refills(setup, rollouts)
    if isinstance(module, RLTModule):
        setup = add_students(setup, module, rollouts, processes, models)
        if isinstance(module, LikelihoodModule):
            module.require_synchronous(setup.asynchronous)
            setup = add_scorer(setup, module, processes, models)
        setup = drop_sampling(setup, module) if has_completions(data) else setup
    if isinstance(module, OPDModule):
        setup = add_teacher(setup, module, processes, models)
    return replace(setup, notes=[*note_models(setup), *notes])


def count_run_steps(verb: Verb, trainer: Any, step: Step) -> int | None:
    """Return the steps of a whole fit, or the batches of another run; None if that needs rows not here."""
    if verb != "fit":
        return step.num_batches
    if step.num_batches is None:
        # The trainer ends with the first of both.
        return trainer.max_steps if trainer.max_steps != -1 and trainer.max_epochs in (None, -1) else None
    length = trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches
    return None if length[:2] in ((-1, None), (-1, -1)) else count_steps(step.num_batches, *length)


def drop_policy(setup: Setup) -> Setup:
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


def add_rollouts(setup: Setup, module: OnPolicyModule, rollouts: RolloutCallback) -> Setup:
    """Add to a setup how completions are sampled."""
    return replace(
        setup,
        asynchronous=rollouts.asynchronous and setup.trains,
        offload_frozen=module.offload_frozen,
        hf_sequences=rollouts.engine.describe().sequences_in_process,
    )


def add_students(
    setup: Setup, module: RLTModule, rollouts: RolloutCallback, processes: Processes, models: Models
) -> Setup:
    """Add to a setup the frozen models of reinforcement learning and predictions, and when they score."""
    dtype = module.student_dtype
    students = tuple(
        read_model(name, dtype, None, module, processes, setup.step.with_scoring_prompts(number), models)
        for number, name in enumerate(module.students.names)
    )
    outside = not rollouts.engine.in_process and not rollouts.engine.takes_turns
    return replace(
        setup,
        scores_early=outside and rollouts.score_early and setup.trains,
        students=students,
        with_reference=bool(module.policy_loss.kl_coef) and setup.trains,
        teacher_passes=count_teacher_passes(module, rollouts),
    )


def add_scorer(setup: Setup, module: LikelihoodModule, processes: Processes, models: Models) -> Setup:
    """Return the setup with the scorer as its student: a frozen model, or the policy itself.

    Sequences with a solution are longer than those that were sampled: where the policy trains on them too,
    its activations are theirs.
    """
    trains_solutions = bool(module.answer_weight) and setup.trains
    if module.frozen_names:
        return replace(setup, student_dtype="scorer_dtype", trains_solutions=trains_solutions)
    scorer: Scorer = "policy" if module.scored_by == "policy" else "reference"
    reader, step = setup.policy, setup.step.with_scoring_prompts(0)
    if step.row_tokens > setup.step.row_tokens:
        options = module.dtype_name, module.lora, module, processes, step, models
        reader = replace(reader, activations=read_model(module.pretrained, *options).activations)
    policy = reader if trains_solutions else setup.policy
    return replace(setup, policy=policy, students=(reader,), scorer=scorer, trains_solutions=trains_solutions)


def drop_sampling(setup: Setup, module: RLTModule) -> Setup:
    """Return the setup of a run whose completions are given: nobody samples them.

    Nobody has told their log-probs, so the teacher runs where these count.
    """
    passes = setup.teacher_passes or int(isinstance(module.reward, RLTReward))
    return replace(setup, worker=None, hf_sequences=0, teacher_passes=passes)


def add_teacher(setup: Setup, module: OPDModule, processes: Processes, models: Models) -> Setup:
    """Add to a setup the teacher of on-policy distillation: another model, a copy, or the policy itself."""
    compares = module.estimator == "full"
    if module.teacher_name is None and not module.copies_student:
        return replace(setup, teacher=setup.policy, is_own_teacher=True, compares_words=compares)
    name = module.teacher_name or module.pretrained
    dtype = module.teacher_dtype if module.teacher_name else module.dtype_name
    teacher = read_model(name, dtype, None, module, processes, setup.step.with_scoring_prompts(0), models)
    return replace(setup, teacher=teacher, compares_words=compares)


def note_refills(setup: Setup, rollouts: RolloutCallback) -> list[str]:
    """Return a line about dynamic sampling, whose cost depends on rewards that nobody knows yet."""
    dynamic = rollouts.dynamic_sampling
    if dynamic is None or not setup.trains:
        return []
    most = 1 + dynamic.max_rounds
    return [
        f"dynamic sampling: a step samples and scores up to {most} x {setup.step.prompts} problems and takes "
        f"up to {most} times the seconds given for that; how many is not known before the run"
    ]


def choose_verb(
    data: StratosDataModule | EvaluationDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
    notes: list[str],
) -> Verb:
    """Return the verb that a config is for, and note why it is a prediction."""
    if isinstance(data, EvaluationDataModule):
        return "test"
    if options.verb is not None:
        return options.verb
    of_predict = {
        "data.task": data.task == "score",
        "data.student_context": data.student_context is not None,
        "rollouts.num_traces": rollouts.num_traces > 1,
        "rollouts.max_resamples": rollouts.max_resamples > 0,
    }
    named = [name for name, is_set in of_predict.items() if is_set]
    if not named:
        return "fit"
    notes.append(f"planned as rlt predict because of {' and '.join(named)}; --plan.verb fit plans training")
    return "predict"


def convert_evaluation(
    module: PolicyModule | EvaluationModule, rollouts: RolloutCallback | ResponseCallback
) -> tuple[PolicyModule, RolloutCallback]:
    """Return module and callback; an evaluation becomes a prediction that samples and asks no student."""
    if isinstance(module, PolicyModule) and isinstance(rollouts, RolloutCallback):
        return module, rollouts
    assert isinstance(module, EvaluationModule)
    assert isinstance(rollouts, ResponseCallback)
    policy = RLTModule(
        teacher=module.pretrained,
        student=None,
        reward=CorrectnessReward(),
        layout="single",
        dtype=module.dtype_name,
        attn_implementation=module.attn_implementation,
        trust_remote_code=module.trust_remote_code,
    )
    sampling = Sampling(max_completion_length=rollouts.sampling.max_completion_length)
    return policy, RolloutCallback(rollouts.engine, sampling, num_traces=rollouts.num_samples)


def loads_own_model(engine: Engine) -> bool:
    """Return whether an evaluation's workers load the model themselves, so that the run loads none."""
    workers = engine.describe().workers
    return not engine.in_process and (workers is None or workers.push_backend is None)


def use_worker_device(trainer: Any, engine: Engine) -> Any:
    """Return the trainer's settings with the GPU of one worker for a device, if the run has workers on GPUs.

    It is for an evaluation that loads no model: its own process may be on a CPU, and the workers compute.
    """
    workers = engine.describe().workers
    if workers is None or workers.launch is None or workers.launch.gpus is None:
        return trainer
    trainer = trainer.clone()
    trainer.accelerator, trainer.devices = "gpu", 1
    return trainer


def require_questions(data: EvaluationDataModule) -> None:
    """Check that an evaluation samples.

    Raises:
        InputError: If its responses are given.
    """
    if data.responses is not None:
        raise InputError(
            "rlt plan counts the sampling of responses, but data.responses gives them, so no model runs. "
            "Leave data.responses out, or run `rlt test` at once."
        )


@dataclass(frozen=True)
class Processes:
    """The processes that train."""

    on_cpu: bool
    per_machine: int
    number: int  # on all machines
    sharding: Sharding
    strategy: dict[str, Any]  # settings of the strategy
    mixed: bool  # matrix products in bfloat16 of fp32 weights

    @property
    def use_deepspeed(self) -> bool:
        """Return whether DeepSpeed steps the optimizer."""
        return self.sharding.startswith("zero")

    @property
    def cast_models(self) -> bool:
        """Return whether whole models are cast to bfloat16, rather than each product's operands."""
        return self.mixed and (self.use_deepspeed or self.sharding == "fsdp2")


def read_processes(trainer: Any, options: PlanOptions, notes: list[str]) -> Processes:
    """Read how many processes train and what they divide.

    Args:
        trainer: The settings of the trainer, parsed and not instantiated.
        options: The options of the plan.
        notes: Assumptions are added here.

    Raises:
        InputError: If the strategy or the precision is not supported, or there is no process.
    """
    on_cpu = options.device == "cpu" or (options.device == "auto" and trainer.accelerator == "cpu")
    per_machine = count_devices(trainer.devices, on_cpu, notes)
    number = per_machine * int(trainer.num_nodes)
    if number < 1:
        raise InputError(
            "A run must have at least one process, but trainer.devices is "
            f"{trainer.devices} and trainer.num_nodes {trainer.num_nodes}. Raise the one that is 0."
        )
    sharding, strategy = read_sharding(trainer.strategy, number)
    precision = PRECISIONS.get(str(trainer.precision), str(trainer.precision))
    require_precision(precision)
    return Processes(on_cpu, per_machine, number, sharding, strategy, mixed=precision == "bf16-mixed")


def count_devices(devices: Any, on_cpu: bool, notes: list[str]) -> int:
    """Return the number of processes on one machine, from trainer.devices."""
    if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
        devices = int(devices)
    if devices in ("auto", -1):
        found = 1 if on_cpu else max(1, torch.cuda.device_count())
        notes.append(f"trainer.devices is {devices}: planned for {found}, set it for another number")
        return found
    return devices if isinstance(devices, int) else len(parse_gpu_ids(devices))


def parse_gpu_ids(devices: Any) -> list[int]:
    """Return the ids in a list, or in a text such as "0,1"."""
    words = devices.split(",") if isinstance(devices, str) else devices
    return [int(word) for word in words if str(word).strip()]


def read_sharding(strategy: Any, num_processes: int) -> tuple[Sharding, dict[str, Any]]:
    """Return how a strategy divides the weights, and its settings.

    Raises:
        InputError: If the planner does not know the strategy.
    """
    if strategy == "auto":
        return ("ddp" if num_processes > 1 else "whole"), {}
    if isinstance(strategy, str) and strategy.startswith("ddp"):
        return "ddp", {}
    if isinstance(strategy, str) and strategy in NAMED:
        kind, settings = NAMED[strategy]
        name = kind.__name__
    elif isinstance(strategy, str):
        raise InputError(f"trainer.strategy must be one of auto, ddp, {', '.join(NAMED)}, but is {strategy}.")
    else:
        settings = dict(strategy.get("init_args") or {}) | dict(strategy.get("dict_kwargs") or {})
        name = str(strategy.get("class_path")).rpartition(".")[2]
    if name == "FSDP2":
        return "fsdp2", settings
    if name == "DeepSpeed" and int(settings.get("stage", 3)) in ZERO_STAGES:
        return ZERO_STAGES[int(settings.get("stage", 3))], settings
    if name in ("DDPStrategy", "SingleDeviceStrategy"):
        return ("ddp" if name == "DDPStrategy" else "whole"), {}
    raise InputError(f"rlt plan does not know the trainer.strategy {name}. Use one of {', '.join(NAMED)}.")


def read_device(options: PlanOptions, processes: Processes, notes: list[str]) -> Device:
    """Return the device of one process: this CPU, measured, or a GPU by its data sheet."""
    name = "H100" if options.device == "auto" else options.device
    if processes.on_cpu:
        name = "cpu"
        # Measured before the steps below take more memory.
        reserved = resident_bytes() or 0.5 * GIB
        machine_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
        gib, bandwidth = machine_gib / processes.per_machine, CPU_BANDWIDTH
        dtype = torch.bfloat16 if processes.mixed else torch.float32
        peak = 1e12 * options.tflops if options.tflops else matmul_rate(torch.device("cpu"), dtype)
    else:
        reserved = CUDA_GIB * GIB
        gib, peak, bandwidth = GPUS[name]
        peak = 1e12 * options.tflops if options.tflops else peak
        if options.device == "auto":
            notes.append("plan.device is not set: planned for an H100")
    return Device(
        name=name,
        memory=GIB * (options.device_gib or gib),
        flops=peak,
        bandwidth=1e9 * options.bandwidth_gb_s if options.bandwidth_gb_s else bandwidth,
        reserved=reserved,
    )


def read_worker(
    engine: Engine, policy: LanguageModel, devices: Any, options: PlanOptions, notes: list[str]
) -> PlannedWorkers | None:
    """Return what the settings say of the workers that sample; None if the engine has none.

    Args:
        engine: The engine, not started.
        policy: The model that they sample with.
        devices: trainer.devices, to find out whether workers share GPUs with the trainer.
        options: The options of the plan, which describe workers that run already.
        notes: Assumptions are added here.
    """
    settings = engine.describe().workers
    if settings is None:
        return None
    backend = settings.push_backend or ""
    push_bytes = policy.weight_bytes if settings.push_dtype is None else settings.push_dtype.itemsize
    utilization = options.gpu_memory_utilization
    launch = settings.launch
    if launch is None:
        size = options.tensor_parallel_size
        num_gpus, weight_bytes, colocated = settings.num_workers * size, 2, False
        notes.append(
            f"{settings.num_workers} workers by URL, each on {size} separate GPUs, all alike, in bfloat16"
        )
    else:
        size = launch.tensor_parallel_size
        num_gpus = launch.num_workers * size * launch.data_parallel_size
        weight_bytes = DTYPE_BYTES.get(launch.dtype, 2)
        words = [word for argument in launch.arguments for word in argument.split("=")]
        if "--gpu-memory-utilization" in words:
            utilization = float(words[words.index("--gpu-memory-utilization") + 1])
        colocated = bool({gpu for ids in launch.gpus or [[0]] for gpu in ids} & list_trainer_gpus(devices))
    return PlannedWorkers(
        num_gpus=num_gpus,
        tensor_parallel_size=size,
        weight_bytes=weight_bytes,
        gpu_memory_utilization=utilization,
        max_sequences=settings.max_sequences,
        push_bytes=push_bytes,
        only_adapter=engine.takes_adapters,
        bucket_bytes=settings.push_bytes,
        colocated=colocated,
        sleeps=engine.takes_turns,
        push_bandwidth=1e9 * (options.push_gb_s or PUSH_GB_S.get(backend, 1.0)),
        pushed=settings.push_backend is not None,
    )


def list_trainer_gpus(devices: Any) -> set[int]:
    """Return the ids of the GPUs that train on one machine, from trainer.devices."""
    if not isinstance(devices, int) and "," in str(devices):
        return set(parse_gpu_ids(devices))
    return set(range(count_devices(devices, False, [])))


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
    model = meta_model(models.find_folder(name), dtype, module.attn_implementation, module.trust_remote_code)
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
    uses_slots = find_architecture_fault(model) is None
    traced = trace_activations(
        model,
        step.row_tokens,
        prefix=min(step.prompt_length, step.row_tokens // 2) if shares_prefix else 0,
        checkpointing=module.gradient_checkpointing,
        autocast=processes.mixed and not processes.cast_models,
    )
    return LanguageModel(
        name=name,
        shape=Shape.from_model(model),
        weight_bytes=product_bytes if processes.use_deepspeed else weight_bytes,
        product_bytes=product_bytes,
        activations=traced,
        flops_per_token=count_flops(model, 1, 0, 0),
        flops_per_pair=count_flops(model, 0, 1, 0),
        flops_per_scored=count_flops(model, 0, 0, 1),
        nf4_numel=sum(in_4_bits),
        nf4_bytes=sum(map(nf4_bytes, in_4_bits)),
        # Autocast casts fp32 weights once more.
        nf4_whole=max(in_4_bits, default=0) * (6 if processes.mixed and weight_bytes == 4 else weight_bytes),
        states_8bit=states_8bit_bytes(trained) if module.optimizer_config.states == "8bit" else None,
        kv_bytes=2 if processes.mixed and uses_slots else product_bytes,
        uses_slots=uses_slots,
        loaded_bytes=weight_bytes,
    )


def note_models(setup: Setup) -> list[str]:
    """Return a line with the size of each model, for the page."""
    models = [("policy", setup.policy), *(("student", student) for student in setup.frozen_students)]
    models += [("teacher", setup.copied_teacher)] if setup.copied_teacher else []
    return [f"{role} {model.name}, {model.shape.weights / 1e9:.3g} billion weights" for role, model in models]


def count_logits_bytes(module: PolicyModule, on_cpu: bool) -> int:
    """Return the bytes of one tile of logits, which depend on the kind of device."""
    sized_as = torch.empty(0, device="cpu" if on_cpu else "meta")
    return 2**20 * block_size(module.head.logits_mib, sized_as)


def count_teacher_passes(module: RLTModule, rollouts: RolloutCallback) -> int:
    """Return how often the teacher runs once more for the reward; see `Scorer`."""
    reward = find_kl_reward(module.reward, rollouts.sampling.temperature)
    if reward is None:
        return 0
    if reward.kl_estimator == "exact":
        # Its hidden states are computed again with each student.
        return len(module.students.names)
    return int(
        module.teacher_log_probs == "recompute"
        or not rollouts.engine.reports_log_probs
        or rollouts.sampling.truncates
        or rollouts.sampling.temperature != reward.teacher_temperature
    )
