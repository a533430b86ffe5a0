"""`rlt plan`: predict the memory of a run, phase by phase, before anything is loaded.

    settings ─ read_setup ─▶ Setup ─ models/memory.py: list_phases ─▶ Phases ─ print_plan ─▶ page

The largest phase is the prediction. Nothing is downloaded: a model's configuration comes from this machine,
and rows that are not here are as long as the settings allow.
"""

from __future__ import annotations

import copy
import json
import os
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from rlt_lightning.callbacks import ResponseCallback, RolloutCallback
from rlt_lightning.callbacks.rollout_checks import count_student_tokens
from rlt_lightning.datamodules import EvaluationDataModule, StratosDataModule
from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.engines import Engine
from rlt_lightning.engines.base import Sampling
from rlt_lightning.engines.slots import find_architecture_fault
from rlt_lightning.models.embedded import DEFAULT_MODEL, MINIATURES, WHEEL_SHA256, cache_folder
from rlt_lightning.models.load import meta_model
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.models.memory import (
    GIB,
    REDUCE_BUCKET,
    SUB_GROUP,
    Device,
    LanguageModel,
    Phase,
    PlannedWorkers,
    Setup,
    Shape,
    Sharding,
    Step,
    Verb,
    count_kv_tokens,
    list_phases,
    trace_activations,
)
from rlt_lightning.models.quantised import nf4_bytes, quantisable_layers, require_settings
from rlt_lightning.modules import EvaluationModule, LikelihoodModule, OPDModule, RLTModule
from rlt_lightning.modules.base import PolicyModule, require_precision
from rlt_lightning.modules.on_policy import OnPolicyModule
from rlt_lightning.modules.optimizer import states_8bit_bytes
from rlt_lightning.modules.phases import resident_bytes
from rlt_lightning.numerics.head import block_size
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.strategies import NAMED
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.types import InputError

RUNTIME = 2 * GIB  # stated: CUDA context, libraries' workspaces, NCCL, and what fragmentation wastes
GPUS = {"A100": 79.3, "H100": 79.6, "H200": 140.4, "B200": 178.4}  # memory that the driver shows, GiB
# Assumed of rows that are not on this machine: means as parts of the longest, the solution as a part of the
# prompt, and the questions of an evaluation set.
MEAN_FRAC, MEAN_PROMPT_FRAC, SOLUTION_FRAC, QUESTION, MEAN_QUESTION = 0.3, 1 / 16, 0.5, 1024, 256
# Questions of each evaluation set on this machine that are read: making many of Countdown takes a minute.
FIRST_QUESTIONS = 64
# Other names of the precisions that the modules accept.
PRECISIONS = {"bf16": "bf16-mixed", "32": "32-true", "None": "32-true"}

# The fields of each config.json that decide sizes, as the models' authors published them.
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16", "vocab_size": 152064,
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "tie_word_embeddings": False, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 151936,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": 49152,
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-7B-Instruct": QWEN2,
    "bespokelabs/Bespoke-Stratos-7B": QWEN2,  # fine-tuned from the one above
    "Qwen/Qwen2.5-32B-Instruct": QWEN2 | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-0.6B": QWEN3,
    "Qwen/Qwen3-1.7B": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    DEFAULT_MODEL: SMOLLM2,
}  # fmt: skip


def print_plan(
    trainer: Any,
    module: PolicyModule | EvaluationModule,
    data: StratosDataModule | EvaluationDataModule,
    rollouts: RolloutCallback | ResponseCallback,
    options: PlanOptions,
) -> int:
    """Print what a run would need.

    Args:
        trainer: The settings of the trainer, parsed and not instantiated.
        module: The module, which has loaded nothing.
        data: The datamodule, which has read nothing.
        rollouts: The callback that would bring completions or responses.
        options: The options of the plan.

    Returns:
        The exit status: 1 if something does not fit.

    Raises:
        InputError: If a setting is wrong, or the shape of a model is not known here.
    """
    setup = read_setup(trainer, module, data, rollouts, options)
    phases = list(list_phases(setup))
    problems = find_problems(setup, phases)
    print(format_plan(setup, phases, problems))
    if options.json:
        content = {
            "fits": not problems,
            "problems": problems,
            "device_bytes": setup.device.memory,
            "peak_phase": find_peak(phases).name,
            "peak_bytes": find_peak(phases).total,
            "phases": {p.name: {"device": p.device, "host": p.host, "total": p.total} for p in phases},
        }
        Path(options.json).write_text(json.dumps(content, indent=1))
    return int(bool(problems))


