"""Every metric and reward term once, for the report, the W&B workspace, explain and docs/metrics.md.

rewards.py       reward/, student/
policy.py        policy/, rollout/
distillation.py  distill/
performance.py   perf/, data/
evaluation.py    eval/
columns.py       columns of the files of completions whose mean is no metric
"""

from rlt_lightning.run.catalogue.entry import Metric, reward_term
from rlt_lightning.run.catalogue.registry import base, figures, held_out, metric_of, metrics, register

__all__ = ["Metric", "base", "figures", "held_out", "metric_of", "metrics", "register", "reward_term"]
