"""Lightning callbacks.

`RolloutCallback` and `ResponseCallback` bring what is judged, `ReferenceSync` moves the reference; the others
only observe, `EvaluateEvery` with answers of its own.
"""

from rlt_lightning.callbacks.alarms import Alarms
from rlt_lightning.callbacks.checkpoint import Checkpoint
from rlt_lightning.callbacks.evaluate_every import EvaluateEvery
from rlt_lightning.callbacks.evaluation import EvaluationWriter, ResponseCallback
from rlt_lightning.callbacks.export import ModelExporter
from rlt_lightning.callbacks.predictions import DistillationWriter, ScoreWriter
from rlt_lightning.callbacks.recorder import CompletionsTable, RolloutRecorder
from rlt_lightning.callbacks.reference import ReferenceSync
from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.rollouts.dynamic_sampling import DynamicSampling

# A logger: whoever builds a Trainer needs it together with the callbacks.
from rlt_lightning.run.metrics_csv import MetricsCSV

__all__ = [
    "Alarms",
    "Checkpoint",
    "CompletionsTable",
    "DistillationWriter",
    "DynamicSampling",
    "EvaluateEvery",
    "EvaluationWriter",
    "MetricsCSV",
    "ModelExporter",
    "ReferenceSync",
    "ResponseCallback",
    "RolloutCallback",
    "RolloutRecorder",
    "ScoreWriter",
]