# The inputs of a plan. Sizes are bytes.


@dataclass(frozen=True)
class PlanOptions:
    """What a plan needs to know beyond the settings of the run.

    Args:
        verb: What is planned: fit or predict; None: predict where settings say so that only `rlt predict`
            reads. An evaluation is always planned as `rlt test`.
        device: H100, H200, A100, B200 or cpu; auto: cpu where trainer.accelerator says so, else H100.
        device_gib: Memory of one device, GiB; None: the device's, or this machine's shared by processes.
        prompt_length: Longest prompt, tokens; None: that of the rows, else data.max_prompt_length.
        completion_length: Longest completion, tokens; None: the sampling limit, in fine-tuning that of the
            rows, else data.max_length less the prompt.
        tensor_parallel_size: GPUs that share a copy of the weights, for workers that are named by URL.
        json: File that the plan is also written to.
    """

    verb: Literal["fit", "predict"] | None = None
    device: str = "auto"
    device_gib: float | None = None
    prompt_length: int | None = None
    completion_length: int | None = None
    tensor_parallel_size: int = 1
    json: str | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", *GPUS):
            raise InputError(f"plan.device must be auto, cpu, {', '.join(GPUS)}, but is {self.device}.")
        for name in ("device_gib", "prompt_length", "completion_length", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"plan.{name} must be above 0, but is {value}.")
        if self.json is not None and not Path(self.json).resolve().parent.is_dir():
            raise InputError(f"plan.json must be in a folder that exists, but is {self.json}.")


# Settings of the run -> Setup


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


def read_setup(
    trainer: Any,
    module: PolicyModule | EvaluationModule,
    data: StratosDataModule | EvaluationDataModule,
    rollouts: RolloutCallback | ResponseCallback,
    options: PlanOptions,
) -> Setup:
    """Collect the inputs of a plan; see `print_plan`."""
    if isinstance(module, PolicyModule):
        assert isinstance(data, StratosDataModule)
        assert isinstance(rollouts, RolloutCallback)
        verb = options.verb or ("predict" if is_prediction(data, rollouts) else "fit")
        return build_setup(verb, trainer, module, data, rollouts, options)
    assert isinstance(data, EvaluationDataModule)
    assert isinstance(rollouts, ResponseCallback)
    return read_evaluation(trainer, module, data, rollouts, options)


def is_prediction(data: StratosDataModule, rollouts: RolloutCallback) -> bool:
    """Return whether settings are set that only `rlt predict` reads."""
    scores = data.task == "score" or data.student_context is not None
    return scores or rollouts.num_traces > 1 or rollouts.max_resamples > 0


def read_evaluation(
    trainer: Any,
    module: EvaluationModule,
    data: EvaluationDataModule,
    rollouts: ResponseCallback,
    options: PlanOptions,
) -> Setup:
    """Return the setup of an evaluation: a prediction that samples and asks no student.

    Workers to which nothing is pushed load the model themselves: then the plan is of a worker's GPU.
    """
    if data.responses is not None:
        raise InputError(
            "rlt plan counts the sampling of responses, but data.responses gives them, so no model runs. "
            "Leave data.responses out, or run `rlt test` at once."
        )
    policy = RLTModule(
        teacher=module.pretrained,
        student=None,
        reward=CorrectnessReward(),
        layout="single",
        dtype=module.dtype_name,
        attn_implementation=module.attn_implementation,
        trust_remote_code=module.trust_remote_code,
    )
    engine = rollouts.engine
    sampling = Sampling(max_completion_length=rollouts.sampling.max_completion_length)
    callback = RolloutCallback(engine, sampling, num_traces=rollouts.num_samples)
    workers = engine.describe().workers
    if engine.in_process or (workers is not None and workers.push_backend is not None):
        return build_setup("test", trainer, policy, data, callback, options)
    if workers is not None and workers.launch is not None and workers.launch.gpus is not None:
        # The run's own process may be on a CPU.
        trainer = trainer.clone()
        trainer.accelerator, trainer.devices = "gpu", 1
    setup = replace(build_setup("test", trainer, policy, data, callback, options), loads_policy=False)
    if setup.worker is None or setup.device.is_cpu:
        return setup
    worker = replace(setup.worker, colocated=True, sleeps=False)
    return replace(setup, device=replace(setup.device, reserved=0.0), worker=worker)


