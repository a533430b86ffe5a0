"""`rlt plan`: predict the memory of `rlt fit` or `rlt predict`, phase by phase, before anything is loaded.

    settings ─▶ Plan, with a Model for each that the run holds ─ list_phases ─▶ parts of each phase ─▶ table

    phase      what it adds to the parts that last (weights, optimizer states, gradients, a worker)
    generate   a cache of keys and values, or the worker awake
    score      a forward of each model that only reads, one at a time
    train      forward and backward: in the head or in the last block
    step       what the optimizer needs while it steps

A phase has moments, of which the largest counts; the largest phase is the predicted peak. The formulas follow
what this package, PyTorch's FSDP2 and DeepSpeed allocate; sizes are bytes. Weights are
counted on the meta device; what a transformer block allocates is a formula of its widths. Nothing is
downloaded: a model's configuration comes from this machine, and rows that are not on it are assumed to be as
long as the settings allow.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from rlt_lightning.callbacks import Checkpoint, RolloutCallback
from rlt_lightning.datamodules import StratosDataModule
from rlt_lightning.datamodules.items import FIXED_PIECES
from rlt_lightning.engines import HFEngine, VLLMEngine
from rlt_lightning.models.embedded import DEFAULT_MODEL, MINIATURES, WHEEL_SHA256, cache_folder
from rlt_lightning.models.kernels import Heads, find_blocks
from rlt_lightning.models.load import meta_model, model_config
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.models.quantised import nf4_bytes, quantisable_layers, require_settings
from rlt_lightning.modules.checks import require_precision, require_whole_models
from rlt_lightning.modules.on_policy import is_on_policy
from rlt_lightning.modules.optimizer import states_8bit_bytes
from rlt_lightning.modules.phases import resident_bytes
from rlt_lightning.modules.policy import PolicyModule
from rlt_lightning.numerics.head import block_size
from rlt_lightning.strategies import NAMED
from rlt_lightning.strategies.fsdp2 import measure_free_bytes
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.types import InputError

GIB = 2**30
RUNTIME = 2 * GIB  # stated: CUDA context, libraries' workspaces, NCCL, and what fragmentation wastes
ASLEEP = 1.5 * GIB  # stated: a sleeping vLLM worker
H100_GIB = 79.6  # memory that the driver shows
SHAPES = files("rlt_lightning.models") / "shapes.yaml"  # of published models
# Tiles of logits, and of what is computed from them, that a head holds at a time: in a forward pass, in a
# backward pass, and in that of a divergence from a teacher.
HEAD_TILES, BACKWARD_TILES, PAIR_TILES = 4, 3, 6
DRAW_BYTES = 32  # per row and word while HFEngine draws a token: logits, weights, some in float64
# DeepSpeed's limits, in numbers of weights or gradients: gathered at a time and ahead by stage 3
# (stage3_max_live_parameters, stage3_prefetch_bucket_size), sent together by stage 1 with bfloat16; then
# Lightning's defaults of reduce_bucket_size and sub_group_size.
LIVE_NUMEL, SENT_NUMEL = 10**9 + 5 * 10**7, 5 * 10**8
REDUCE_BUCKET, SUB_GROUP = 200_000_000, 10**12
# Rates of the line on time (docs/costs.md). Measured on an H100: FLOP/s through weights, 231e12 at 0.5B,
# 322e12 at 1.5B, 467e12 at 7B; a token step of HFEngine. Stated: a vLLM worker's; the mean length of texts.
FLOP_S, HF_STEP_S = 300e12, 0.04
VLLM_STEP_S, VLLM_TOKENS_S, VLLM_WEIGHTS = 0.01, 10_000, 4.5e9  # above so many weights, in proportion slower
MEAN_FRAC = 1 / 3  # of the longest

# What each way of sharding divides among the processes.
DIVIDED = {
    "whole": (),
    "ddp": (),
    "zero1": ("states",),
    "zero2": ("states", "gradients"),
    "zero3": ("states", "gradients", "weights"),
    "fsdp2": ("states", "gradients", "weights"),
}

Sizes = dict[str, float]  # part -> bytes on one device


@dataclass(frozen=True)
class PlanOptions:
    """What a plan needs to know beyond the settings of the run.

    Args:
        device_gib: Memory of one device, GiB; None: an H100's or, where trainer.accelerator is cpu, this
            machine's, shared by its processes.
        prompt_length: Longest prompt, tokens; None: that of the rows, else data.max_prompt_length.
    """

    device_gib: PositiveFloat | None = None
    prompt_length: PositiveInt | None = None


class Model:
    """A model as a run holds it: numbers of weights, and bytes.

    Args:
        settings: The module, for how it computes.
        name: The model.
        dtype: Type of its weights.
        lora: The adapter that is trained, if there is one.
        mixed: Whether matrix products are in bfloat16 of fp32 weights.
        sharding: How weights are divided.
    """

    def __init__(
        self, settings: PolicyModule, name: str, dtype: str, lora: LoRA | None, mixed: bool, sharding: str
    ) -> None:
        trusts = settings.trust_remote_code
        config = read_config(name, trusts)
        model = meta_model(name, dtype, settings.attn_implementation, trusts, config)
        loaded_bytes = next(model.parameters()).element_size()
        in_4_bits: list[int] = []
        if lora is not None:
            if lora.base == "4bit":
                in_4_bits = [layer.weight.numel() for _, layer in quantisable_layers(model)]
            add_adapter(model, lora, settings.seed)
        # Sharding strategies cast whole models to bfloat16, rather than each product's operands.
        cast = mixed and sharding not in ("whole", "ddp")
        if cast:
            model = model.to(torch.bfloat16)
        autocast = mixed and not cast
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        blocks = find_blocks(model)
        sizes = [p.numel() for p in model.parameters()]
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        in_blocks = [sum(p.numel() for p in block.parameters()) for block in blocks]
        self.name = name
        self.weights, self.trained = sum(sizes), sum(trained)  # tied weights count once
        self.frozen = self.weights - (self.trained if lora is not None else 0)  # of a copy without adapter
        self.num_blocks, self.block = len(blocks), max(in_blocks)
        self.outside = self.weights - sum(in_blocks)  # embedding, last norm, head
        self.largest = max(sizes)  # in one tensor
        self.gathered_bytes = next(model.parameters()).element_size()  # per number, in matrix products
        self.weight_bytes = self.gathered_bytes if sharding.startswith("zero") else loaded_bytes
        self.stored_bytes = float(self.weights * self.weight_bytes)
        self.states_8bit = states_8bit_bytes(trained) if settings.optimizer_config.states == "8bit" else None
        self.whole_layer = self.cast_bytes = 0
        if in_4_bits:
            plain = self.weights - sum(in_4_bits) - self.trained
            self.stored_bytes = sum(map(nf4_bytes, in_4_bits)) + plain * self.weight_bytes + 4 * self.trained
            # While it computes; autocast casts fp32 weights once more.
            self.whole_layer = max(in_4_bits) * (6 if autocast and loaded_bytes == 4 else loaded_bytes)
        elif autocast and loaded_bytes == 4:
            # Autocast copies matrices for a step, and frozen ones under an adapter for a backward.
            one_block = lora is not None and settings.gradient_checkpointing
            self.cast_bytes = 2 * (self.block if one_block else sum(in_blocks))
        self.num_words = head.out_features
        self.head_grad = head.weight.numel() * self.gathered_bytes if head.weight.requires_grad else 0
        layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
        heads = [Heads.of(layer, model.dtype) for layer in layers]
        numbers = sum(2 * layer.num_keys * layer.size for layer in heads)
        self.kv_bytes = numbers * (2 if mixed else self.gathered_bytes)  # per token
        self.hidden = config.hidden_size
        self.residual_bytes = self.hidden * self.gathered_bytes
        widest = max(heads, key=lambda layer: layer[:3])
        self.count_activations(config, widest, blocks[0], 2 if autocast else self.gathered_bytes)

    def count_activations(self, config: Any, heads: Heads, block: Any, size: int) -> None:
        """Set the bytes of a token that a block keeps, adds in its backward, and needs in a forward.

        A block of a Llama computes, in this order: a norm, queries, keys and values, attention, its
        projection; a norm, gate and up, silu, their product, its projection. Autograd keeps a norm's input,
        normalised and weighted values; queries, keys, values and the attention's output; and four of the
        MLP's width. A backward and a forward are largest in the MLP.

        Args:
            config: The model's configuration.
            heads: Those of its widest layer.
            block: One of its blocks.
            size: Bytes of a number that matrix products return.
        """
        queries, keys = heads.num_queries * heads.size, heads.num_keys * heads.size
        # Models such as GPT-2 name none: four times as wide as hidden states.
        mlp = getattr(config, "intermediate_size", None) or 4 * self.hidden
        if experts := getattr(config, "num_experts_per_tok", None):
            mlp = experts * (getattr(config, "moe_intermediate_size", None) or mlp)
        casts = size < self.gathered_bytes
        # A norm computes in fp32; autocast casts its results once more.
        norms = 2 * (13 if casts else 4 + 2 * size) * self.hidden
        if any(name.endswith("q_norm") for name, _ in block.named_modules()):
            norms += (4 + size) * (queries + keys)
        self.kept = norms + size * (2 * (queries + keys) + 4 * mlp)
        self.backward = size * (2 * mlp - self.hidden)
        self.forward = size * (3 * mlp + 4 * self.hidden + keys) + (8 * self.hidden if casts else 0)


class Plan:
    """The settings of a run that decide its memory, and the arithmetic.

    Args:
        trainer: The settings of the trainer, parsed and not instantiated.
        module: The module, which has loaded nothing.
        data: The datamodule, which has read nothing.
        rollouts: The callback that would bring completions.
        options: The options of the plan.

    Raises:
        InputError: If a setting is wrong, or the shape of a model is not known here.
    """

    def __init__(
        self,
        trainer: Any,
        module: PolicyModule,
        data: StratosDataModule,
        rollouts: RolloutCallback,
        options: PlanOptions,
    ) -> None:
        given = data.brings_completions
        # Settings that only `rlt predict` reads.
        predicts = given or data.student_context is not None
        self.trains = not predicts and rollouts.num_traces == 1 and rollouts.max_resamples == 0
        precision = str(trainer.precision or "32-true")
        precision = {"bf16": "bf16-mixed", "32": "32-true"}.get(precision, precision)
        require_precision(precision)
        self.on_cpu = trainer.accelerator == "cpu"
        self.gpus = list_devices(trainer.devices, self.on_cpu)
        self.num_processes = len(self.gpus) * int(trainer.num_nodes)
        self.sharding, self.strategy = read_sharding(trainer.strategy, self.num_processes)
        self.is_deepspeed = self.sharding.startswith("zero")
        self.shards = self.count_shards("weights")
        whole = not DIVIDED[self.sharding]
        require_settings(module.lora, module.optimizer_config, whole, installed=False)
        on_host = measure_free_bytes(torch.device("cpu"), len(self.gpus))
        device = on_host if self.on_cpu else GIB * H100_GIB
        self.memory = GIB * options.device_gib if options.device_gib else device  # that one process may use
        # Measured on a CPU, so before what follows takes more memory.
        self.runtime = resident_bytes() or GIB / 2 if self.on_cpu else RUNTIME
        self.offload_frozen = False
        self.hf_sequences = 0  # completions that the trainer's processes sample at once
        self.num_workers = 0  # of vLLM
        self.worker_bytes = self.sleeping_bytes = 0.0  # of a vLLM worker on one of the trainer's GPUs
        samples = module.is_on_policy and not given
        if is_on_policy(module):
            require_whole_models(module.offload_frozen, self.shards > 1)
            self.offload_frozen = module.offload_frozen and not self.on_cpu
            rollouts.dispatcher.choose_engine(
                [] if self.on_cpu else self.gpus, module.pretrained, pushes=True, installed=True
            )
            self.group_size = module.group_size if self.trains else rollouts.num_traces
        if samples:
            self.read_engine(rollouts.engine)
        else:
            self.group_size = 1
        # In a prediction each process gets whole batches.
        prompts = -(-data.prompts_per_step // self.num_processes) if self.trains else data.val_batch_size
        self.num_sequences = prompts * self.group_size
        tile = block_size(module.head.logits_mib, torch.empty(0, device="cpu" if self.on_cpu else "meta"))
        self.logits_bytes = tile * 2**20  # one tile of logits
        self.checkpointing = module.gradient_checkpointing
        limit = rollouts.sampling.max_completion_length if samples else None
        mean = self.read_lengths(data, options, limit)
        longest = self.prompt_length + self.completion_length
        shared = prompts if module.layout in ("auto", "shared_prefix") else self.num_sequences
        tokens = shared * self.prompt_length + self.num_sequences * self.completion_length
        room = max(longest, module.micro_batch_tokens)
        self.row_tokens = longest if module.layout == "single" else min(room, tokens)  # the largest row
        self.step_tokens = self.num_sequences * mean if mean else tokens
        self.mean_tokens = self.step_tokens if mean else MEAN_FRAC * tokens
        self.num_steps = self.count_steps(trainer, data)
        callbacks = " ".join(str(callback.class_path) for callback in trainer.callbacks or [])
        self.moves_reference = "ReferenceSync" in callbacks  # which writes it
        self.read_models(module, precision == "bf16-mixed")

    def read_engine(self, engine: Any) -> None:
        """Read what sampling takes of the trainer's devices."""
        if isinstance(engine, HFEngine):
            self.hf_sequences = engine.max_sequences
        if isinstance(engine, VLLMEngine):
            self.num_workers = len(engine.fleet.workers)
        launch = engine.fleet.launch if isinstance(engine, VLLMEngine) else None
        if launch is None or self.on_cpu:
            return
        if not {gpu for ids in launch.gpus or [[0]] for gpu in ids}.isdisjoint(self.gpus):
            words = [word for argument in launch.arguments for word in argument.split("=")]
            name = "--gpu-memory-utilization"
            frac = float(words[words.index(name) + 1]) if name in words else 0.9
            self.worker_bytes = frac * self.memory
            self.sleeping_bytes = ASLEEP if engine.takes_turns else self.worker_bytes

    def read_lengths(self, data: StratosDataModule, options: PlanOptions, limit: int | None) -> int:
        """Read the longest sequences of rows and tokenizers that are here, else the settings' limits.

        Args:
            data: The datamodule.
            options: Their prompt length overrides both.
            limit: Of completions that are sampled; None where rows bring them.

        Returns:
            The mean tokens of a row's example; 0 if not known.
        """
        missing, mean, self.scored_prompt = find_missing(data), 0, 0
        self.num_rows: int | None = None  # if the rows are read
        if options.prompt_length is None and missing is None:
            source, data = "of the rows", copy.copy(data)
            data.output_dir, data.val_sources, data.val_rows = None, [], 0  # held-out rows may be elsewhere
            data.tokenizer_name = str(find_folder(str(data.tokenizer_name)))
            if data.reader_name is not None:
                data.reader_name = str(find_folder(data.reader_name))
            data.setup("fit" if self.trains else "predict")
            items = data.all_items
            self.num_rows = len(items)
            if items.is_examples:
                prompts, tokens = items.sum_columns("num_prompt"), items.sum_columns("token_ids")
                mean, prompt = max(1, round(tokens.mean())), int(prompts.max())
                completion = int((tokens - prompts).max())
            else:
                prompt = int(items.sum_columns("teacher_prefix", "think_prefix").max())
                completion = limit or int(items.sum_columns("completion_ids").max())
            if data.teacher_reads:
                self.scored_prompt = int(items.sum_columns("teacher_view").max())
            elif data.samples == "thoughts":
                self.scored_prompt = int(items.sum_columns(*FIXED_PIECES["student"]).max())
        else:
            source = "given" if options.prompt_length else f"limits, for {missing} is not on this machine"
            prompt = options.prompt_length or (0 if limit is None else data.max_prompt_length)
            completion = limit or max(1, data.max_length - prompt)
            if data.teacher_reads or data.samples == "thoughts":
                self.scored_prompt = prompt
        self.prompt_length, self.completion_length = prompt, completion
        self.note = f"prompts of up to {prompt} tokens ({source}), completions of {self.completion_length}"
        if self.scored_prompt:
            self.note += f"; models that score read prompts, with solutions, of up to {self.scored_prompt}"
        return mean

    def read_models(self, module: PolicyModule, mixed: bool) -> None:
        """Read the models that the run holds."""

        def read(name: str, dtype: str, lora: LoRA | None = None) -> Model:
            return Model(module, name, dtype, lora, mixed, self.sharding)

        self.policy = policy = read(module.pretrained, module.dtype_name, module.lora)
        # An adapter's matrices are in fp32, whatever type the model's weights have.
        trained_bytes = policy.weight_bytes if module.lora is None else 4
        self.master_bytes = 4 if self.is_deepspeed else trained_bytes  # per number that the optimizer steps
        self.grad_bytes = 4 if self.is_deepspeed and mixed else trained_bytes
        self.frozen: dict[str, list[Model]] = {}  # models whose weights are not the policy's, by part
        self.scorers: list[tuple[Model, int]] = []  # models that read without gradient, tokens of a row
        self.pair_hidden = 0  # hidden size of a teacher whose logits the loss compares with the policy's
        reference = [policy] if module.lora is None or self.moves_reference else []
        longer = max(self.row_tokens, self.scored_prompt + self.completion_length)
        if not is_on_policy(module):
            return
        others = {name: read(name, module.frozen_dtype) for name in module.frozen_names}
        copies = reference if module.needs_reference(self.trains) else []
        self.frozen = {"reference weights": copies, f"{module.frozen_role} weights": [*others.values()]}
        for name in module.list_scorers():
            model = others.get(name, policy)
            # A policy beside a student reads no solution behind its completions.
            self.scorers.append((model, self.row_tokens if others and model is policy else longer))
        if module.head_loss is not None:
            self.pair_hidden = self.scorers[-1][0].hidden
        if module.answer_weight:
            self.row_tokens = longer

    def list_notes(self) -> list[str]:
        """Return what the plan assumes."""
        models = {"policy": [self.policy]} | self.frozen
        notes = [
            f"{part.removesuffix(' weights')} {model.name}, {model.weights / 1e9:.3g} billion weights"
            for part, group in models.items()
            for model in group
        ]
        return [*notes, self.note, f"rows of up to {self.row_tokens} tokens"]

    # Plain arithmetic

    def count_shards(self, what: str) -> int:
        """Return into how many shards the strategy divides `weights`, `gradients` or `states`."""
        return self.num_processes if what in DIVIDED[self.sharding] else 1

    def offloads(self, what: str) -> bool:
        """Return whether DeepSpeed keeps its `optimizer` or `parameters` in main memory, not on a GPU."""
        return bool(self.strategy.get(f"offload_{what}")) and not self.on_cpu

    def count_frozen_bytes(self, part: str, only: Model | None = None) -> float:
        """Return the bytes of a part's frozen models, whole; of all or of one."""
        chosen = [model for model in self.frozen.get(part, []) if only in (None, model)]
        return float(sum(model.frozen * model.weight_bytes for model in chosen))

    def count_optimizer_bytes(self) -> float:
        """Return AdamW's two moments and, if weights are in half precision, the fp32 weights it steps."""
        policy = self.policy
        if policy.states_8bit is not None:
            return policy.states_8bit
        has_copy = policy.weight_bytes != self.master_bytes or self.sharding != "zero3"
        numbers = policy.trained * (2 + (self.is_deepspeed and has_copy))
        return numbers * self.master_bytes / self.count_shards("states")

    def count_gradient_bytes(self) -> float:
        """Return the gradients of all trained weights, whole or in shards.

        FSDP2 keeps them whole if it is told to add them up once an update; by itself it does so only where
        they fit.
        """
        if self.offloads("optimizer") and self.sharding != "zero1":
            return 0.0
        once = self.sharding == "fsdp2" and self.strategy.get("reduce_every_micro_batch") is False
        return self.policy.trained * self.grad_bytes / (1 if once else self.count_shards("gradients"))

    def count_bucket_bytes(self) -> float:
        """Return the buffers in which gradients travel between processes.

        DDP has a buffer for each gradient. DeepSpeed has `reduce_bucket_size` numbers, twice in stages 1 and
        2, since one buffer is filled while the other travels; stage 1 of half-precision weights sends 5e8 at
        a time. A CPU takes only the memory that is written to.
        """
        trained = self.policy.trained
        if not self.is_deepspeed:
            return trained * self.grad_bytes if self.sharding == "ddp" else 0.0
        numbers = int(self.strategy.get("reduce_bucket_size", REDUCE_BUCKET))
        if self.sharding == "zero1" and self.policy.weight_bytes < self.grad_bytes:
            numbers = min(trained, SENT_NUMEL)
        elif self.on_cpu:
            numbers = min(trained, numbers)
        elif self.sharding != "zero3":
            numbers *= 2
        return numbers * self.grad_bytes

    def count_workspace_bytes(self) -> float:
        """Return what an optimizer step allocates while it lasts.

        On a GPU AdamW computes the roots of all second moments at a time. DeepSpeed has one tensor, or in
        stage 3 one per `sub_group_size`, and also copies the gradients into a flat tensor. States in 8 bits
        are stepped in place, those in main memory there; on a CPU AdamW goes tensor by tensor.
        """
        stepped = self.policy.trained / self.count_shards("states")
        if self.offloads("optimizer") or self.policy.states_8bit is not None:
            return 0.0
        if self.is_deepspeed:
            group = int(self.strategy.get("sub_group_size", SUB_GROUP))
            return 2 * self.master_bytes * (min(stepped, group) if self.sharding == "zero3" else stepped)
        return 0.0 if self.on_cpu else stepped * self.master_bytes

    def count_kv_bytes(self) -> float:
        """Return keys and values while HFEngine samples, and what it needs to draw a token.

        With the engine's cache a prompt's keys and values exist once, and those of a layer are copied as
        their room doubles.
        """
        policy, rows = self.policy, min(self.hf_sequences, self.num_sequences)
        prompts = min(rows, -(-self.num_sequences // self.group_size))
        tokens = rows * self.completion_length * (1 + 0.5 / policy.num_blocks) + prompts * self.prompt_length
        return tokens * policy.kv_bytes + rows * DRAW_BYTES * policy.num_words

    def count_gathered_bytes(self, model: Model, backward: bool) -> float:
        """Return the whole weights that sharding gathers for a pass and, in a backward, whole gradients.

        Without shards these are only the weights of the layer in 4 bits that is computing.

        FSDP2 holds three things in a pass: the weights outside the blocks, one block, and the next block with
        the buffer that it arrives in. A backward adds gradients: those of the weights outside the blocks
        until its end, and those of one block twice (as they are computed, and as they are sent).

        DeepSpeed ZeRO-3 keeps up to 1e9 weights and fetches ahead. A backward adds the gradients that are not
        in the bucket yet; a full bucket is copied to be sent.
        """
        size = model.gathered_bytes
        if self.shards == 1:
            return float(model.whole_layer)
        if self.sharding == "fsdp2":
            outside, block = model.outside * size, model.block * size
            gradients = (outside + 2 * model.block * self.grad_bytes) * model.trained / model.weights
            return outside + max(outside, 3 * block) + backward * gradients
        bucket = int(self.strategy.get("reduce_bucket_size", REDUCE_BUCKET))
        sent = bucket * self.grad_bytes if model.trained > bucket else 0
        return min(model.weights, LIVE_NUMEL) * size + backward * (model.largest * size + sent)

    def list_lasting_parts(self) -> Sizes:
        """Return what lies on a device from one step to the next."""
        on_host, parts = self.offloads("parameters"), {"runtime": float(self.runtime)}
        parts["policy weights"] = 0.0 if on_host else self.policy.stored_bytes / self.shards
        for part in self.frozen:
            away = on_host or self.offload_frozen
            parts[part] = 0.0 if away else self.count_frozen_bytes(part) / self.shards
        if self.trains:
            parts["optimizer states"] = 0.0 if self.offloads("optimizer") else self.count_optimizer_bytes()
            parts["gradient buckets"] = self.count_bucket_bytes()
            parts["gradients"] = self.count_gradient_bytes()
        return parts | {"vLLM worker": self.sleeping_bytes}

    def list_generate_moments(self) -> list[Sizes]:
        """Return what sampling needs: in the trainer's processes, or of a GPU that a worker shares."""
        if not self.hf_sequences:
            return [{"vLLM worker": self.worker_bytes}] if self.worker_bytes else []
        gathered = self.count_gathered_bytes(self.policy, backward=False)
        return [{"kv cache": self.count_kv_bytes(), "gathered": gathered}]

    def count_scored_tokens(self, row_tokens: int) -> int:
        """Return the tokens of a row that the head scores: all but one prompt."""
        return row_tokens - self.prompt_length if row_tokens > self.prompt_length else row_tokens

    def list_score_parts(self, model: Model, row_tokens: int) -> Sizes:
        """Return what a forward without gradient needs; a model that was offloaded is back for it."""
        away = self.frozen if self.offload_frozen else {}
        returned = {part: self.count_frozen_bytes(part, model) for part in away}
        states = self.count_scored_tokens(row_tokens) * model.hidden * 4
        return returned | {
            "activations": row_tokens * model.forward,
            "head": states + HEAD_TILES * self.logits_bytes,
            "gathered": self.count_gathered_bytes(model, backward=False),
        }

    def list_train_moments(self) -> list[Sizes]:
        """Return what forward and backward need in the head and in the last block, of two rows of a step.

        The first row is the largest, and PyTorch makes the gradients in its backward. For the second, which
        may be smaller, they exist already.
        """
        policy, grads = self.policy, self.count_gradient_bytes()
        kept = policy.num_blocks * (policy.residual_bytes if self.checkpointing else policy.kept)
        in_block = kept + policy.backward + (policy.kept if self.checkpointing else 0)
        in_head = (PAIR_TILES if self.pair_hidden else BACKWARD_TILES) * self.logits_bytes + policy.head_grad
        passing = {
            "half-precision copies": float(policy.cast_bytes),
            "gathered": self.count_gathered_bytes(policy, backward=True),
        }
        second = max(0.0, min(1.0, self.step_tokens / self.row_tokens - 1))
        moments: list[Sizes] = []
        for part, made in ((1.0, grads if self.sharding == "zero3" else 0.0), (second, grads)):
            tokens, states = part * self.row_tokens, part * self.count_scored_tokens(self.row_tokens) * 4
            head = states * (2 * policy.hidden + self.pair_hidden) + in_head
            moments.append({"gradients": made, "activations": tokens * kept, "head": head} | passing)
            made, head = max(made, min(grads, policy.head_grad)), states * policy.hidden
            moments.append({"gradients": made, "activations": tokens * in_block, "head": head} | passing)
        return moments

    def list_phases(self) -> dict[str, Sizes]:
        """Return the parts of every phase of a step, when moments and gradients exist."""
        lasting = self.list_lasting_parts()
        phases = {
            "generate": self.list_generate_moments(),
            "score": [self.list_score_parts(*scorer) for scorer in self.scorers],
            "train": self.list_train_moments() if self.trains else [],
            "step": [{"step workspace": self.count_workspace_bytes()}] if self.trains else [],
        }
        return {
            name: lasting | max(moments, key=lambda parts: sum(parts.values()))
            for name, moments in phases.items()
            if moments
        }

    def count_steps(self, trainer: Any, data: StratosDataModule) -> int | None:
        """Return the steps of a training or the batches of a prediction; None if unknown rows decide."""
        rows = data.reader.max_rows if self.num_rows is None else self.num_rows
        if not self.trains:
            return rows and -(-rows // (data.val_batch_size * self.num_processes))
        limits = [trainer.max_steps] if trainer.max_steps not in (None, -1) else []
        if rows and trainer.max_epochs not in (None, -1):
            limits.append(trainer.max_epochs * (rows // data.prompts_per_step))
        return min(limits, default=None)

    def format_time(self) -> str:
        """Return the lines on tokens and time, an estimate: docs/costs.md has the formula."""
        step_s, rate = HF_STEP_S, self.hf_sequences * self.num_processes / HF_STEP_S
        if self.num_workers:
            speed = min(1.0, VLLM_WEIGHTS / self.policy.weights)
            step_s, rate = VLLM_STEP_S, self.num_workers * VLLM_TOKENS_S * speed
        sampled = seconds = 0.0
        if rate:
            sampled = MEAN_FRAC * self.num_sequences * self.num_processes * self.completion_length
            seconds = sampled / rate + self.completion_length * step_s
        # A backward is two passes, through frozen weights under an adapter one.
        passes = self.trains * self.policy.weights * (3 if self.policy.trained == self.policy.weights else 2)
        passes += sum(model.weights for model, _ in self.scorers)
        seconds += 2 * self.mean_tokens * passes / FLOP_S
        unit, total = "step" if self.trains else "batch", ""
        if self.num_steps:
            hours = self.num_steps * seconds / 3600
            total = f", {hours:,.{2 if hours < 1 else 1}f} hours for {self.num_steps:,}"
        read = self.mean_tokens * self.num_processes
        return (
            f"tokens of a {unit}: {sampled:,.0f} sampled, {read:,.0f} read (texts of a third of limits).\n"
            f"time: {seconds:,.1f} s a {unit}{total}, by stated rates of H100s (docs/costs.md)."
        )

    def format_disk(self, checkpoint: Checkpoint) -> str:
        """Return the line on what a training run writes: checkpoints, the model, a reference that moves."""
        policy = self.policy
        size = policy.trained * self.master_bytes
        size += 2 * size if policy.states_8bit is None else policy.states_8bit
        whole = policy.trained == policy.weights
        model = policy.frozen * (self.master_bytes if whole else policy.weight_bytes)
        model += 2 * self.count_frozen_bytes("reference weights") if self.moves_reference else 0
        text = f"disk: {size / GIB:,.1f} GiB a checkpoint, and {model / GIB:,.1f} for the model"
        if (number := checkpoint.save_top_k) == -1:
            return f"{text}; all checkpoints are kept."
        # The next one is whole before the oldest is deleted.
        number += bool(number)
        return f"{text}: with {number} checkpoints {(number * size + model) / GIB:,.1f} GiB."


def format_memory(phases: dict[str, Sizes]) -> list[str]:
    """Return a table of parts by phases, with the peak marked."""
    order = dict.fromkeys(name for parts in phases.values() for name in parts)
    rows = [["GiB of one process", *phases]]
    for name in order:
        sizes = [parts.get(name, 0.0) / GIB for parts in phases.values()]
        if any(sizes):
            rows.append([name, *(f"{size:.2f}" if size >= 0.005 else "." for size in sizes)])
    totals = [sum(parts.values()) / GIB for parts in phases.values()]
    marks = ["*" * (total == max(totals)) for total in totals]
    rows.append(["total (* the peak)", *(f"{t:.2f}{mark}" for t, mark in zip(totals, marks, strict=True))])
    first, *widths = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    return [
        f"{name:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]


def print_plan(run: Namespace, trainer: Namespace) -> int:
    """Print what a run would need; return the exit status: 1 if it does not fit.

    Args:
        run: Its module, data and callbacks, by the names of the settings.
        trainer: The settings of the trainer, parsed and not instantiated.
    """
    plan = Plan(trainer, run.model, run.data, run.rollouts, run.plan)
    phases = plan.list_phases()
    totals = {name: sum(parts.values()) for name, parts in phases.items()}
    name = max(totals, key=totals.__getitem__)
    verb, fits = "fit" if plan.trains else "predict", totals[name] <= plan.memory
    print(f"rlt {verb}, processes: {plan.num_processes}, strategy: {plan.sharding}", "", sep="\n")
    print(*format_memory(phases), "", "Assumed:", *(f"  {note}" for note in plan.list_notes()), "", sep="\n")
    verdict = f"{totals[name] / GIB:.1f} GiB of {plan.memory / GIB:.1f}, in {name}."
    print("fits:" if fits else "does not fit:", verdict)
    if plan.trains:
        print(plan.format_disk(run.checkpoint))
    if not plan.on_cpu:
        print(plan.format_time())
    return int(not fits)


# Settings and files


def list_devices(devices: Any, on_cpu: bool) -> list[int]:
    """Return the ids of the devices that train on one machine, from trainer.devices."""
    if isinstance(devices, list) or "," in str(devices):
        words = devices if isinstance(devices, list) else devices.split(",")
        return [int(word) for word in words if str(word).strip()]
    if str(devices) in ("auto", "-1"):
        devices = 1 if on_cpu else torch.cuda.device_count() or 1
    return list(range(int(devices)))


def read_sharding(strategy: Any, num_processes: int) -> tuple[str, dict[str, Any]]:
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
    known = {
        "auto": "ddp" if num_processes > 1 else "whole",
        "DDPStrategy": "ddp",
        "SingleDeviceStrategy": "whole",
        "FSDP2": "fsdp2",
        "DeepSpeed": f"zero{settings.get('stage', 3)}",
    }
    if name not in known:
        raise InputError(f"trainer.strategy must be one of auto, ddp, {', '.join(NAMED)}, but is {name}.")
    return known[name], settings


def find_missing(data: StratosDataModule) -> str | None:
    """Return a source or tokenizer that decides lengths and is not on this machine; None if all are."""
    for path in (source for source in data.sources if isinstance(source, str) and source not in EMBEDDED):
        # A configuration's name may follow a file or a folder.
        if not any(Path(name).expanduser().exists() for name in (path, path.partition(":")[0])):
            return path
    for name in filter(None, (data.tokenizer_name, data.reader_name)):
        folder = find_folder(name)
        if folder is None or not (folder / "tokenizer.json").is_file():
            return f"the tokenizer of {name}"
    return None


def find_folder(name: str) -> Path | None:
    """Return a folder on this machine that holds at least a model's config.json; the hub is not asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folders = [MINIATURES.get(name, Path(name).expanduser())]
    if name == DEFAULT_MODEL:
        folders = [cache_folder() / f"{DEFAULT_MODEL}-{WHEEL_SHA256[:12]}"]
    with suppress(HFValidationError):  # a path, no hub id
        cached = try_to_load_from_cache(name, "config.json")
        folders += [Path(cached).parent] if isinstance(cached, str) else []
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def read_config(name: str, trust_remote_code: bool) -> Any:
    """Return the configuration of a model, from a folder on this machine or from `SHAPES`.

    Raises:
        InputError: If neither has it.
    """
    from transformers import AutoConfig

    if folder := find_folder(name):
        return model_config(str(folder), trust_remote_code)
    if name in (known := read_known_configs()):
        return AutoConfig.for_model(**known[name])
    raise InputError(
        f"rlt plan must know the shape of '{name}', but it is no folder with a config.json, not in the "
        f"hub's cache, and not in {SHAPES}. Download its config.json into a folder, and name the folder."
    )


@cache
def read_known_configs() -> dict[str, dict[str, Any]]:
    """Return the fields of config.json that decide sizes, by the names of published models."""
    return {
        name: family["config"] | size["config"]
        for family in yaml.safe_load(SHAPES.read_text())
        for size in family["sizes"]
        for name in size["names"]
    }
