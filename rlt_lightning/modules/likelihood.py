"""Likelihood rewards: a student learns to think by how probable the reference solution becomes. No checker.

    prompt of stage 5, <think>   thought, </think>     <solution> reference solution
    ──────────────────────────   ────────────────      ─────────────────────────────
    given                        sampled: GRPO          scored by `model.scorer`: the reward r(z)
                                                       trained too, where the scorer is the policy

    grad E r(z) = E [ r(z) grad log pi(z) ]  +  E [ grad r(z) ]
                    `PolicyGradient`             `AnswerTerm` (modules/losses.py)

The loop is that of `RLTModule`. The rewards, and what a scorer reads for them, are in
rewards/likelihood.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Unpack

from lightning.pytorch.utilities import rank_zero_warn

from rlt_lightning.datamodules.stages import StudentLikelihoodData
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import Dtype
from rlt_lightning.modules.base import PolicyModule, follow_options
from rlt_lightning.modules.losses import AnswerTerm, LossTerm
from rlt_lightning.modules.on_policy import OnPolicyOptions
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.numerics.advantages import AdvantageEstimator, LeaveOneOutAdvantages, ShuffledAdvantages
from rlt_lightning.numerics.importance import TruncatedImportanceSampling
from rlt_lightning.numerics.losses import DrGRPOLoss, PolicyLoss
from rlt_lightning.rewards import LikelihoodReward, LogProbReward
from rlt_lightning.rewards.students import StudentNames, Students, split_student_setting
from rlt_lightning.rollouts.step import POLICY, REFERENCE
from rlt_lightning.types import InputError

# Arguments of RLTModule that this module gives it.
RENAMED = ("teacher", "student", "students", "student_reduction", "student_dtype", "teacher_log_probs")


class LikelihoodModule(RLTModule):
    """Train a student to think so that the reference solution becomes probable (arXiv:2602.03979).

    Args:
        pretrained: Model to train: local folder, hub id, or a name such as miniature; a student that knows
            its tags.
        scorer: Who reads the solution: "policy", the weights that train, as they are at this step;
            "reference", the initial ones, or as ReferenceSync moves them; or the name of a frozen model,
            with any tokenizer; or several, as a list or as weights by name: the mean of their rewards counts.
        reward: What the log-probs of the solution are worth: LogProbReward, RLPRReward, VeriFreeReward,
            NOVERReward, or another LikelihoodReward.
        answer_weight: Weight of the answer term, the gradient of the solution's own score, where the policy
            scores; None: 1 where the reward has the term, else 0.
        group_size: Thoughts per problem.
        advantages: How rewards of a group become advantages; None: LeaveOneOutAdvantages().
        policy_loss: None: the plain policy gradient, DrGRPOLoss without KL and with length 1.
        importance_sampling: See `RLTModule`. The answer term is not weighted.
        scorer_dtype: Type of the weights of a scorer by name.
        options: Those of `OnPolicyModule` and `PolicyModule`, such as optimizer, dtype and lora.

    Raises:
        InputError: If settings contradict each other.
    """

    data_classes = (StudentLikelihoodData,)
    reference_role = "the reference"
    reward: LikelihoodReward

    @follow_options
    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        scorer: StudentNames | str = POLICY,
        reward: LikelihoodReward = LogProbReward(),
        answer_weight: float | None = None,
        group_size: int = 8,
        advantages: AdvantageEstimator | None = None,
        policy_loss: PolicyLoss | None = None,
        *,
        importance_sampling: TruncatedImportanceSampling | Literal["auto"] | None = "auto",
        scorer_dtype: Dtype = "float32",
        **options: Unpack[OnPolicyOptions],
    ) -> None:
        scored_by, several = split_student_setting(scorer)
        if several is not None:
            Students.of(None, several, setting="model.scorer")
            if own := {POLICY, REFERENCE} & set(several):
                raise InputError(
                    f"Several scorers must be frozen models, but model.scorer lists {', '.join(own)}. Name "
                    "the model in its place, or set the scorer to it alone."
                )
        super().__init__(
            teacher=pretrained,
            student=pretrained if scored_by in (POLICY, REFERENCE) else scored_by,
            students=several,
            group_size=group_size,
            reward=reward,
            advantages=advantages or LeaveOneOutAdvantages(),
            policy_loss=policy_loss or DrGRPOLoss(kl_coef=0.0, max_completion_length=1),
            importance_sampling=importance_sampling,
            # No options here: no reward asks a teacher, and several scorers count by their mean.
            teacher_log_probs="rollout",
            student_dtype=scorer_dtype,
            student_reduction="mean",
            **options,
        )
        self.save_hyperparameters(logger=False, ignore=RENAMED)
        self.scored_by = scored_by or self.students.describe()
        if self.scored_by in (POLICY, REFERENCE):
            self.students = replace(self.students, model=self.scored_by)
        self.answer_weight = choose_answer_weight(answer_weight, self.scored_by, reward)

    def setup(self, stage: str) -> None:
        """Check, before any model is loaded, that data and settings fit."""
        super().setup(stage)
        settings = self.require_sampler().settings
        if stage == "predict":
            raise InputError(
                "`rlt predict` scores or writes explanations, but LikelihoodModule trains a student. To let "
                "the trained student answer, use `rlt test --config recipe_7b/evaluate`."
            )
        self.require_synchronous(settings.asynchronous)
        if self.answer_weight and isinstance(self.advantages, ShuffledAdvantages):
            rank_zero_warn(
                "ShuffledAdvantages are no control here: the answer term has no advantage, and learns from "
                "every thought. For a control set model.answer_weight to 0."
            )
        num_validated = len(get_stratos_data(self.trainer).val_items)
        if self.reward.compares and num_validated and settings.val_completions < 2:
            raise InputError(
                f"{type(self.reward).__name__} compares the thoughts of a problem, but "
                f"rollouts.val_completions is {settings.val_completions}: each held-out thought would be the "
                "best of its problem. Raise it to 2 or more."
            )

    def require_synchronous(self, asynchronous: bool) -> None:
        """Check that the policy does not score thoughts of older weights.

        Raises:
            InputError: If it would.
        """
        if asynchronous and self.scored_by == POLICY:
            raise InputError(
                "With model.scorer policy rollouts.asynchronous must be false: its thoughts are of older "
                "weights, for which the answer term is not corrected. Set it to false, or model.scorer to "
                "reference or a model."
            )

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return the names of the scorers, if they have weights of their own."""
        return () if self.students.model else super().frozen_names

    @property
    def needs_reference(self) -> bool:
        """See `RLTModule.needs_reference`."""
        return super().needs_reference or self.scored_by == REFERENCE

    def types(self) -> dict[str, str]:
        """Name the scorer's type as the setting is called."""
        named = {"model.scorer_dtype": self.student_dtype} if self.frozen_names else {}
        return PolicyModule.types(self) | named

    def build_metadata(self) -> dict[str, Any]:
        """See `PolicyModule.build_metadata`."""
        metadata = super().build_metadata()
        del metadata["training"]["frozen student"]
        metadata["training"] |= {"scorer": self.scored_by, "weight of the answer term": self.answer_weight}
        return metadata

    # Training

    @property
    def losses(self) -> list[LossTerm]:
        """Add the answer term."""
        if not self.answer_weight:
            return super().losses
        [student] = self.students
        return [*super().losses, AnswerTerm(self.reward, self.policy_loss, student, self.answer_weight)]


def choose_answer_weight(answer_weight: float | None, scorer: str, reward: LikelihoodReward) -> float:
    """Return the weight of the answer term.

    Raises:
        InputError: If there is no such term for this scorer and reward.
    """
    name = type(reward).__name__
    if "thoughts" not in reward.judges:
        raise InputError(
            f"LikelihoodModule needs a reward of the solution's log-probs, such as LogProbReward, but "
            f"model.reward is {name}. Set another."
        )
    if reward.kl_weight and scorer == POLICY:
        raise InputError(
            "model.reward.kl_weight must be 0 where the policy scores, since its KL from itself is 0, but it "
            f"is {reward.kl_weight:g}. Set it to 0, or model.scorer to reference or a model."
        )
    possible = scorer == POLICY and reward.has_answer_term
    if answer_weight is None:
        return float(possible)
    if answer_weight < 0 or (answer_weight and not possible):
        raise InputError(
            "model.answer_weight must be 0 or, with model.scorer policy and a LogProbReward or "
            f"VeriFreeReward, above: it is {answer_weight}, with the scorer {scorer} and {name}. Set it to 0."
        )
    return answer_weight
