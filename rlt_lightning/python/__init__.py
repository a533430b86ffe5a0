"""The way in from Python: a Trainer with what every run has, a Teacher to ask, and plain functions."""

from rlt_lightning.python.teacher import Explanation, Score, Teacher, score
from rlt_lightning.python.trainer import Trainer

__all__ = ["Explanation", "Score", "Teacher", "Trainer", "score"]
