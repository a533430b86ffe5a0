"""Ten steps of each kind of run, on recorded completions, as numbers that a later version must repeat.

    KINDS["rlt_k1"]  ──▶  Setup: module, data, callbacks  ──▶  run: ten steps  ──▶  Trajectory
                                      ▲
    recorded/rlt/rollouts.jsonl  ──  ReplayEngine: sampling cannot diverge

All kinds train miniatures in fp32. `KINDS` is the only place that names classes and settings of the package.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from compared import gather_whole
from lightning.pytorch import Callback, Trainer
from parity import Parity
from replay import COLUMNS, Recorder, ReplayEngine
from trainers import bare_trainer

from rlt_lightning.callbacks import DynamicSampling, ReferenceSync, RolloutCallback
from rlt_lightning.datamodules import (
    EvaluationDataModule,
    StratosDataModule,
    StudentLikelihoodData,
    StudentOPDData,
    StudentRLData,
    StudentSFTData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.datamodules.evaluation import Response
from rlt_lightning.engines import HFEngine, Placement, Sampling
from rlt_lightning.models.lora import LoRA
from rlt_lightning.models.weights import stored_once
from rlt_lightning.modules import OPDModule, RLTModule, SFTModule
from rlt_lightning.modules.evaluation import EvaluationModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics import (
    CISPOLoss,
    DAPOLoss,
    Divergence,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    LeaveOneOutAdvantages,
    TruncatedImportanceSampling,
)
from rlt_lightning.rewards import (
    CorrectnessReward,
    LogProbReward,
    NOVERReward,
    RLPRReward,
    RLTReward,
    VeriFreeReward,
)
from rlt_lightning.strategies.fsdp2 import FSDP2
from rlt_lightning.strategies.zero import DeepSpeed

FOLDER = Path(__file__).parent
STEPS = 10
NUM_ROWS = 24  # of the data: more than ten steps take in one epoch of two problems
TEACHER, STUDENT = "miniature-teacher", "miniature"
MINIATURES = FOLDER.parents[1] / "research" / "miniatures"
OTHER_STUDENT, OTHER_TOKENIZER = (str(MINIATURES / f"miniature-{name}") for name in ("seed1", "pieces"))
# Not 1, and high enough that no two completions of a group are alike.
TEMPERATURE = 1.3
# What a step measures of time and memory is no result.
MEASURED = "perf/"
STRATEGIES: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": lambda: {"strategy": "ddp", "devices": 2},
    # In another order of additions, once per update, norms differ by 3e-7.
    "fsdp2": lambda: {"strategy": FSDP2(reduce_every_micro_batch=True), "devices": 2},
    "zero3": lambda: {"strategy": DeepSpeed(stage=3), "devices": 2},
}


@dataclass
class Trajectory:
    """What a run did.

    Attributes:
        steps: The figures of each step, by name.
        weights: The Euclidean norm of each weight tensor at the end, by name.
        moved: That of its change over the run.
    """

    steps: list[dict[str, float]]
    weights: dict[str, float]
    moved: dict[str, float]


@dataclass
class Setup:
    """The parts of a run.

    Attributes:
        module: The LightningModule.
        data: The datamodule.
        rollouts: Settings of RolloutCallback; None: nothing is sampled.
        recording: Name of the folder of recorded completions.
        placement: Whether every rank replays, or rank 0 for all.
        callbacks: Further callbacks.
    """

    module: Any
    data: Any
    rollouts: dict[str, Any] | None = None
    recording: str = ""
    placement: Placement = Placement.SHARED_WEIGHTS
    callbacks: list[Callback] = field(default_factory=list)


# The kinds


# Decay strong enough to be seen in ten small steps.
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=1.0, scheduler="linear", max_grad_norm=1.0)
# Small enough for several micro-batches in each update.
UPDATE: dict[str, Any] = {"optimizer": OPTIMIZER, "micro_batch_tokens": 250}


def data(tokenizer: str, kind: type[StratosDataModule] = TeacherRLData, **options: Any) -> StratosDataModule:
    """Return chains as rows, two problems in a step."""
    defaults = {"source": "chains", "num_embedded_rows": NUM_ROWS, "prompts_per_step": 2}
    return kind(tokenizer=tokenizer, **defaults | options)


def rlt(
    *,
    student: str = STUDENT,
    recording: str = "rlt",
    rollouts: dict[str, Any] | None = None,
    placement: Placement = Placement.SHARED_WEIGHTS,
    reward: Callable[..., Any] = RLTReward,
    **options: Any,
) -> Setup:
    """Return RLT of the warmed-up teacher."""
    scored = reward(teacher_temperature=TEMPERATURE, student_temperature=TEMPERATURE)
    return Setup(
        RLTModule(TEACHER, student, group_size=4, reward=scored, **UPDATE | options),
        data(TEACHER, student_tokenizer=student, tags="r1", student_system_prompt=""),
        {"sampling": Sampling(temperature=TEMPERATURE, max_completion_length=30)} | (rollouts or {}),
        recording,
        placement,
        [ReferenceSync(every_n_steps=4)],
    )


def stale(**options: Any) -> Setup:
    """Return RLT on completions that are one step old, whose ratios are not 1."""
    asynchronous = {"asynchronous": True, "score_early": False}
    return rlt(
        recording="stale", rollouts=asynchronous, placement=Placement.SERVER, max_staleness=1, **options
    )


def likelihood(reward: Any, student: str = "policy") -> Setup:
    """Return a student that learns to think by the probability of the solution."""
    return Setup(
        RLTModule(
            STUDENT,
            student,
            group_size=4,
            reward=reward,
            advantages=LeaveOneOutAdvantages(),
            policy_loss=DrGRPOLoss(kl_coef=0.0, max_completion_length=1),
            **UPDATE,
        ),
        data(STUDENT, kind=StudentLikelihoodData, tags="r1", student_system_prompt=""),
        {"sampling": Sampling(temperature=TEMPERATURE, max_completion_length=30)},
        "likelihood",
    )


def traditional_rl() -> Setup:
    """Return a student that learns by the correctness of its answers."""
    return Setup(
        RLTModule(STUDENT, student=None, reward=CorrectnessReward(), group_size=4, **UPDATE),
        data(STUDENT, kind=StudentRLData, tags="r1", student_system_prompt=""),
        {"sampling": Sampling(temperature=TEMPERATURE, max_completion_length=60)},
        "traditional_rl",
    )


def opd(**options: Any) -> Setup:
    """Return a student that learns from a teacher with a hint, on its own answers."""
    return Setup(
        OPDModule(STUDENT, teacher=OTHER_STUDENT, group_size=2, **UPDATE | options),
        data(
            STUDENT,
            kind=StudentOPDData,
            teacher_tokenizer=OTHER_STUDENT,
            tags="r1",
            student_system_prompt="",
            view="hint",
        ),
        {"sampling": Sampling(temperature=TEMPERATURE, max_completion_length=60)},
        "opd",
    )


def sft(kind: type[StratosDataModule]) -> Setup:
    """Return supervised fine-tuning of a teacher or a student."""
    return Setup(
        SFTModule(STUDENT, **UPDATE | {"micro_batch_tokens": 120}),
        data(STUDENT, kind=kind, prompts_per_step=4, tags="r1", student_system_prompt=""),
    )


def evaluation() -> Setup:
    """Return the judging of recorded responses."""
    responses: dict[str, list[Response]] = {}
    for row in map(json.loads, (FOLDER / "recorded" / "responses.jsonl").read_text().splitlines()):
        responses.setdefault(f"arithmetic/{row['id']}", []).append(Response(row["response"], None, None))
    module = EvaluationModule(STUDENT)
    sampler: Any = SimpleNamespace(
        needs_model=False, answer=lambda problems, _: [responses[problem.id] for problem in problems]
    )
    module.attach(sampler)
    sets: dict[str, Any] = {"arithmetic": str(FOLDER / "recorded" / "arithmetic.jsonl")}
    return Setup(module, EvaluationDataModule(sets, max_rows=6, num_samples=2, batch_size=3, tags="r1"))


KINDS: dict[str, Callable[[], Setup]] = {
    "rlt_k1": rlt,
    "rlt_k3": lambda: rlt(reward=partial(RLTReward, kl_estimator="k3")),
    "rlt_exact": lambda: rlt(reward=partial(RLTReward, kl_estimator="exact")),
    "rlt_baseline": lambda: rlt(reward=partial(RLTReward, baseline="empty")),
    "rlt_recomputed": lambda: rlt(teacher_log_probs="recompute"),
    "rlt_other_tokenizer": lambda: rlt(student=OTHER_TOKENIZER),
    "rlt_lora": lambda: rlt(lora=LoRA(rank=4, alpha=8.0)),
    "rlt_dynamic_sampling": lambda: rlt(
        recording="dynamic", reward=Parity, rollouts={"dynamic_sampling": DynamicSampling(max_rounds=2)}
    ),
    "rlt_asynchronous": stale,
    # From step 2 on some weights reach the cap.
    "rlt_importance_sampling": lambda: stale(
        importance_sampling=TruncatedImportanceSampling("token", cap=1.01)
    ),
    "loss_dapo_symmetric": lambda: stale(policy_loss=DAPOLoss()),
    "loss_dr_grpo": lambda: stale(policy_loss=DrGRPOLoss(max_completion_length=30)),
    "loss_dapo": lambda: stale(policy_loss=DAPOLoss(clip_eps_high=0.28)),
    "loss_gspo": lambda: stale(policy_loss=GSPOLoss(clip_eps_low=1e-3, clip_eps_high=2e-3)),
    "loss_cispo": lambda: stale(policy_loss=CISPOLoss()),
    "loss_plain_kl": lambda: stale(policy_loss=GRPOLoss(unbiased_kl=False)),
    "sft_teacher": lambda: sft(TeacherSFTData),
    "sft_student": lambda: sft(StudentSFTData),
    "opd_reverse": opd,
    "opd_forward": lambda: opd(divergence=Divergence("forward")),
    "opd_jsd": lambda: opd(divergence=Divergence("jsd", beta=0.3)),
    "opd_sampled": lambda: opd(estimator="sampled"),
    "likelihood_log_prob": lambda: likelihood(LogProbReward(reduction="mean")),
    "likelihood_rlpr": lambda: likelihood(RLPRReward()),
    "likelihood_verifree": lambda: likelihood(VeriFreeReward()),
    "likelihood_nover": lambda: likelihood(NOVERReward()),
    "likelihood_log_prob_frozen": lambda: likelihood(LogProbReward(kl_weight=0.1), OTHER_STUDENT),
    "likelihood_rlpr_frozen": lambda: likelihood(RLPRReward(), OTHER_STUDENT),
    "likelihood_verifree_frozen": lambda: likelihood(VeriFreeReward(), OTHER_STUDENT),
    "likelihood_nover_frozen": lambda: likelihood(NOVERReward(), OTHER_STUDENT),
    "traditional_rl": traditional_rl,
    "evaluation": evaluation,
}
# Of these there is a trajectory under each of STRATEGIES too.
SHARDED = ("rlt_k1", "sft_student")


# One run


class WatchedLoss:
    """Means of the log-probs that a policy loss is given, over the tokens of the whole step."""

    def __init__(self, module: Any) -> None:
        self.sums = [0.0, 0.0, 0.0]  # policy, reference, tokens
        original = module.policy_loss
        watch = self

        class Watched(type(original)):  # type: ignore[misc]
            def __call__(self, **inputs: Any) -> Any:
                mask = inputs["token_mask"]
                for i, name in enumerate(("log_probs", "ref_log_probs")):
                    if inputs.get(name) is not None:
                        watch.sums[i] += float(inputs[name].detach()[mask].double().sum())
                watch.sums[2] += float(mask.sum())
                return super().__call__(**inputs)

        module.policy_loss = copy.copy(original)
        module.policy_loss.__class__ = Watched

    def take(self) -> dict[str, float]:
        """Return the means since the last call, over all ranks."""
        sums = torch.tensor(self.sums, dtype=torch.float64)
        self.sums = [0.0, 0.0, 0.0]
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        policy, reference, tokens = sums.tolist()
        found = {"policy/log_prob_mean": policy / tokens}
        return found | ({"policy/ref_log_prob_mean": reference / tokens} if reference else {})


class Watch(Callback):
    """The figures of every step, and the weights at the end."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.weights: dict[str, float] = {}
        self.moved: dict[str, float] = {}
        self.initial: dict[str, torch.Tensor] = {}
        self.loss: WatchedLoss | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if hasattr(pl_module, "policy_loss"):
            self.loss = WatchedLoss(pl_module)
        self.initial = copy_weights(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        log_probs = self.loss.take() if self.loss else {}
        self.steps.append(collect_figures(trainer) | log_probs)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        for name, weight in copy_weights(pl_module).items():
            self.weights[name] = float(weight.norm())
            self.moved[name] = float((weight - self.initial[name]).norm())

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.steps.append(collect_figures(trainer))


def copy_weights(module: Any) -> dict[str, torch.Tensor]:
    """Return whole copies of a policy's weights by name, float64, on every rank."""
    return {n: weight.double() for n, weight in gather_whole(stored_once(module.policy).items()).items()}


def collect_figures(trainer: Trainer) -> dict[str, float]:
    """Return what a step logged, but for what it measured of time and memory."""
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        name: value for name, value in figures.items() if not name.startswith(MEASURED) and name != "step"
    }


