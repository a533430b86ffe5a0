"""Checks of the rollout settings, made before any model is loaded."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from rlt_lightning.engines.base import Engine, Sampling
from rlt_lightning.engines.served import ServedEngine
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.strategies.sharding import sharding_of
from rlt_lightning.types import InputError, Problem


def require_trainable(sampling: Sampling, engine: Engine, asynchronous: bool, module: RLTModule) -> None:
    """Check that the module can train on completions that are sampled in this way.

    Raises:
        InputError: If it would learn nothing, refuse them as stale, or have a biased gradient.
    """
    if sampling.temperature == 0:
        raise InputError(
            "rollouts.sampling.temperature must be above 0 in training, but is 0: greedy completions of "
            "a group are all alike. Set it, the released recipe uses 0.7."
        )
    reward = module.reward
    if isinstance(reward, RLTReward) and reward.teacher_temperature != sampling.temperature:
        rank_zero_warn(
            f"sampling.temperature is {sampling.temperature}, but reward.teacher_temperature is "
            f"{reward.teacher_temperature}: the k1 and k3 estimates of the KL are then biased."
        )
    if asynchronous and module.max_staleness < 1:
        raise InputError(
            "rollouts.asynchronous brings completions that are one step old, but model.max_staleness is "
            f"{module.max_staleness}. Set it to 1."
        )
    weighted = module.importance_sampling is not None or module.max_staleness > 0
    if weighted and (sampling.truncates or not engine.reports_log_probs):
        raise InputError(
            "Importance sampling and stale rollouts need the log-probs that tokens were sampled with, "
            f"but {sampling} and {type(engine).__name__} do not give them: a truncated "
            "distribution is not the policy's. Set top_p 1, top_k 0, min_p 0, repetition_penalty 1 and "
            "the engine's log_probs to worker; or drop model.importance_sampling and set "
            "model.max_staleness to 0."
        )


def require_gathering(engine: Engine, trainer: Trainer) -> None:
    """Check that all ranks gather sharded weights for a push; otherwise rank 0 would wait forever.

    Raises:
        InputError: If the engine is outside the process and has only the `gather_weights` of `Engine`, which
            gathers nothing.
    """
    sharded = trainer.world_size > 1 and sharding_of(trainer.strategy).sharded
    kind = type(engine)
    gathers = kind.gather_weights is not Engine.gather_weights
    if kind.gather_weights is ServedEngine.gather_weights:  # for engines that send no weights
        gathers = kind.update_weights is ServedEngine.update_weights
    if sharded and not engine.in_process and not gathers:
        raise InputError(
            f"With weights in shards on {trainer.world_size} processes, an engine outside the process must "
            f"gather them on every rank, but {type(engine).__name__} does not write gather_weights. Write it "
            "as in rlt_lightning.engines.VLLMEngine, or use a strategy that keeps weights whole."
        )


def require_room(problems: list[Problem], role: str, context: int, max_completion_length: int) -> None:
    """Check that every problem and its completion, given or of full length, fit into a context, in tokens.

    Raises:
        InputError: Naming the row, the lengths and the settings that would make room.
    """
    for problem in problems:
        fixed = fixed_tokens(problem, role)
        given = problem.given_completion
        if given and fixed + len(given.token_ids) > context:
            raise InputError(
                f"Prompt and completion must fit into the {role}'s context of {context} tokens, but row "
                f"{problem.row} needs {fixed + len(given.token_ids)}. Lower data.max_length: longer rows are "
                "counted and left out."
            )
        if not given and fixed + max_completion_length > context:
            raise InputError(
                f"Prompt and completion must fit into the {role}'s context of {context} tokens, but row "
                f"{problem.row} needs {fixed} + max_completion_length {max_completion_length}. Lower "
                "sampling.max_completion_length, data.max_prompt_length or data.max_solution_length."
            )


def fixed_tokens(problem: Problem, role: str) -> int:
    """Return the tokens of a sequence of the teacher, or of the student, beside the completion's."""
    if role == "teacher":
        return len(problem.teacher_prompt)
    around = (problem.student_prefix, problem.think_prefix, problem.student_suffix, problem.solution_ids)
    return sum(map(len, around))
