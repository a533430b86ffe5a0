"""Rewards of a completion: by a student, by the solution's likelihood, or by the completion's text."""

from rlt_lightning.rewards.base import Reward
from rlt_lightning.rewards.correctness import CorrectnessReward, TextReward
from rlt_lightning.rewards.likelihood import (
    LikelihoodReward,
    LogProbReward,
    NOVERReward,
    RLPRReward,
    SolutionScores,
    VeriFreeReward,
)
from rlt_lightning.rewards.rlt import RLTReward

__all__ = [
    "CorrectnessReward",
    "LikelihoodReward",
    "LogProbReward",
    "NOVERReward",
    "RLPRReward",
    "RLTReward",
    "Reward",
    "SolutionScores",
    "TextReward",
    "VeriFreeReward",
]
