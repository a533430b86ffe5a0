"""Rewards of a completion: by a student, by the solution's likelihood, or by the completion's text."""

from rlt_lightning.rewards.base import Reward
from rlt_lightning.rewards.correctness import CorrectnessReward, CorrectnessTerms, TextReward
from rlt_lightning.rewards.likelihood import (
    LikelihoodReward,
    LikelihoodTerms,
    LogProbReward,
    NOVERReward,
    RLPRReward,
    SolutionScores,
    VeriFreeReward,
)
from rlt_lightning.rewards.rlt import RLTReward, RLTRewardTerms

__all__ = [
    "CorrectnessReward",
    "CorrectnessTerms",
    "LikelihoodReward",
    "LikelihoodTerms",
    "LogProbReward",
    "NOVERReward",
    "RLPRReward",
    "RLTReward",
    "RLTRewardTerms",
    "Reward",
    "SolutionScores",
    "TextReward",
    "VeriFreeReward",
]
