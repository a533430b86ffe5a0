"""The one callback that RL training needs: it owns the engine, and gives the module a sampler.

    rollouts section of the config
      └ RolloutCallback      settings, checks, the engine's start and end, what a checkpoint keeps
          ├ Dispatcher       weights to the engine, completions from it (rollouts/dispatcher.py)
          └ Sampler ───────▶ module.attach(sampler): all that RLTModule and OPDModule know of sampling

Completions are sampled inside training_step, validation_step and predict_step, when the module asks for them.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.callbacks.rollout_checks import (
    announce_weights,
    require_comparable,
    require_gathering,
    require_rewarded,
    require_room,
    require_trainable,
)
from rlt_lightning.datamodules.items import FIXED_PIECES
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.engines.base import Engine, EngineError, Sampling
from rlt_lightning.engines.choice import find_gpus
from rlt_lightning.modules.checks import require_even_rows
from rlt_lightning.modules.on_policy import is_on_policy
from rlt_lightning.rollouts.dispatcher import Dispatcher
from rlt_lightning.rollouts.dynamic_sampling import DynamicSampling
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.rollouts.sampler import Sampler
from rlt_lightning.run.console import announce
from rlt_lightning.types import InputError


class RolloutCallback(Callback):
    """Sample completions with the current weights for a module; do nothing for modules that need none.

    Args:
        engine: Where completions come from; None: vLLM on the GPUs that train, in turns with training, where
            these are NVIDIA's and vllm is installed; else HFEngine(), in process.
        sampling: Temperature and limits of training completions.
        val_sampling: The same for validation; None: as in training.
        val_completions: Completions per held-out problem.
        num_traces: Completions per problem of `rlt predict`.
        max_resamples: How often `rlt predict` samples a trace again that does not fit a student.
        asynchronous: Sample the next step's completions while this step is trained. They are one step old
            when they are used: needs model.max_staleness of 1, and a server as engine.
        score_early: Score completions, and run the reference on them, while others of the step are sampled.
            It acts with a server that does not take turns with training, and not in on-policy
            distillation, whose update reads the completions of a whole step.
        dynamic_sampling: Sample other problems in place of those whose completions all earned the same, in
            training; None: such groups stay, and have advantage 0.
        verify_every_n_steps: Optimizer steps between checks that the workers hold the trainer's weights. The
            first push to a worker, or to one that is back, is always checked; 0 checks nothing else.
        deadline_s: How long the other ranks wait for rank 0 while it talks to a server. Set it above the time
            that sampling takes: it ends the run if rank 0 hangs.
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
        self.dispatcher = Dispatcher(engine, verify_every_n_steps, deadline_s)
        self.sampler = Sampler(self.dispatcher, self)
        self.sampling = sampling
        self.val_sampling = val_sampling or sampling
        self.val_completions = val_completions
        self.num_traces = num_traces
        self.max_resamples = max_resamples
        self.asynchronous = asynchronous
        is_server = self.dispatcher.is_server
        self.score_early = score_early and is_server and not self.engine.takes_turns
        self.dynamic_sampling = dynamic_sampling
        self.seed = seed
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
        if asynchronous and not is_server:
            raise InputError(
                "rollouts.asynchronous needs a server, such as "
                f"rlt_lightning.engines.VLLMEngine, but got {type(self.engine).__name__}. Set "
                "rollouts.engine."
            )

    @property
    def engine(self) -> Engine:
        """Return where completions come from."""
        return self.dispatcher.engine

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

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before any model is loaded, that settings agree and that completions fit."""
        if not is_on_policy(pl_module):
            return
        data = get_stratos_data(trainer)
        pl_module.require_data(data)
        self.sampler.bind(trainer, pl_module)
        pl_module.attach(self.sampler)
        if stage == "predict" and data.samples == "answers" and self.max_resamples:
            raise InputError(
                f"With {type(data).__name__} rollouts.max_resamples must be 0, since pass_rate counts every "
                f"answer, but is {self.max_resamples}. Set it to 0, and raise rollouts.num_traces instead."
            )
        if not (stage == "predict" and data.brings_completions):  # which uses no engine
            reason = self.dispatcher.choose_engine(find_gpus(trainer), pl_module.pretrained, pushes=True)
            if reason and trainer.is_global_zero:
                announce(reason)
            require_gathering(self.engine, trainer)
        if stage == "fit":
            require_rewarded(self.dynamic_sampling, pl_module)
            require_trainable(self.sampler, pl_module)
        if stage in ("fit", "validate"):
            require_comparable(self.val_completions, trainer, pl_module)
            if self.dispatcher.is_server:
                require_even_rows(trainer, "one engine")
        longest = max(self.sampling.max_completion_length, self.val_sampling.max_completion_length)
        require_room(pl_module, data, longest)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_engine(trainer, pl_module)
        if is_on_policy(pl_module):
            announce_weights(self.sampler, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_engine(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not get_stratos_data(trainer).brings_completions:
            self._start_engine(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the completions that no step was trained on yet: a resumed run trains on the same ones.

        A synchronous run samples them again: nothing is awaited for its checkpoint.
        """
        request = self.sampler.pending
        if request is None or not self.asynchronous:
            return {}

        def collect() -> str | None:
            # This wait costs nothing: the next step would wait for the same completions.
            try:
                request.collect()
            except (EngineError, InputError) as error:
                # The next step asks again, and raises the error if it comes again.
                return str(error)
            return None

        problem = self.dispatcher.call(collect)
        if problem is not None:
            rank_zero_warn(f"The checkpoint holds no completions for the next step: {problem}")
        return {"request": request.to_plain()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        is_saved = self.asynchronous and "request" in state_dict
        self.sampler.pending = RolloutRequest.from_plain(state_dict["request"]) if is_saved else None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dispatcher.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.dispatcher.close()
        if (reward := getattr(pl_module, "reward", None)) is not None:
            reward.close()  # Lightning tears modules down only after success

    def build_card_metadata(self) -> dict[str, Any]:
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
        if is_on_policy(pl_module):
            longest = max(self.sampling.max_completion_length, self.val_sampling.max_completion_length)
            data = get_stratos_data(trainer)
            longest += int(data.all_items.sum_columns(*FIXED_PIECES["teacher"]).max())
            self.dispatcher.start(data.format.tokenizer, data.problems[0].teacher_prompt, longest)
