"""Every metric and reward term once, for the report, the W&B workspace, explain and docs/metrics.md."""

from rlt_lightning.records.catalogue.entry import Metric, reward_term
from rlt_lightning.records.catalogue.registry import base, figures, held_out, metric_of, metrics, register

__all__ = ["Metric", "base", "figures", "held_out", "metric_of", "metrics", "register", "reward_term"]
