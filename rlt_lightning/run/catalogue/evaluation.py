"""The figures of an evaluation, after training or while a student trains, and the names of the sets."""

from __future__ import annotations

from rlt_lightning.run.catalogue.entry import Metric

SET_TITLES = {
    "aime24": "AIME 2024",
    "aime25": "AIME 2025",
    "math500": "MATH-500",
    "gpqa_diamond": "GPQA Diamond",
    "gsm8k": "GSM8K",
    "amc23": "AMC 2023",
    "countdown": "Countdown",
    "arithmetic": "arithmetic",
    "chains": "last-digit chains",
    "word_sums": "three-step word sums",
}
# Figures that there are over all sets too, as eval/overall/NAME.
OVERALL_FIGURES = ("pass_at_1", "standard_error", "pass_at_k", "maj_at_k")
EVALUATION = (
    Metric("eval/SET/num_problems", "problems", "problems", "evaluated problems"),
    Metric(
        "eval/SET/pass_at_1",
        "pass@1",
        "fraction",
        "mean fraction of a problem's responses that are right",
        bounds="0 to 1",
    ),
    Metric(
        "eval/SET/standard_error",
        "s.e.",
        "fraction",
        "standard error of `pass_at_1` over problems; NaN for a single problem",
        "small compared with the differences that you want to see; otherwise raise `num_samples`",
        "0 to 1",
    ),
    Metric(
        "eval/SET/pass_at_k",
        "pass@k",
        "fraction",
        "fraction of the problems with at least one right response of k",
        "above `pass_at_1`",
        "0 to 1",
    ),
    Metric(
        "eval/SET/maj_at_k",
        "maj@k",
        "fraction",
        "fraction of the problems whose most frequent answer is right",
        "above `pass_at_1` if that is high",
        "0 to 1",
    ),
    Metric(
        "eval/SET/formatted_frac",
        "formatted",
        "fraction",
        "fraction of the responses with thought and solution between their tags",
        "near 1 for a trained student. Near 0: `data.tags` are not those of its training, or the model knows "
        "no tags",
        "0 to 1",
    ),
    Metric(
        "eval/SET/timed_out_frac",
        "broken off",
        "fraction",
        "fraction of the responses whose judging was stopped; they count as wrong",
        "near 0. Above: raise `judge_deadline_s` on a slow machine",
        "0 to 1",
    ),
    Metric(
        "eval/SET/truncated_frac",
        "cut off",
        "fraction",
        "fraction of the responses that reached the token limit; not for given responses",
        "near 0. High: raise `sampling.max_completion_length` or, in `rlt test`, force a budget",
        "0 to 1",
    ),
    Metric(
        "eval/SET/tokens_mean",
        "tokens",
        "tokens",
        "sampled tokens of a response; with a forced budget, appended tokens too",
    ),
)
TITLES = {metric.name.removeprefix("eval/SET/"): metric.title for metric in EVALUATION}