def build_setup(
    verb: Verb,
    trainer: Any,
    module: PolicyModule,
    data: StratosDataModule | EvaluationDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
) -> Setup:
    """Collect the inputs of the plan of a module that samples or learns."""
    processes = read_processes(trainer, options)
    whole = processes.sharding in ("whole", "ddp")
    require_settings(module.lora, module.optimizer_config, whole, installed=False)
    # Measured on a CPU, so before the steps below take more memory.
    device = read_device(options, processes)
    with TemporaryDirectory(prefix="rlt-plan-") as scratch:
        step, note = read_step(verb, module, data, rollouts, options, processes.number, Path(scratch))
        read = partial(read_model, module, processes, Path(scratch))
        policy = read(module.pretrained, module.dtype_name, module.lora, step)
        callbacks = " ".join(str(callback.class_path) for callback in trainer.callbacks or [])
        # An adapter's matrices are in fp32, whatever type the model's weights have.
        trained_bytes = policy.weight_bytes if module.lora is None else 4
        strategy, on_gpu = processes.strategy, not processes.on_cpu
        sized_as = torch.empty(0, device="meta" if on_gpu else "cpu")
        setup = Setup(
            device=device,
            sharding=processes.sharding,
            processes_per_machine=processes.per_machine,
            policy=policy,
            step=step,
            master_bytes=4 if processes.use_deepspeed else trained_bytes,
            grad_bytes=4 if processes.use_deepspeed and processes.mixed else trained_bytes,
            logits_bytes=2**20 * block_size(module.head.logits_mib, sized_as),
            verb=verb,
            shares_base=module.lora is not None and "ReferenceSync" not in callbacks,
            # Offloading does nothing on a CPU, whose processes have the host's memory only.
            offload_optimizer=bool(strategy.get("offload_optimizer")) and on_gpu,
            offload_parameters=bool(strategy.get("offload_parameters")) and on_gpu,
            bucket_numel=int(strategy.get("reduce_bucket_size", REDUCE_BUCKET)),
            sub_group_numel=int(strategy.get("sub_group_size", SUB_GROUP)),
        )
        if isinstance(module, OnPolicyModule):
            setup = replace(
                setup,
                worker=read_worker(rollouts.engine, policy, trainer.devices, options),
                hf_sequences=rollouts.engine.describe().sequences_in_process,
                offload_frozen=module.offload_frozen,
            )
        if isinstance(module, RLTModule):
            setup = add_students(setup, module, data, rollouts, read)
        if isinstance(module, OPDModule):
            is_own = module.teacher_name is None and not module.copies_student
            name = module.teacher_name or module.pretrained
            dtype = module.teacher_dtype if module.teacher_name else module.dtype_name
            setup = replace(
                setup,
                teacher=policy if is_own else read(name, dtype, None, step.with_scoring_prompts(0)),
                is_own_teacher=is_own,
                compares_words=module.estimator == "full",
            )
    frozen = {
        "student": setup.frozen_models["student weights"],
        "teacher": setup.frozen_models["teacher weights"],
    }
    models = [("policy", policy), *((role, model) for role in frozen for model in frozen[role])]
    notes = [
        f"{role} {model.name}, {model.shape.weights / 1e9:.3g} billion weights" for role, model in models
    ]
    notes.append(note)
    if setup.trains or setup.students:
        notes.append(f"rows of up to {step.row_tokens} tokens")
    if "EvaluateEvery" in callbacks:
        notes.append("evaluations while training are left out: in process, their answers need memory too")
    return replace(setup, notes=tuple(notes))


def add_students(
    setup: Setup,
    module: RLTModule,
    data: StratosDataModule | EvaluationDataModule,
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
        teacher_passes=count_teacher_passes(module, rollouts),
    )
    if isinstance(module, LikelihoodModule) and not module.frozen_names:
        # The policy reads thoughts with solutions too; where it trains on them, its activations are theirs.
        reader, reads = setup.policy, step.with_scoring_prompts(0)
        if reads.row_tokens > step.row_tokens:
            longer = read(module.pretrained, module.dtype_name, module.lora, reads)
            reader = replace(reader, activations=longer.activations)
        setup = replace(
            setup,
            policy=reader if module.answer_weight and setup.trains else setup.policy,
            students=(reader,),
            scorer="policy" if module.scored_by == "policy" else "reference",
        )
    if has_completions(data):
        # Nobody has told the log-probs of given completions, so the teacher runs where these count.
        passes = setup.teacher_passes or int(module.reward.has_tokens)
        setup = replace(setup, worker=None, hf_sequences=0, teacher_passes=passes)
    return setup


