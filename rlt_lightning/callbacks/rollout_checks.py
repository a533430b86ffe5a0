"""Checks of the rollout settings, made before any model is loaded."""

from __future__ import annotations

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from rlt_lightning.datamodules.evaluation_sets import EvaluationProblem
from rlt_lightning.datamodules.stratos import StratosDataModule, get_stratos_data
from rlt_lightning.engines.base import Engine, Placement, Sampling
from rlt_lightning.models.load import context_length
from rlt_lightning.modules.on_policy import OnPolicyModule
from rlt_lightning.rollouts.sampler import Sampler
from rlt_lightning.run.console import announce
from rlt_lightning.strategies.sharding import get_sharding
from rlt_lightning.types import InputError


def require_rewarded(dynamic_sampling: object, module: OnPolicyModule) -> None:
    """Check that completions have rewards if problems are replaced by them.

    Raises:
        InputError: If they have none.
    """
    if dynamic_sampling is not None and module.reward is None:
        raise InputError(
            "rollouts.dynamic_sampling replaces groups whose rewards are equal, but completions of "
            f"{type(module).__name__} have no reward. Set it to null."
        )


def require_trainable(sampler: Sampler, module: OnPolicyModule) -> None:
    """Check that the module can train on completions that are sampled in this way.

    Raises:
        InputError: If it would learn nothing, refuse them as stale, or have a biased gradient.
    """
    sampling, asynchronous = sampler.settings.sampling, sampler.settings.asynchronous
    if sampling.temperature == 0:
        raise InputError(
            "rollouts.sampling.temperature must be above 0 in training, but is 0: greedy completions of "
            "a group are all alike. Set it, the released recipe uses 0.7."
        )
    of_kl = None if module.reward is None else module.reward.find_kl(sampling.temperature)
    if of_kl is not None and of_kl.teacher_temperature != sampling.temperature:
        setting = "reward.teacher_temperature" if of_kl is module.reward else "reward.temperature"
        rank_zero_warn(
            f"sampling.temperature is {sampling.temperature}, but {setting} is "
            f"{of_kl.teacher_temperature}: the k1 and k3 estimates of the KL are then biased."
        )
    if asynchronous and module.answer_weight:
        raise InputError(
            "With an answer term rollouts.asynchronous must be false: the term is not corrected for "
            "completions of older weights. Set it to false, or model.answer_weight to 0."
        )
    if asynchronous and module.max_staleness < 1:
        raise InputError(
            "rollouts.asynchronous brings completions that are one step old, but model.max_staleness is "
            f"{module.max_staleness}. Set it to 1."
        )
    weighted = module.importance_sampling not in (None, "auto") or module.max_staleness > 0
    if weighted and not sampler.knows_log_probs:
        raise InputError(
            "Importance sampling and stale rollouts need the log-probs that tokens were sampled with, "
            f"but {sampling} and {type(sampler.dispatcher.engine).__name__} do not give them: a truncated "
            "distribution is not the policy's. Set top_p 1, top_k 0, min_p 0, repetition_penalty 1 and "
            "the engine's log_probs to worker; or set model.importance_sampling to null and "
            "model.max_staleness to 0."
        )


def require_comparable(val_completions: int, trainer: Trainer, module: OnPolicyModule) -> None:
    """Check that each held-out problem gets several completions, if the reward compares them.

    Raises:
        InputError: If it gets only one.
    """
    if (
        module.reward is not None
        and module.reward.compares
        and val_completions < 2
        and len(get_stratos_data(trainer).val_items)
    ):
        raise InputError(
            f"{type(module.reward).__name__} compares the completions of a problem, but "
            f"rollouts.val_completions is {val_completions}: each held-out one would be the best of its "
            "problem. Raise it to 2 or more."
        )


def announce_weights(sampler: Sampler, module: OnPolicyModule) -> None:
    """Say which importance weights the setting "auto" stands for; see `Sampler.importance_weights`."""
    engine, sampling = sampler.dispatcher.engine, sampler.settings.sampling
    if module.importance_sampling != "auto" or engine.placement is Placement.SHARED_WEIGHTS:
        return
    kind = type(engine).__name__
    if weights := sampler.importance_weights:
        announce(
            f"model.importance_sampling auto: {weights}, since {kind} samples with a copy of the weights"
        )
    elif sampler.knows_log_probs:
        announce("model.importance_sampling auto: none, since rollouts are asynchronous")
    else:
        rank_zero_warn(
            f"model.importance_sampling auto: none, since {kind} does not report the log-probs that tokens "
            f"are sampled with, or the distribution is truncated ({sampling}). What differs between {kind} "
            "and the trainer stays uncorrected. Set model.importance_sampling to null if you accept that."
        )


def require_gathering(engine: Engine, trainer: Trainer) -> None:
    """Check that all ranks gather sharded weights for a push; otherwise rank 0 would wait forever.

    Raises:
        InputError: If the engine is a server and has only the `gather_weights` of `Engine`, which
            gathers nothing.
    """
    sharded = trainer.world_size > 1 and get_sharding(trainer.strategy).sharded
    gathers = type(engine).gather_weights is not Engine.gather_weights
    if sharded and engine.placement is Placement.SERVER and not gathers:
        raise InputError(
            f"With weights in shards on {trainer.world_size} processes, a server must "
            f"gather them on every rank, but {type(engine).__name__} does not write gather_weights. Write it "
            "as in rlt_lightning.engines.VLLMEngine, or use a strategy that keeps weights whole."
        )


def require_room(module: OnPolicyModule, data: StratosDataModule, max_completion_length: int) -> None:
    """Check that every problem and its completion, given or of full length, fit into each model's context.

    Raises:
        InputError: Naming the row, the lengths in tokens and the settings that would make room.
    """
    problems = data.all_items
    given = problems.sum_columns("completion_ids")
    for role, name, columns in module.list_readers():
        context, fixed = context_length(name, module.trust_remote_code), problems.sum_columns(*columns)
        needed = fixed + np.where(given > 0, given, max_completion_length)
        for index in np.flatnonzero(needed > context)[:1]:
            row = problems.rows[index]
            if given[index]:
                raise InputError(
                    f"Prompt and completion must fit into the {role}'s context of {context} tokens, but row "
                    f"{row} needs {needed[index]}. Lower data.max_length: longer rows are counted and left "
                    "out."
                )
            raise InputError(
                f"Prompt and completion must fit into the {role}'s context of {context} tokens, but row "
                f"{row} needs {fixed[index]} + max_completion_length {max_completion_length}. Lower "
                "rollouts.sampling.max_completion_length or data.max_prompt_length."
            )


def require_responses_fit(
    problems: list[EvaluationProblem], sampling: Sampling, context: int, advice: str
) -> None:
    """Check that each question and a response of full length fit into a context, in tokens.

    Args:
        problems: The problems.
        sampling: Limits the response.
        context: The model's context.
        advice: The remedy if they do not fit.

    Raises:
        InputError: Naming the longest question, the lengths and the advice.
    """
    longest = max(problems, key=lambda problem: len(problem.prompt))
    if len(longest.prompt) + sampling.max_completion_length > context:
        raise InputError(
            f"Question and response must fit into the model's context of {context} tokens, but "
            f"{longest.id} needs {len(longest.prompt)} + max_completion_length "
            f"{sampling.max_completion_length}. {advice}"
        )
