"""The figures of a run as torchmetrics: of a step, of held-out rows, and how often answers are right."""

from rlt_lightning.metrics.answers import AnswerFigures
from rlt_lightning.metrics.figures import HeldOutFigures, StepMeans, WeightedMean

__all__ = ["AnswerFigures", "HeldOutFigures", "StepMeans", "WeightedMean"]
