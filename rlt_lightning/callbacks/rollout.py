"""The one callback that RL training needs: it brings the completions.

One step, and who waits for whom:

    RolloutCallback (every rank)              engine                           RLTModule
      make this step's order, unless begun
      begin ── weights, if they changed ────▶ hold them, be verified
            ── prompts, seeds ──────────────▶ generate
      wait ◀─────────── completions ─────────┘
      attach to the batch ───────────────────────────────────────────────────▶ training_step

An engine that is outside the process and on other GPUs hands over completions in waves, which models read
while the rest is sampled: waves.py. With `dynamic_sampling` the completions are scored here, and further ones
sampled in place of groups that teach nothing: dynamic_sampling.py.

With `asynchronous` the callback also begins the next step's order before training_step starts. The engine
then samples while this step trains, and the next step finds its order begun:

    engine      generate 0 │ generate 1 │ generate 2 │ ...
    RLTModule              │ train on 0 │ train on 1 │ ...

engine_link.py says how the ranks share one engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.callbacks.dynamic_sampling import DynamicSampling, refill
from rlt_lightning.callbacks.engine_link import make_link
from rlt_lightning.callbacks.order import Order
from rlt_lightning.callbacks.rollout_checks import (
    FIXED,
    choose_weights,
    readers_of_run,
    require_gathering,
    require_rewarded,
    require_room,
    require_trainable,
)
from rlt_lightning.callbacks.waves import read_in_waves
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.engines.base import Engine, EngineError, Sampling
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.sampled import SampledModule
from rlt_lightning.numerics.seeds import mix_seed
from rlt_lightning.types import InputError, Problem, PromptBatch, Rollouts

# schedule(the config's sampling, optimizer step) is the sampling of that step.
Schedule = Callable[[Sampling, int], Sampling]
# In seeds these stand in place of the optimizer step.
VALIDATION, PREDICTION = -1, -2


class RolloutCallback(Callback):
    """Sample completions with the current weights and attach them to the batch; idle for other modules.

    Args:
        engine: Where completions come from; None: HFEngine(), in process.
        sampling: Temperature and limits of training completions.
        val_sampling: The same for validation; None: as in training.
        val_completions: Completions per held-out problem.
        num_traces: Completions per problem of `rlt predict`.
        max_resamples: How often `rlt predict` samples a trace again that does not fit a student.
        asynchronous: Sample the next step's completions while this step is trained. They are one step old
            when they are used: needs model.max_staleness of 1, and an engine that is not in process.
        score_early: Score completions, and run the reference on them, while others of the step are sampled.
            It acts with an engine that is outside the process and does not take turns with training.
        dynamic_sampling: Sample other problems in place of those whose completions all earned the same, in
            training; None: such groups stay, and have advantage 0.
        verify_every_n_steps: Optimizer steps between checks that the workers hold the trainer's weights. The
            first push to a worker, or to one that is back, is always checked; 0 checks nothing else.
        deadline_s: How long the other ranks wait for rank 0 while it talks to an engine that is not in
            process. Set it above the time that sampling takes: it ends the run if rank 0 hangs.
        seed: Decides all sampling. A completion depends only on (seed, iteration, problem), so a resumed
            run repeats it.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        sampling: Sampling = Sampling(),
        val_sampling: Sampling | None = None,
        val_completions: int = 1,
        num_traces: int = 1,
        max_resamples: int = 0,
        asynchronous: bool = False,
        score_early: bool = True,
        dynamic_sampling: DynamicSampling | None = None,
        verify_every_n_steps: int = 1,
        deadline_s: float = 14400.0,
        seed: int = 0,
    ) -> None:
        self.engine: Engine = HFEngine() if engine is None else engine
        self.sampling = sampling
        self.schedule: Schedule | None = None  # set by `follow`
        self.val_sampling = val_sampling or sampling
        self.val_completions = val_completions
        self.num_traces = num_traces
        self.max_resamples = max_resamples
        self.asynchronous = asynchronous
        self.score_early = score_early and not self.engine.in_process and not self.engine.takes_turns
        self.dynamic_sampling = dynamic_sampling
        self.link = make_link(self.engine, verify_every_n_steps, deadline_s)
        self.seed = seed
        self.trainer: Trainer | None = None
        self.order: Order | None = None  # of the next step, while it is not attached to a batch
        alike = sampling.temperature == 0 and (num_traces > 1 or max_resamples > 0)
        if num_traces < 1 or max_resamples < 0 or alike:
            raise InputError(
                "rollouts.num_traces must be at least 1 and max_resamples at least 0, and at temperature 0 "
                f"exactly these, but are {num_traces} and {max_resamples}. Correct them."
            )
        if asynchronous and self.engine.takes_turns:
            raise InputError(
                "rollouts.asynchronous samples while the GPUs train, but the engine's sleep has them do one "
                "or the other. Set one of them to false."
            )
        if asynchronous and self.engine.in_process:
            raise InputError(
                "rollouts.asynchronous needs an engine outside this process, such as "
                f"rlt_lightning.engines.VLLMEngine, but got {type(self.engine).__name__}. Set "
                "rollouts.engine."
            )

    @staticmethod
    def of(trainer: Trainer) -> RolloutCallback:
        """Return the trainer's RolloutCallback.

        Raises:
            InputError: If the trainer has none.
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutCallback):
                return callback
        raise InputError(
            "The trainer must have a RolloutCallback, but has none. Add "
            "rlt_lightning.callbacks.RolloutCallback to trainer.callbacks."
        )

    def follow(self, schedule: Schedule) -> None:
        """Let the sampling of training depend on the step; call it in another callback's `setup`.

        Validation and prediction sample as before. Nothing may grow beyond the settings that were checked:
        `max_completion_length` of the config is the most that a step may have.

        Args:
            schedule: schedule(sampling, step) returns the sampling of the completions that step `step`, from
                0, trains on. It must depend on nothing else: it is called again after a resume, and
                one step ahead where rollouts are asynchronous.

        Raises:
            InputError: If another schedule is followed already.
        """
        if self.schedule not in (None, schedule):
            raise InputError(
                f"Rollouts can follow one schedule, but {schedule} comes after {self.schedule}. Remove one "
                "of the callbacks, or make one of both."
            )
        self.schedule = schedule

    def wait_for_engine(self, trainer: Trainer) -> None:
        """Wait for the next step's completions, since an engine does one thing at a time."""
        if self.order is not None:
            self.link.call(trainer, self.order.wait)

    def sampling_at(self, step: int) -> Sampling:
        """Return the settings of the completions that a step, from 0, trains on.

        Raises:
            InputError: If the schedule gives what was not checked.
        """
        if self.schedule is None:
            return self.sampling
        sampling = self.schedule(self.sampling, step)
        longest = self.sampling.max_completion_length
        loosened = sampling.truncates and not self.sampling.truncates
        if sampling.max_completion_length > longest or sampling.temperature == 0 or loosened:
            raise InputError(
                f"A schedule must keep to rollouts.sampling, which was checked: at most {longest} tokens, a "
                "temperature above 0, and no top_p, top_k, min_p or repetition_penalty that is off there. "
                f"But at step {step} it gave {sampling}. Correct it, or raise "
                "rollouts.sampling.max_completion_length."
            )
        return sampling

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before any model is loaded, that settings agree and that completions fit."""
        self.trainer, self.order = trainer, None  # an order that an earlier fit left is of another step
        data = stratos_of(trainer)
        if not isinstance(pl_module, SampledModule):
            return
        if stage == "predict" and data.task == "student_rl" and self.max_resamples:
            raise InputError(
                "With data.task student_rl rollouts.max_resamples must be 0, since pass_rate counts every "
                f"answer, but is {self.max_resamples}. Set it to 0, and raise rollouts.num_traces instead."
            )
        if not (stage == "predict" and data.task == "score"):  # which uses no engine
            require_gathering(self.engine, trainer)
        if stage == "fit":
            require_rewarded(self.dynamic_sampling, pl_module)
            require_trainable(self.sampling, self.engine, self.asynchronous, pl_module)
        longest = max(self.sampling.max_completion_length, self.val_sampling.max_completion_length)
        for reader in readers_of_run(pl_module, data):
            require_room(data.all_items, reader, longest)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_engine(trainer, pl_module)
        if isinstance(pl_module, SampledModule):
            choose_weights(self.sampling, self.engine, self.asynchronous, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.link.require_even(trainer)
        self._start_engine(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, SampledModule):
            return
        expected = (pl_module.group_size, self.sampling_at(pl_module.global_step))
        # An order from a checkpoint may be of other settings.
        if self.order is None or (self.order.num_completions, self.order.sampling) != expected:
            self.order = self._order(trainer, pl_module, batch.problems, pl_module.global_step)
        dynamic, pl_module.reading = self.dynamic_sampling, None
        if self.score_early and isinstance(pl_module, RLTModule):
            # What is dropped needs no reference.
            steps = self.link, trainer, pl_module, batch, self.order
            pl_module.reading = read_in_waves(*steps, with_reference=dynamic is None)
        else:
            self._attach(trainer, pl_module, batch, self.order)
        if dynamic is not None and isinstance(pl_module, RLTModule):
            order_of = partial(self._order, trainer, pl_module, step=pl_module.global_step, of_all=True)
            refill(dynamic, self.link, trainer, pl_module, batch, order_of)
        following = None
        # Every step logs the same metrics, also the last of an asynchronous run, which pushes nothing.
        pl_module.phase.phases.setdefault("push", PhaseStats())
        if self.asynchronous and pl_module.global_step + 1 < pl_module.total_steps():
            upcoming = trainer.train_dataloader.peek()  # type: ignore[union-attr]
            following = self._order(trainer, pl_module, upcoming.problems, pl_module.global_step + 1)
            # Before self.order changes: if this fails, a checkpoint must find this step's order.
            self.link.begin(trainer, pl_module, following)
        self.order = following

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(pl_module, SampledModule):
            return
        self.wait_for_engine(trainer)
        order = self._order(trainer, pl_module, batch.problems, VALIDATION)  # the same each time
        order.sampling, order.num_completions = self.val_sampling, self.val_completions
        self._attach(trainer, pl_module, batch, order)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if stratos_of(trainer).task != "score":
            self._start_engine(trainer, pl_module)

    @override
    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Sample the traces of a problem; they depend only on seed and row, however rows are batched."""
        if not isinstance(pl_module, SampledModule) or batch.rollouts is not None:
            return
        order = self._order(trainer, pl_module, batch.problems, PREDICTION)
        order.num_completions = self.num_traces
        self._attach(trainer, pl_module, batch, order)
        assert batch.rollouts is not None
        data = stratos_of(trainer)
        rollouts = batch.rollouts.rollouts
        for attempt in range(1, self.max_resamples + 1):
            misfits = [i for i, rollout in enumerate(rollouts) if not data.fits_student(rollout)]
            if not misfits:
                return
            problems = [rollouts[i].problem for i in misfits]
            order = self._order(trainer, pl_module, problems, PREDICTION)
            order.num_completions = 1
            traces = [i % self.num_traces for i in misfits]
            order.seeds = [mix_seed(seed, attempt, i) for seed, i in zip(order.seeds, traces, strict=True)]
            resampled = self.link.rollouts_of(trainer, pl_module, problems, order)
            for i, rollout in zip(misfits, resampled, strict=True):
                rollouts[i] = rollout

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the completions that are not attached yet: a resumed run trains on the same ones.

        A synchronous run samples them again: nothing is awaited for its checkpoint.
        """
        if self.order is None or not self.asynchronous:
            return {}
        order = self.order

        def collect() -> str | None:
            # This wait costs nothing: the next step would wait for the same completions.
            try:
                order.collect()
            except (EngineError, InputError) as error:
                # The next step asks again, and raises the error if it comes again.
                return str(error)
            return None

        problem = self.link.call(self.trainer, collect) if self.trainer else collect()
        if problem is not None:
            rank_zero_warn(f"The checkpoint holds no completions for the next step: {problem}")
        return {"order": order.to_plain()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        known = self.asynchronous and "order" in state_dict
        self.order = Order.from_plain(state_dict["order"]) if known else None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.link.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.link.close()
        if isinstance(pl_module, RLTModule):
            pl_module.reward.close()  # Lightning tears modules down only after success

    def recipe(self) -> dict[str, Any]:
        """Return how traces are sampled, for a data card."""
        defaults, changed = vars(Sampling()), vars(self.sampling)
        named = ("temperature", "max_completion_length")
        settings = [f"{n} {v}" for n, v in changed.items() if n in named or v != defaults[n]]
        return {
            "sampling": ", ".join([*settings, f"seed {self.seed}"]),
            "engine": type(self.engine).__name__,
            "traces per problem": self.num_traces,
            "sampled again at most": self.max_resamples,
        }

    def _start_engine(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, SampledModule):
            longest = max(self.sampling.max_completion_length, self.val_sampling.max_completion_length)
            data = stratos_of(trainer)
            longest += int(data.all_items.numbers(*FIXED["teacher"]).max())
            self.link.start(trainer, pl_module, data.problems[0].teacher_prompt, longest)

    def _order(
        self,
        trainer: Trainer,
        module: SampledModule,
        problems: list[Problem],
        step: int,
        of_all: bool = False,
    ) -> Order:
        """Return what this step asks of the engine, nothing of it sampled yet.

        `of_all` says that all ranks have the same problems, otherwise each has its own.
        """
        jobs = [(p.row, p.teacher_prompt, mix_seed(self.seed, step, p.row)) for p in problems]
        jobs = jobs if of_all else self.link.jobs_of_all(trainer, jobs)
        rows, prompts, seeds = (list(column) for column in zip(*jobs, strict=True))
        stop = stratos_of(trainer).stop
        version, sampling = module.global_step, self.sampling if step < 0 else self.sampling_at(step)
        return Order(rows, prompts, seeds, version, sampling, module.group_size, stop)

    def _attach(self, trainer: Trainer, module: SampledModule, batch: PromptBatch, order: Order) -> None:
        """Wait for an order and put this rank's part of it into the batch."""
        rollouts = self.link.rollouts_of(trainer, module, batch.problems, order)
        batch.rollouts = Rollouts(
            rollouts, order.num_completions, order.policy_version, order.sampling.temperature
        )