def count_teacher_passes(module: RLTModule, rollouts: RolloutCallback) -> int:
    """Return how often the teacher runs once more for the reward."""
    reward = module.reward.find_kl(rollouts.sampling.temperature)
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


def read_processes(trainer: Any, options: PlanOptions) -> Processes:
    """Read how many processes train and what they divide.

    Raises:
        InputError: If the strategy or the precision is not supported, or there is no process.
    """
    on_cpu = options.device == "cpu" or (options.device == "auto" and trainer.accelerator == "cpu")
    per_machine = len(list_devices(trainer.devices, on_cpu))
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
        InputError: If the planner does not know the strategy.
    """
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


def read_device(options: PlanOptions, processes: Processes) -> Device:
    """Return the device of one process: this CPU, measured, or a GPU by its data sheet."""
    if not processes.on_cpu:
        name = "H100" if options.device == "auto" else options.device
        return Device(name, GIB * (options.device_gib or GPUS[name]), RUNTIME)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = GIB * options.device_gib if options.device_gib else machine / processes.per_machine
    return Device("cpu", memory, resident_bytes() or 0.5 * GIB)


def read_worker(
    engine: Engine, policy: LanguageModel, devices: Any, options: PlanOptions
) -> PlannedWorkers | None:
    """Return what the settings say of the workers that sample; None if the engine has none.

    Args:
        engine: The engine, not started.
        policy: The model that they sample with.
        devices: trainer.devices, to find out whether workers share GPUs with the trainer.
        options: The options of the plan, which describe workers that run already.
    """
    settings = engine.describe().workers
    if settings is None:
        return None
    launch, size = settings.launch, options.tensor_parallel_size
    num_gpus, weight_bytes, utilization, colocated = settings.num_workers * size, 2, 0.9, False
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
        push_bytes=policy.weight_bytes if settings.push_dtype is None else settings.push_dtype.itemsize,
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
    data: StratosDataModule | EvaluationDataModule,
    rollouts: RolloutCallback,
    options: PlanOptions,
    num_processes: int,
    scratch: Path,
) -> tuple[Step, str]:
    """Return the sequences of one step or batch, and a line on where their lengths come from."""
    samples = isinstance(module, OnPolicyModule) and not has_completions(data)
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
    if isinstance(data, EvaluationDataModule):
        prompts, group_size = data.batch_size, rollouts.num_traces
    elif verb == "fit":
        prompts = data.prompts_per_step
        group_size = module.group_size if isinstance(module, OnPolicyModule) else 1
    else:
        prompts, group_size = data.val_batch_size, 1 if has_completions(data) else rollouts.num_traces
        if verb == "predict":  # each process gets whole batches
            prompts *= num_processes
    note = f"prompts of up to {prompt[0]} tokens ({source}), completions of up to {completion[0]}"
    if read := [length for length in scoring if length is not None]:
        note += f"; models that score read prompts, with solutions, of up to {max(read)} tokens"
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


def has_completions(data: StratosDataModule | EvaluationDataModule) -> bool:
    """Return whether rows bring their completions, which are only scored."""
    return isinstance(data, StratosDataModule) and data.task == "score"


def find_missing(data: StratosDataModule | EvaluationDataModule, scratch: Path) -> str | None:
    """Return a source or tokenizer that decides lengths and is not on this machine; None if all are."""
    sources: list[Any] = [data.format_options.format_from]
    if isinstance(data, EvaluationDataModule):
        sources += [spec.source for spec in data.specs.values()]
    else:
        sources += data.sources
    for path in (source for source in sources if isinstance(source, str) and source not in EMBEDDED):
        # A configuration's name may follow a file or a folder.
        if not any(Path(place).expanduser().exists() for place in (path, path.partition(":")[0])):
            return path
    for name in filter(None, (data.tokenizer_name, *getattr(data, "student_names", ()))):
        if not (find_folder(name, scratch) / "tokenizer.json").is_file():
            return f"the tokenizer of {name}"
    return None


def read_rows(
    verb: Verb, data: StratosDataModule | EvaluationDataModule, scratch: Path, limit: int | None
) -> Lengths:
    """Read and tokenise the rows; `limit` is that of completions, None where rows bring them."""
    data = copy.copy(data)
    data.output_dir = None
    data.tokenizer_name = str(find_folder(str(data.tokenizer_name), scratch))
    if isinstance(data, EvaluationDataModule):
        data.max_rows = min(data.max_rows or FIRST_QUESTIONS, FIRST_QUESTIONS)
        data.setup("test")
        assert limit is not None
        return measure([len(problem.prompt) for problem in data.problems]), assume_mean(limit), ()
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
    if data.task == "student_opd":
        scoring = (int(items.sum_columns("teacher_view").max()),)
    elif data.task == "student_likelihood":
        scoring = tuple(int(fixed.max()) for fixed in count_student_tokens(data))
    else:
        scoring = tuple(
            int(fixed.max()) if isinstance(chat_format, CrossTokenizerFormat) else None
            for chat_format, fixed in zip(data.student_views.formats, count_student_tokens(data), strict=True)
        )
    completions = measure(items.sum_columns("completion_ids")) if limit is None else assume_mean(limit)
    return measure(items.sum_columns("teacher_prefix", "think_prefix")), completions, scoring


def assume_lengths(
    data: StratosDataModule | EvaluationDataModule, options: PlanOptions, limit: int | None
) -> Lengths:
    """Return lengths by the settings' limits."""
    if isinstance(data, EvaluationDataModule):
        assert limit is not None
        longest = options.prompt_length or QUESTION
        return (longest, min(MEAN_QUESTION, longest)), assume_mean(limit), ()
    longest = options.prompt_length or (0 if limit is None else data.max_prompt_length)
    completion = assume_mean(limit or max(1, data.max_length - longest))
    mean = round(MEAN_PROMPT_FRAC * longest)
    solution = round(SOLUTION_FRAC * mean)
    if data.task == "student_opd":  # only the teacher reads the solution
        return (longest, mean - solution), completion, (longest,)
    # Of a likelihood reward only the scorer reads the solution.
    scorers = max(1, len(data.student_names)) if data.task == "student_likelihood" else 0
    return (longest, mean), completion, (longest + solution,) * scorers


