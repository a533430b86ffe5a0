"""On-policy distillation: how far the student is from the teacher that judges its answers."""

from __future__ import annotations

from rlt_lightning.run.catalogue.entry import Metric

DISTILLATION = (
    Metric(
        "distill/divergence",
        "Divergence from the teacher",
        "nats",
        "divergence of student and teacher, mean over judged tokens; with `estimator: sampled` the mean "
        "log-ratio log p_S − log p_T, an estimate of reverse KL",
        "falls, then flat. Rises: the learning rate is too high, or answers wander to where the teacher "
        "knows no way back",
        section="Reward",
        held_out="falls with it. Rises while that falls: overfitting",
    ),
    Metric(
        "distill/judged_tokens",
        "Judged tokens",
        "tokens",
        "tokens of an answer that the teacher judges, mean over answers",
        "near `rollout/length_mean` with the view hint; of the view explanation the thought",
        column="judged_tokens",
    ),
    Metric(
        "distill/judged_frac",
        "Judged part",
        "",
        "judged tokens as a part of all sampled tokens",
        "as the lengths of thought and answer say",
        "0 to 1",
    ),
    Metric(
        "distill/unjudged_frac",
        "Answers without a judgement",
        "",
        "part of answers in which the teacher judges nothing: they do not begin with a thought in tags",
        "near 0. Above 0.1: the student does not know its tags; fine-tune it on some traces first",
        "0 to 1",
        section="Length and form",
    ),
)
