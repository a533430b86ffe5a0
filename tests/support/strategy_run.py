"""A process that runs the jobs of ranks.py: seeded RLT runs under any strategy, on given completions."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, ClassVar, Literal

import torch
from compared import gather_whole
from lightning.pytorch import Callback, Trainer
from parity import Parity
from ranks import STEPS, done_file
from safetensors.torch import save_file
from sampling import numbered
from trainers import bare_trainer

from rlt_lightning.callbacks import Checkpoint, DynamicSampling, ModelExporter, ReferenceSync, RolloutCallback
from rlt_lightning.checkpoints.export import Adapter
from rlt_lightning.datamodules import StudentLikelihoodData, StudentOPDData, TeacherRLData
from rlt_lightning.engines import EngineError, HFEngine, Placement, SampleRequest, Sampling
from rlt_lightning.models.lora import LoRA
from rlt_lightning.models.weights import stored_once
from rlt_lightning.modules import OPDModule, RLTModule
from rlt_lightning.modules.on_policy import OnPolicyModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.modules.passes import PassRunner
from rlt_lightning.numerics.advantages import LeaveOneOutAdvantages
from rlt_lightning.numerics.losses import DrGRPOLoss
from rlt_lightning.numerics.packing import MicroBatch, SequenceLengths, micro_batches
from rlt_lightning.rewards import LogProbReward, RLTReward
from rlt_lightning.strategies.fsdp2 import FSDP2
from rlt_lightning.strategies.zero import DeepSpeed
from rlt_lightning.types import Completion

PRETENDED = "pretended_gpu.collectives"  # loaded where there are pretended GPUs
STRATEGIES: dict[str, Any] = {
    "single": lambda: dict(strategy="auto", devices=1),
    "ddp": lambda: dict(strategy="ddp", devices=2),
    "fsdp2": lambda: dict(strategy=FSDP2(), devices=2),
    "zero3": lambda: dict(strategy=DeepSpeed(stage=3), devices=2),
    "zero2": lambda: dict(strategy=DeepSpeed(stage=2), devices=2),
    "zero1": lambda: dict(strategy=DeepSpeed(stage=1), devices=2),
    "zero3_offload": lambda: dict(
        strategy=DeepSpeed(stage=3, offload_optimizer=True, offload_parameters=True), devices=2
    ),
}


class Given(HFEngine):
    """Completions of very different lengths, made of the prompt's seed: the same on any number of ranks."""

    reports_log_probs = False

    def __init__(self, uneven: bool) -> None:
        super().__init__()
        self.uneven = uneven

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        self.tokenizer = tokenizer

    def health(self) -> None: ...

    def update_weights(self, named_tensors: Any, policy_version: int) -> None:
        self.policy_version = policy_version

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        groups = []
        end = self.tokenizer.encode(stop, add_special_tokens=False)
        per_rank = self.placement is not Placement.SERVER and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if per_rank else 0
        for position, request in enumerate(requests, rank * len(requests)):
            seed, num_completions = request.seed, request.num_completions
            random = Random(seed)
            longest = random.choice([6, 60])
            lengths = [random.randint(3, longest) for _ in range(num_completions)]
            if self.uneven:
                lengths = [
                    random.randint(6, 9) * (1 if position == 0 else 10) for _ in range(num_completions)
                ]
            rows = [[random.randrange(100, 2000) for _ in range(length)] for length in lengths]
            reasons = ["length"] * num_completions
            if self.uneven:  # closed ones get no penalty: far apart, rewards do not magnify rounding
                rows = [row + end * (i % 2) for i, row in enumerate(rows)]
                reasons = ["length", "stop"] * (num_completions // 2)
            groups.append(
                [Completion(row, None, reason, seed) for row, reason in zip(rows, reasons, strict=True)]
            )
        yield from numbered(groups)


class Early(Given):
    """Outside the process: gives the last completion of a step only after others were scored."""

    placement = Placement.SERVER
    unverified = False
    waits = True  # for the scores of others

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None: ...

    def gather_weights(self, named_tensors: Any) -> None: ...

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        *others, last = super().sample(requests, sampling, stop)
        Counting.scored.clear()
        yield from others
        if self.waits and not Counting.scored.wait(60):
            raise EngineError("Nothing was scored while the last completion was missing.")
        yield last


class Counted(OnPolicyModule):
    """Keeps how many micro-batches its share makes, before ranks agree on how many they all run."""

    counts: ClassVar[list[int]] = []

    def build_runner(self) -> PassRunner:
        runner = super().build_runner()
        right = runner.plan

        def plan(lengths: list[SequenceLengths], all_ranks: bool) -> list[tuple[MicroBatch, float]]:
            if torch.is_grad_enabled():  # of the policy update
                self.counts.append(len(micro_batches(lengths, self.micro_batch_tokens, self.chosen_layout)))
            return right(lengths, all_ranks)

        runner.plan = plan  # type: ignore[method-assign]
        return runner


class Counting(Counted, RLTModule):
    """RLT that tells when something was scored."""

    scored: ClassVar[Event] = Event()

    def build_runner(self) -> PassRunner:
        runner = super().build_runner()
        right = runner.run

        def run(*arguments: Any, **options: Any) -> None:
            right(*arguments, **options)
            self.scored.set()

        runner.run = run  # type: ignore[method-assign]
        return runner


class Distilling(Counted, OPDModule):
    """On-policy distillation, counted."""


class Keep(Callback):
    """The metrics of every step, and the final weights."""

    def __init__(self, output: Path, spoil: bool) -> None:
        self.output = output
        self.spoil = spoil
        self.metrics: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.output / "initial.ckpt")
        if self.spoil:
            next(pl_module.policy.parameters()).register_hook(lambda gradient: gradient * torch.nan)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        assert not getattr(trainer.strategy.model, "broadcast_buffers", False)  # of DDP
        counts = self.output.with_suffix(f".rank{trainer.global_rank}.json")
        counts.write_text(json.dumps(pl_module.counts))
        weights = gather_whole(stored_once(pl_module.policy).items())
        if trainer.is_global_zero:
            save_file(
                {name: tensor.cpu() for name, tensor in weights.items()},
                self.output.with_suffix(".safetensors"),
            )
            self.output.with_suffix(".json").write_text(json.dumps(self.metrics))


