"""The figures of a run as torchmetrics: for a step, for held-out rows, and for judged answers."""

from rlt_lightning.metrics.answers import AnswerFigures
from rlt_lightning.metrics.figures import HeldOutFigures, StepMeans, WeightedMean

__all__ = ["AnswerFigures", "HeldOutFigures", "StepMeans", "WeightedMean"]