def assume_mean(longest: int) -> tuple[int, int]:
    """Return the longest completion with the mean that goes with it."""
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
    if name not in KNOWN:
        raise InputError(
            f"rlt plan must know the shape of '{name}', but it is no folder with a config.json, not in the "
            f"hub's cache, and not among {', '.join(KNOWN)}. Download its config.json into a folder, and "
            "name the folder."
        )
    folder = scratch / name.replace("/", "--")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(KNOWN[name]))
    return folder


def read_model(
    module: PolicyModule,
    processes: Processes,
    scratch: Path,
    name: str,
    dtype: str,
    lora: LoRA | None,
    step: Step,
) -> LanguageModel:
    """Describe one model as the run holds it, from its configuration."""
    folder = str(find_folder(name, scratch))
    model = meta_model(folder, dtype, module.attn_implementation, module.trust_remote_code)
    weight_bytes = next(model.parameters()).element_size()
    in_4_bits: list[int] = []
    if lora is not None:
        if lora.base == "4bit":
            in_4_bits = [layer.weight.numel() for _, layer in quantisable_layers(model)]
        add_adapter(model, lora, module.seed)
    if processes.cast_models:
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
            autocast=processes.mixed and not processes.cast_models,
        ),
        weight_bytes=product_bytes if processes.use_deepspeed else weight_bytes,
        product_bytes=product_bytes,
        loaded_bytes=weight_bytes,
        states_8bit=states_8bit_bytes(trained) if module.optimizer_config.states == "8bit" else None,
        nf4_numel=sum(in_4_bits),
        nf4_bytes=sum(map(nf4_bytes, in_4_bits)),
        # Autocast casts fp32 weights once more.
        nf4_whole=max(in_4_bits, default=0) * (6 if processes.mixed and weight_bytes == 4 else weight_bytes),
        kv_bytes=2 if processes.mixed and uses_slots else product_bytes,
        uses_slots=uses_slots,
    )


# The verdict and the page


def find_peak(phases: Sequence[Phase]) -> Phase:
    """Return the phase that needs most memory."""
    return max(phases, key=lambda phase: phase.total)