def run_job(
    model: str,
    output: str,
    strategy: str,
    steps: int = STEPS,
    tokens: int = 4096,
    checkpoint: str | None = None,
    lora: bool = False,
    adapter: Adapter = "separate",
    export: bool = False,
    uneven: bool = False,
    spoil: bool = False,
    base: Literal["full", "4bit"] = "full",
    states: Literal["full", "8bit"] = "full",
    world_size: int = 2,
    prompts: int = 2,
    early: bool = False,
    dynamic: int = 0,
    rows: int = 8,
    baseline: Literal["none", "empty"] = "none",
    student: str | None = None,
    opd: dict[str, Any] | None = None,
    likelihood: bool = False,
    updates: int = 1,
    epochs: int = 1,
) -> None:
    """Train, and write OUTPUT.safetensors, the final weights, and OUTPUT.json, the metrics of every step.

    OUTPUT.rankN.json: how many micro-batches the rank's share made in every step.

    Args:
        model: Of teacher and student.
        output: The run folder; results lie beside it.
        strategy: One of STRATEGIES; with _bf16 at its end, in half precision.
        steps: Optimizer steps.
        tokens: Of a micro-batch.
        checkpoint: To go on from.
        lora: Train an adapter, and export it.
        adapter: Merged or separate.
        export: Export the model without an adapter, too.
        uneven: All of a step's prompts but the first, which is rank 0's, get completions ten times as long.
        spoil: Make a gradient NaN.
        base: How the weights beside the adapter are stored.
        states: How the optimizer's states are stored.
        world_size: Processes of a strategy that is not single.
        prompts: Prompts of a step.
        early: Sample outside the process; the last completion comes when others are scored.
        dynamic: Rounds of dynamic sampling, at most, with groups that are equal by construction.
        rows: Of the data.
        baseline: Of the reward.
        student: In place of the model itself; then the problems are short.
        opd: Settings of on-policy distillation, with a hint, in place of RLT.
        likelihood: Log-probs of the policy as rewards, with the answer term, in place of RLT.
        updates: Mini-batches of an RLT iteration.
        epochs: How often it learns from each.
    """
    folder = Path(output)
    Counted.counts.clear()
    options = STRATEGIES[strategy.removesuffix("_bf16")]()
    if options["devices"] > 1:
        options["devices"] = world_size
    engine = (Early if early else Given)(uneven)
    if isinstance(engine, Early):
        engine.waits = not dynamic  # nothing is scored while other problems are sampled
    callbacks: list[Callback] = [
        RolloutCallback(
            engine=engine,
            sampling=Sampling(max_completion_length=128),
            dynamic_sampling=DynamicSampling(dynamic) if dynamic else None,
        ),
        *([ReferenceSync(every_n_steps=2)] if opd is None or "averaged" in opd.values() else []),
        Checkpoint(1, save_top_k=-1),
        Keep(folder, spoil),
    ]
    callbacks += [ModelExporter(adapter=adapter)] if lora or export else []
    options["accelerator"] = "gpu" if PRETENDED in sys.modules else "cpu"
    options["precision"] = "bf16-mixed" if strategy.endswith("_bf16") else "32-true"
    trainer = bare_trainer(folder, *callbacks, steps=steps, **options)
    shared: dict[str, Any] = dict(
        group_size=4,
        optimizer=OptimizerConfig(
            lr=1e-4,
            weight_decay=0.01,
            # Some of the runs that are resumed must have a schedule.
            scheduler="linear" if lora else "constant",
            max_grad_norm=0.5,
            states=states,
        ),
        micro_batch_tokens=tokens,
        lora=LoRA(rank=4, alpha=8.0, base=base) if lora else None,
    )
    module: Counted
    if likelihood:
        module = Counting(
            model,
            "policy",
            reward=LogProbReward(reduction="mean"),
            advantages=LeaveOneOutAdvantages(),
            policy_loss=DrGRPOLoss(kl_coef=0.0, max_completion_length=1),
            **shared,
        )
    elif opd is None:
        reward = Parity() if dynamic else RLTReward(baseline=baseline)
        repeats = {"updates_per_rollout": updates, "num_epochs": epochs}
        module = Counting(model, student or model, reward=reward, **repeats, **shared)  # type: ignore[arg-type]
    else:
        module = Distilling(model, **opd, **shared)
    # A miniature has no room for long prompts.
    short = {"tags": "r1", "teacher_system_prompt": "", "student_system_prompt": ""} if student else {}
    of_stage = {"student_tokenizer": student or model}
    if opd is not None:
        of_stage = {"teacher_tokenizer": model, "view": "hint"}
    kind = StudentLikelihoodData if likelihood else TeacherRLData if opd is None else StudentOPDData
    data = kind(
        source="chains",
        num_embedded_rows=rows,
        tokenizer=model,
        prompts_per_step=prompts,
        output_dir=str(folder),
        **short,
        **of_stage,
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)


def main() -> None:
    """Do what each line of standard input asks for."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    for line in sys.stdin:
        job = json.loads(line)
        if PRETENDED in sys.modules:
            sys.modules[PRETENDED].RECORD.clear()
        try:
            if "function" in job:
                sys.path.append(job["place"])
                module, _, name = job["function"].partition(":")
                getattr(import_module(module), name)(rank, *job["arguments"])
            else:
                run_job(**job)
            error = ""
            if PRETENDED in sys.modules:
                record = [[*rest, str(place)] for *rest, place in sys.modules[PRETENDED].RECORD]
                Path(f"{job['output']}.collectives{rank}").write_text(json.dumps(record))
        except Exception:
            error = traceback.format_exc()
        scratch = Path(f"{job['output']}.scratch{rank}")  # appears whole
        scratch.write_text(error)
        scratch.rename(done_file(job["output"], rank))


if __name__ == "__main__":
    main()
