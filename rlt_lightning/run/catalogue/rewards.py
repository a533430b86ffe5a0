"""The reward, its terms, and what the student makes of the tokens."""

from __future__ import annotations

from dataclasses import replace

from rlt_lightning.run.catalogue.entry import Metric, reward_term

REWARD = (
    Metric(
        "reward/mean",
        "Reward",
        "nats",
        "mean reward of the completions of a step",
        "rises over tens of steps. Compare only runs with the same reward options and the same problems: "
        "prompts differ from step to step, so single steps go up and down",
        section="Reward",
        column="reward",
        label="reward",
        held_out="rises with `reward/mean`. Flat while that rises: the teacher learns its training problems "
        "by heart",
    ),
    reward_term(
        "solution",
        "Solution term",
        "solution_weight · r_SS: how likely the student finds the solution; with `reward.baseline: empty` "
        "how much likelier than without an explanation",
        "rises towards 0, with a baseline above 0. Falls: explanations mislead the student",
        bounds="≤ 0 without a baseline",
        column="solution_log_prob_reward",
        label="solution term",
    ),
    reward_term(
        "baseline",
        "Solution without an explanation",
        "r_SS of an empty explanation, with `reward.baseline: empty`; `reward/solution` is then "
        "solution_weight · (r_SS − this)",
        "the same for a problem at every step, since the student is frozen: it changes with the problems. "
        "Near 0: these problems need no explanation",
        bounds="≤ 0",
        column="baseline",
        label="without an explanation",
    ),
    reward_term(
        "kl",
        "KL term",
        "−kl_weight · r_KL: how natural the student finds the explanation",
        "below 0 on average; rises towards 0, or holds while `reward/solution` rises. Keeps falling: "
        "explanations drift away from what the student would write. Stays above 0: r_KL is negative, see "
        "the warning in [method.md](method.md#the-kl-estimator)",
        label="KL term",
    ),
    reward_term(
        "format",
        "Format term",
        "format penalty: `format_penalty` for a completion that is empty or not closed, else 0",
        "towards 0. At `format_penalty`: no explanation is closed and non-empty",
        label="format term",
    ),
    reward_term(
        "correct",
        "Correct answers",
        "fraction of the answers that are right, well-formed or not",
        "rises. 0 or 1 in every group: nothing to learn from, see `reward/zero_std_groups`; take easier or "
        "harder problems. On held-out problems it is their accuracy",
        unit="fraction",
        bounds="0 to 1",
        column="correct",
        label="correct",
        table="correctness",
    ),
    reward_term(
        "formatted",
        "Well-formed answers",
        "fraction of the answers with thought and solution between their tags",
        "near 1 after a cold start. Low: fine-tune the model on the format first (stage 4)",
        unit="fraction",
        bounds="0 to 1",
        column="formatted",
        label="well-formed",
        table="correctness",
    ),
    reward_term(
        "timed_out",
        "Judging broken off",
        "fraction of the answers whose judging was stopped at its limit of time or memory; they count as "
        "wrong",
        "0. Above: look at these answers in `rollouts.jsonl`",
        unit="fraction",
        bounds="0 to 1",
        column="timed_out",
        label="judging broken off",
        table="correctness",
    ),
    Metric(
        "reward/std",
        "Spread over all completions",
        "nats",
        "standard deviation over all completions of the step, whatever their prompt",
        "well above 0; mostly the difference between prompts",
        section="Reward",
        drawn="band",
    ),
    Metric(
        "reward/group_std",
        "Spread within groups",
        "nats",
        "standard deviation within a group, mean over groups",
        "well above 0: the teacher learns from these differences. Towards 0: the completions of a prompt "
        "are all alike, see `policy/entropy`",
        section="Reward",
        panel="reward/std",
    ),
    Metric(
        "reward/zero_std_groups",
        "Groups without spread",
        "groups",
        "groups in which every completion earned the same, so they teach nothing",
        "0. As many as prompts: the only gradient is the KL penalty's. `rollouts.dynamic_sampling` replaces "
        "them",
        section="Reward",
    ),
    Metric(
        "reward/solution_log_prob_mean",
        "Solution log-prob as it enters r_SS",
        "nats",
        "mean over solution tokens of the student's log-prob, as it enters r_SS",
        "rises",
        "a probability with `normalise_log_probs: exp`",
        section="Reward",
        column="solution_log_prob_mean",
        label="solution log-prob, mean",
    ),
    Metric(
        "reward/solution_log_prob_min",
        "Hardest solution token as it enters r_SS",
        "nats",
        "the hardest solution token, as it enters r_SS",
        "rises; far below its usual value: a token that the student cannot expect, often a formatting token",
        "a probability with `normalise_log_probs: exp`",
        section="Reward",
        column="solution_log_prob_min",
        label="hardest solution token",
        panel="reward/solution_log_prob_mean",
    ),
    Metric(
        "reward/kl_mean",
        "KL as it enters r_KL",
        "nats",
        "mean over think tokens of the KL, as it enters r_KL",
        "small and steady",
        "below 1 with `normalise_kl: one_minus_exp`",
        section="Reward",
        column="kl_mean",
        label="KL, mean",
    ),
    Metric(
        "reward/kl_max",
        "Least natural token as it enters r_KL",
        "nats",
        "the least natural think token, as it enters r_KL",
        "a few nats; tens: tokens that the student never writes",
        "below 1 with `normalise_kl: one_minus_exp`",
        section="Reward",
        column="kl_max",
        label="KL, largest",
        panel="reward/kl_mean",
    ),
)
STUDENT = (
    Metric(
        "student/solution_log_prob_mean",
        "Solution tokens, mean log-prob",
        "nats",
        "mean over solution tokens of the student's log-prob, raw",
        "rises. −ln V, about −11, is guessing",
        "≤ 0",
        section="Reward",
    ),
    Metric(
        "student/solution_log_prob_min",
        "Hardest solution token",
        "nats",
        "log-prob of the hardest solution token, raw",
        "rises",
        "≤ 0",
        section="Reward",
        panel="student/solution_log_prob_mean",
    ),
    Metric(
        "student/kl_mean",
        "KL, mean over think tokens",
        "nats",
        "mean over think tokens of the KL estimate, raw",
        "small. With k1 it is noisy and may be negative; negative for long, or with k3 far above k1: the "
        "estimator does not fit how the text was sampled",
        section="Reward",
    ),
    Metric(
        "student/kl_max",
        "KL, least natural token",
        "nats",
        "largest KL estimate of a think token, raw",
        "a few nats. With k3, thousands: one token that the student finds almost certain and the teacher "
        "almost impossible",
        section="Reward",
        panel="student/kl_mean",
    ),
)
# What each of several students gives: the terms that are computed with it.
OF_STUDENT = ("reward/mean", "reward/solution", "reward/kl", *(m.name for m in REWARD[-4:] + STUDENT))


def of_student(label: str) -> tuple[Metric, ...]:
    """Return the entries of one of several students, NAME/LABEL for each metric of `OF_STUDENT`.

    In W&B each shares the panel of NAME, which combines the students.
    """
    return tuple(
        replace(
            metric,
            name=f"{metric.name}/{label}",
            title=f"{metric.title}, {label}",
            meaning=f"`{metric.name}` by the student {label}",
            healthy=f"as `{metric.name}`",
            column=metric.column and f"{metric.column}/{label}",
            label=metric.label and f"{metric.label}, {label}",
            panel=metric.panel or metric.name,
            held_out=metric.held_out and f"as `{metric.name}`",
            table="students",
        )
        for metric in (*REWARD, *STUDENT)
        if metric.name in OF_STUDENT
    )