def run_on_rank(rank: int, kind: str, strategy: str, folder: str) -> None:
    """Run a kind in one of two processes; rank 0 writes what it did into the folder."""
    trajectory = run(kind, strategy, Path(folder))
    if rank == 0:
        Path(folder, "trajectory.json").write_text(json.dumps(vars(trajectory)))


def run(kind: str, strategy: str = "", folder: Path | None = None, record: bool = False) -> Trajectory:
    """Run ten steps of a kind, and return what they did.

    Args:
        kind: One of KINDS.
        strategy: One of STRATEGIES; '': one process.
        folder: Of the run; None: a temporary one.
        record: Sample the completions, and write them beside this file.
    """
    if folder is None:
        with TemporaryDirectory() as scratch:
            return run(kind, strategy, Path(scratch), record)
    setup, watch = KINDS[kind](), Watch()
    callbacks = [*setup.callbacks, watch]
    recording = FOLDER / "recorded" / setup.recording / "rollouts.jsonl"
    if setup.rollouts is not None:
        engine = (SampledOutside if setup.placement is Placement.SERVER else Sampled)() if record else None
        engine = engine or ReplayEngine(str(recording), setup.placement)
        callbacks.insert(0, RolloutCallback(engine=engine, **setup.rollouts))
        callbacks += [Recorder()] if record else []
    setup.data.output_dir = str(folder)
    options = STRATEGIES[strategy]() if strategy else {"devices": 1}
    trainer = bare_trainer(folder, *callbacks, steps=STEPS, use_distributed_sampler=False, **options)
    if isinstance(setup.module, EvaluationModule):
        trainer.test(setup.module, datamodule=setup.data, verbose=False)
    else:
        trainer.fit(setup.module, datamodule=setup.data)
    if record:
        recording.parent.mkdir(parents=True, exist_ok=True)
        for name in ("rollouts.jsonl", "dropped.jsonl"):
            if (folder / name).exists():
                recording.with_name(name).write_text("".join(shorten_rows(folder / name)))
    return Trajectory(watch.steps, watch.weights, watch.moved)


class Sampled(HFEngine):
    """Samples what is recorded."""


class SampledOutside(HFEngine):
    """Samples as workers do, with the weights of the last push."""

    placement = Placement.SERVER

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        super().start(copy.deepcopy(model), tokenizer, folder)

    def gather_weights(self, named_tensors: Any) -> None: ...


def shorten_rows(path: Path) -> Iterator[str]:
    """Yield the rows of a recording with what is replayed of them, log-probs to 1e-4 nats."""
    for line in path.read_text().splitlines():
        row = {name: value for name, value in json.loads(line).items() if name in COLUMNS}
        row["log_probs"] = row["log_probs"] and [round(value, 4) for value in row["log_probs"]]
        yield json.dumps(row, separators=(",", ":")) + "\n"
