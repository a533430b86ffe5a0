"""Lightning callbacks.

`RolloutCallback` and `ResponseCallback` sample what is scored or judged, and `ReferenceSync` updates the
reference model. All others only observe: training is the same without them. `EvaluateEvery` samples answers
too, but nothing trains on them.
"""

from rlt_lightning.callbacks.alarms import Alarms
from rlt_lightning.callbacks.checkpoint import Checkpoint
from rlt_lightning.callbacks.evaluate_every import EvaluateEvery
from rlt_lightning.callbacks.evaluation import EvaluationWriter, ResponseCallback
from rlt_lightning.callbacks.export import ModelExporter
from rlt_lightning.callbacks.predictions import DistillationWriter
from rlt_lightning.callbacks.recorder import RolloutRecorder
from rlt_lightning.callbacks.reference import ReferenceSync
from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.rollouts.dynamic_sampling import DynamicSampling

# A logger: whoever builds a Trainer needs it together with the callbacks.
from rlt_lightning.run.metrics_csv import MetricsCSV

__all__ = [
    "Alarms",
    "Checkpoint",
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
]
