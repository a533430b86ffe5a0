"""Decide which verb a config is planned for, and turn an evaluation into what the planner knows.

EvaluationModule ─▶ test      sampling only; read as a prediction whose reward asks no student
settings that only `rlt predict` reads, or plan.verb ─▶ predict    sampling and scoring, or scoring only
any other ─▶ fit
"""

from __future__ import annotations

from typing import Any

from rlt_lightning.callbacks import ResponseCallback, RolloutCallback
from rlt_lightning.datamodules import EvaluationDataModule, StratosDataModule
from rlt_lightning.engines import Engine
from rlt_lightning.engines.base import Sampling
from rlt_lightning.modules import CorrectnessReward, EvaluationModule, RLTModule
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.plan.inputs import Verb
from rlt_lightning.plan.options import PlanOptions
from rlt_lightning.types import InputError


def verb_of(
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


def as_prediction(
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


def workers_device(trainer: Any, engine: Engine) -> Any:
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
