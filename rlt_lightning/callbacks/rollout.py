"""The one callback that RL training needs: it brings the completions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.callbacks.order import Order
from rlt_lightning.callbacks.rollout_checks import require_room
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.engines.base import (
    PROBE_TOKENS,
    Engine,
    EngineError,
    NamedTensor,
    Sampling,
    require_context,
)
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.engines.weights import in_background
from rlt_lightning.models.lora import adapter_weights, merged_weights
from rlt_lightning.models.packed import sequence_log_probs
from rlt_lightning.modules.meter import PhaseCost
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.numerics.seeds import mix_seed
from rlt_lightning.pretrained import context_length
from rlt_lightning.types import Completion, InputError, Problem, PromptBatch, Rollout, Rollouts

T = TypeVar("T")
Schedule = Callable[[Sampling, int], Sampling]  # of the config's sampling and a step: that step's
VALIDATION, PREDICTION = -1, -2  # stand for the optimizer step in seeds


class RolloutCallback(Callback):
    """Sample completions with the current weights and attach them to the batch; idle without an RLTModule.

    Args:
        engine: Where completions come from; None: HFEngine(), in process.
        sampling: Temperature and limits of training completions.
        val_sampling: The same for validation; None: as in training.
        val_completions: Completions per held-out problem.
        num_traces: Completions per problem of `rlt predict`.
        max_resamples: How often `rlt predict` samples a trace anew that does not fit a student.
        asynchronous: Sample the next step's completions while this step is trained. They are one step old
            when they are used: needs model.max_staleness of 1, and an engine that is not in process.
        verify_every_n_steps: Optimizer steps between checks that the workers hold the trainer's weights; the
            first push to a worker, or to one that is back, is always checked. 0 checks those alone.
        deadline_s: How long the other ranks wait for rank 0, which alone talks to an engine that is not in
            process. Above what sampling takes: it is there for a rank 0 that hangs.
        seed: Of all sampling. A completion depends on (seed, iteration, problem) alone, so a resumed run
            repeats it.
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
        verify_every_n_steps: int = 1,
        deadline_s: float = 14400.0,
        seed: int = 0,
    ) -> None:
        self.engine: Engine = HFEngine() if engine is None else engine
        self.sampling = sampling  # of training: what the schedule starts from, if there is one
        self.schedule: Schedule | None = None  # see `follow`
        self.val_sampling = val_sampling or sampling
        self.val_completions = val_completions
        self.num_traces = num_traces
        self.max_resamples = max_resamples
        self.asynchronous = asynchronous
        self.verify_every_n_steps = verify_every_n_steps
        self.deadline_s = deadline_s
        self.seed = seed
        self.trainer: Trainer | None = None
        self.waiting_room: Any = None  # the process group in which ranks wait for rank 0
        self.order: Order | None = None  # not yet handed over
        self.verified_at: int | None = None  # optimizer step of the last check
        self.probe_log_probs: dict[int, list[float]] = {}  # the trainer's, by policy version; the last two
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
        """The one that a trainer has.

        Raises:
            InputError: If it has none.
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
            schedule: schedule(sampling, step) is the sampling of the completions that are trained on after
                `step` optimizer steps. A function of these alone: it is asked again after a resume, and one
                step ahead where rollouts are asynchronous.

        Raises:
            InputError: If another schedule is followed already.
        """
        if self.schedule not in (None, schedule):
            raise InputError(
                f"Rollouts can follow one schedule, but {schedule} comes after {self.schedule}. Remove one "
                "of the callbacks, or make one of both."
            )
        self.schedule = schedule

    def sampling_at(self, step: int) -> Sampling:
        """Settings of the completions that are trained on after so many optimizer steps.

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
        self.trainer = trainer
        data = stratos_of(trainer)
        if not isinstance(pl_module, RLTModule):
            return
        if stage == "fit":
            self._check_sampling(pl_module)
        longest = max(self.sampling.max_completion_length, self.val_sampling.max_completion_length)
        for model, role in ((pl_module.pretrained, "teacher"), (pl_module.student_name, "student")):
            if model is None:
                continue
            context = context_length(str(model), bool(pl_module.trust_remote_code))
            require_room(data.problems, role, context, longest)

    def _check_sampling(self, module: RLTModule) -> None:
        if self.sampling.temperature == 0:
            raise InputError(
                "rollouts.sampling.temperature must be above 0 in training, but is 0: greedy completions of "
                "a group are all alike. Set it, the released recipe uses 0.7."
            )
        reward = module.reward
        if isinstance(reward, RLTReward) and reward.teacher_temperature != self.sampling.temperature:
            rank_zero_warn(
                f"sampling.temperature is {self.sampling.temperature}, but reward.teacher_temperature is "
                f"{reward.teacher_temperature}: the k1 and k3 estimates of the KL are then biased."
            )
        if self.asynchronous and module.max_staleness < 1:
            raise InputError(
                "rollouts.asynchronous brings completions that are one step old, but model.max_staleness is "
                f"{module.max_staleness}. Set it to 1."
            )
        weighted = module.importance_sampling is not None or module.max_staleness > 0
        if weighted and (self.sampling.truncates or not self.engine.reports_log_probs):
            raise InputError(
                "Importance sampling and stale rollouts need the log-probs that tokens were sampled with, "
                f"but {self.sampling} and {type(self.engine).__name__} do not give them: a truncated "
                "distribution is not the policy's. Set top_p 1, top_k 0, min_p 0, repetition_penalty 1 and "
                "the engine's log_probs to worker; or drop model.importance_sampling and set "
                "model.max_staleness to 0."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_engine(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = stratos_of(trainer)
        sizes = (len(data.val_items), data.val_batch_size)
        if not self.engine.in_process and any(size % trainer.world_size for size in sizes):
            raise InputError(
                f"With one engine for {trainer.world_size} processes, the held-out rows and val_batch_size "
                f"must be multiples of that, but are {sizes[0]} and {sizes[1]}. Change data.val_rows or "
                "data.val_batch_size."
            )
        self._start_engine(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, RLTModule):
            return
        expected = (pl_module.group_size, self.sampling_at(pl_module.global_step))
        if self.order is None or (self.order.num_completions, self.order.sampling) != expected:
            self.order = self._order(trainer, pl_module, batch.problems, pl_module.global_step)
        self._attach(trainer, pl_module, batch, self.order)
        following = None
        # The last step of an asynchronous run pushes nothing, but metrics must have the same names.
        pl_module.phase.phases.setdefault("push", PhaseCost())
        if self.asynchronous and pl_module.global_step + 1 < pl_module.total_steps():
            upcoming = trainer.train_dataloader.peek()  # type: ignore[union-attr]
            following = self._order(trainer, pl_module, upcoming.problems, pl_module.global_step + 1)
            self._begin(trainer, pl_module, following)  # if it fails, this step's order is still there
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
        if not isinstance(pl_module, RLTModule):
            return
        if self.order is not None:
            self._on_rank_zero(trainer, self.order.wait)  # the engine does one thing at a time
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
        """Sample the traces of a problem; those depend on seed and row alone, however rows are batched."""
        if not isinstance(pl_module, RLTModule) or batch.rollouts is not None:
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
            for i, rollout in zip(misfits, self._sampled(trainer, pl_module, problems, order), strict=True):
                rollouts[i] = rollout

    @override
    def state_dict(self) -> dict[str, Any]:
        """The completions that are not handed over yet: a resumed run trains on the same ones."""
        if self.order is None:
            return {}
        order = self.order

        def take() -> str | None:  # costs nothing: the next step would wait for them
            try:
                order.take()
            except (EngineError, InputError) as error:
                order.future = None  # the next step asks again, and tells if that fails too
                return str(error)
            return None

        problem = self._on_rank_zero(self.trainer, take) if self.trainer else take()
        if problem is not None:
            rank_zero_warn(f"The checkpoint holds no completions for the next step: {problem}")
        return {"order": order.to_plain()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        known = self.asynchronous and "order" in state_dict
        self.order = Order.from_plain(state_dict["order"]) if known else None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.engine.close()
        self.verified_at, self.probe_log_probs = None, {}

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.engine.close()
        if isinstance(pl_module, RLTModule):
            pl_module.reward.close()  # Lightning tears modules down only after success

    def recipe(self) -> dict[str, Any]:
        """How traces are sampled, for a data card."""
        defaults, changed = vars(Sampling()), vars(self.sampling)
        named = ("temperature", "max_completion_length")
        settings = [f"{n} {v}" for n, v in changed.items() if n in named or v != defaults[n]]
        return {
            "sampling": ", ".join([*settings, f"seed {self.seed}"]),
            "engine": type(self.engine).__name__,
            "traces per problem": self.num_traces,
            "sampled anew at most": self.max_resamples,
        }

    def _start_engine(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start it once the weights are where they will be trained, a restored checkpoint included."""
        if not isinstance(pl_module, RLTModule):
            return

        def start() -> None:
            tokenizer = stratos_of(trainer).format.tokenizer
            self.engine.start(pl_module.policy, tokenizer, Path(trainer.default_root_dir))
            if self.engine.in_process and pl_module.sharding.sharded:
                self.engine.share(pl_module.run, pl_module.on_any_rank)
            longest = max(len(p.teacher_prompt) for p in stratos_of(trainer).problems)
            limits = (self.sampling.max_completion_length, self.val_sampling.max_completion_length)
            require_context(longest + max(limits), self.engine.max_model_len)

        self._make_room(trainer)
        self._on_rank_zero(trainer, start)

    def _order(self, trainer: Trainer, module: RLTModule, problems: list[Problem], step: int) -> Order:
        """What this step needs: of all ranks, unless each has an engine of its own."""
        jobs = [(p.row, p.teacher_prompt, mix_seed(self.seed, step, p.row)) for p in problems]
        if not self.engine.in_process and trainer.world_size > 1:
            parts: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, jobs)
            jobs = [job for part in parts for job in part]
        rows, prompts, seeds = (list(column) for column in zip(*jobs, strict=True))
        stop = stratos_of(trainer).stop
        version, sampling = module.global_step, self.sampling if step < 0 else self.sampling_at(step)
        return Order(rows, prompts, seeds, version, sampling, module.group_size, stop)

    def _attach(self, trainer: Trainer, module: RLTModule, batch: PromptBatch, order: Order) -> None:
        """Wait for an order and put this rank's part of it into the batch."""
        rollouts = self._sampled(trainer, module, batch.problems, order)
        batch.rollouts = Rollouts(
            rollouts, order.num_completions, order.policy_version, order.sampling.temperature
        )

    def _sampled(
        self, trainer: Trainer, module: RLTModule, problems: list[Problem], order: Order
    ) -> list[Rollout]:
        """Wait for an order; return this rank's part of it."""
        first = 0 if self.engine.in_process else trainer.global_rank * len(problems)
        own = range(first, first + len(problems))
        if [order.rows[i] for i in own if i < len(order.rows)] != [p.row for p in problems]:
            raise RuntimeError(
                f"Completions were sampled for rows {order.rows}, but this batch has rows "
                f"{[p.row for p in problems]}. The loader did not bring what it had announced."
            )
        while not self._complete(trainer, module, order):
            self._begin(trainer, module, order)
        if self.engine.takes_turns:
            with module.phase("generate"):
                self._on_rank_zero(
                    trainer, self.engine.put_to_sleep
                )  # no rank trains before all workers sleep
        order.finished = self._on_rank_zero(trainer, lambda: order.finished)
        data = stratos_of(trainer)
        rollouts = [
            data.rollout(problem, completion)
            for i, problem in zip(own, problems, strict=True)
            for completion in order.finished[i]
        ]
        module.phase.phases["generate"].tokens += sum(len(r.completion.token_ids) for r in rollouts)
        return rollouts

    def _complete(self, trainer: Trainer, module: RLTModule, order: Order) -> bool:
        with module.phase("generate"):  # on every rank: metrics must have the same names everywhere
            return self._on_rank_zero(trainer, order.complete)

    def _begin(self, trainer: Trainer, module: RLTModule, order: Order) -> None:
        """Let the engine sample what is missing, with the weights of now."""
        self._make_current(trainer, module)
        if not order.finished:
            order.policy_version = module.global_step
        order.asked = [i for i in range(len(order.prompts)) if i not in order.finished]

        def generate() -> list[list[Completion]]:
            prompts, seeds = [order.prompts[i] for i in order.asked], [order.seeds[i] for i in order.asked]
            return self.engine.generate(prompts, order.sampling, order.num_completions, order.stop, seeds)

        if self.engine.in_process:
            order.future = Future()
            with module.phase("generate"), trainer.precision_plugin.forward_context():  # as it is trained
                order.future.set_result(generate())
        elif trainer.is_global_zero:
            order.future = in_background(generate)

    def _make_current(self, trainer: Trainer, module: RLTModule) -> None:
        """Push the weights until every worker that can be reached holds them, at least one."""
        step, pushed = module.global_step, False

        def needs_push() -> bool:
            self.engine.health()
            return self.engine.policy_version != step

        def push() -> None:
            self.engine.update_weights(named_tensors, step)

        self._make_room(trainer)
        with module.phase("push"):
            while self._on_rank_zero(trainer, needs_push):
                named_tensors = self._weights(module.policy)
                if not self.engine.in_process and not trainer.is_global_zero:
                    self.engine.gather_weights(named_tensors)  # gathers sharded weights in step with rank 0
                self._on_rank_zero(trainer, push)
                pushed = True
            due = self.verified_at is None or 0 < self.verify_every_n_steps <= step - self.verified_at
            if pushed and (due or self._on_rank_zero(trainer, lambda: self.engine.unverified)):
                self._verify(trainer, module)

    def _weights(self, policy: Any) -> list[NamedTensor]:
        """What the engine is pushed."""
        tensors = dict(policy.named_parameters())
        if self.engine.in_process:
            return list(tensors.items())
        return adapter_weights(tensors) if self.engine.takes_adapters else merged_weights(policy, tensors)

    def _make_room(self, trainer: Trainer) -> None:
        """Leave the GPUs to workers that take turns: free what PyTorch keeps of them for later."""
        if self.engine.takes_turns:
            torch.cuda.empty_cache()
            trainer.strategy.barrier()

    def _verify(self, trainer: Trainer, module: RLTModule) -> None:
        """Let the engine compare the workers' log-probs of a text with the trainer's."""
        if self.engine.in_process:
            return
        text = stratos_of(trainer).problems[0].teacher_prompt[:PROBE_TOKENS]
        log_probs = module.run(sequence_log_probs, text)
        self.verified_at = module.global_step
        latest = list(self.probe_log_probs.items())[-1:]
        self.probe_log_probs = dict(latest) | {module.global_step: log_probs.tolist()}
        self._on_rank_zero(trainer, lambda: self.engine.verify(text, self.probe_log_probs))

    def _on_rank_zero(self, trainer: Trainer, function: Callable[[], T]) -> T:
        """Call a function on rank 0; all ranks get its result, or its error. In process: on every rank."""
        if self.engine.in_process or trainer.world_size == 1:
            return function()
        if self.waiting_room is None:  # the strategy's group would give up before the engine does
            timeout = timedelta(seconds=self.deadline_s)
            self.waiting_room = torch.distributed.new_group(backend="gloo", timeout=timeout)
        outcome: list[Any] = [None]
        failure: EngineError | InputError | None = None
        if trainer.is_global_zero:
            try:
                outcome = [(function(), None)]
            except (EngineError, InputError) as error:
                failure, outcome = error, [(None, (isinstance(error, InputError), str(error)))]
        torch.distributed.broadcast_object_list(outcome, src=0, group=self.waiting_room)
        result, problem = outcome[0]
        if problem is not None:
            raise failure or (InputError if problem[0] else EngineError)(problem[1])
        return result