def find_problems(setup: Setup, phases: Sequence[Phase]) -> list[str]:
    """Return a line for each thing that does not fit, with what to set."""
    problems, peak, memory = [], find_peak(phases), setup.device.memory
    if peak.total > memory:
        parts = sorted(peak.device.items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
        advice = dict.fromkeys(REMEDIES[name] for name, _ in parts if name in REMEDIES)
        steps = max(phase.total for phase in phases if phase.name != "start")
        only = ", while models are loaded, although the steps would fit" if steps <= memory else ""
        problems.append(
            f"does not fit: {peak.total / GIB:.1f} GiB of {memory / GIB:.1f} in {peak.name}{only}. "
            f"Largest: {largest}. Try {'; '.join(advice) or 'more or larger devices'}."
        )
    worker, step = setup.worker, setup.step
    longest = step.prompt_length + step.completion_length
    if worker and not setup.device.is_cpu and count_kv_tokens(setup, worker) < longest:
        problems.append(
            f"does not fit: a vLLM worker has no room for {longest} tokens beside its weights. Try a "
            f"tensor_parallel_size above {worker.tensor_parallel_size}, or a lower "
            "--rollouts.sampling.max_completion_length."
        )
    return problems


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
LAYOUTS = {
    "whole": "all weights on one",
    "ddp": "all weights on each (DDP)",
    "fsdp2": "everything in shards (FSDP2)",
    "zero1": "optimizer states in shards (ZeRO-1)",
    "zero2": "optimizer states and gradients in shards (ZeRO-2)",
    "zero3": "everything in shards (ZeRO-3)",
}


def format_plan(setup: Setup, phases: Sequence[Phase], problems: Sequence[str]) -> str:
    """Return the plan as text: memory by part and phase, assumptions, and the verdict."""
    device, peak = setup.device, find_peak(phases)
    notes, worker = list(setup.notes), setup.worker
    if worker:
        weights = setup.policy.shape.weights * worker.weight_bytes / worker.tensor_parallel_size / GIB
        where = "on the trainer's GPUs" if worker.colocated else "apart from the trainer"
        where = where if setup.loads_policy else "which load the model themselves; the table shows one GPU"
        notes.append(f"vLLM workers hold {weights:.2f} GiB of weights and keys and values, {where}")
    head = f"rlt {setup.verb} on {setup.num_processes} x {device.name}, {device.memory / GIB:.1f} GiB each"
    if worker and not worker.colocated and not device.is_cpu:
        head += f", and {worker.num_gpus} for vLLM"
    if device.reserved:
        notes.append(
            f"runtime {device.reserved / GIB:.2f} GiB, {'measured here' if device.is_cpu else 'stated'}"
        )
    verdict = f"fits: {peak.total / GIB:.1f} GiB of {device.memory / GIB:.1f}, in {peak.name}."
    sections = [
        [f"{head}: {LAYOUTS[setup.sharding]}"],
        format_memory(setup, phases),
        ["Assumed:", *(wrap(note, "  ") for note in notes)],
        [wrap(problem, "") for problem in problems or [verdict]],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def wrap(text: str, indent: str) -> str:
    """Return a text in lines of at most 96 columns; paths are not broken."""
    further = f"{indent}  "
    return textwrap.fill(
        text,
        96,
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def format_memory(setup: Setup, phases: Sequence[Phase]) -> list[str]:
    """Return a table of parts by phases, with the peak marked, and the host's memory at the end."""
    host = {name: size for phase in phases for name, size in phase.host.items() if size}
    columns = [(phase.name, phase.device) for phase in phases] + [("host", host)] * bool(host)
    names = dict.fromkeys(name for _, parts in columns for name, size in parts.items() if size)
    # The parts in the order in which the phases have them.
    order = list(dict.fromkeys(name for _, parts in columns for name in parts))
    rows = [(name, [parts.get(name, 0.0) for _, parts in columns]) for name in order if name in names]
    rows.append(("total (* the peak)", [sum(parts.values()) for _, parts in columns]))
    first = max(len(name) for name, _ in rows) + 1

    def line(title: str, cells: Sequence[str]) -> str:
        widths = [max(9, len(name) + 2) for name, _ in columns]
        return title.ljust(first) + "".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))

    cells = [[f"{size / GIB:.2f}" if size >= 0.005 * GIB else "." for size in sizes] for _, sizes in rows]
    peak = list(phases).index(find_peak(phases))
    cells[-1][peak] = f"*{cells[-1][peak]}"
    lines = [line("GiB of one process", [name for name, _ in columns])]
    lines += [line(name, texts) for (name, _), texts in zip(rows, cells, strict=True)]
    if host:
        machine = setup.processes_per_machine * sum(host.values()) / GIB
        lines.append(f"in the host's memory {machine:.0f} GiB a machine, besides libraries; not checked")
    return lines
