"""What a step costs, and what the data of supervised fine-tuning count."""

from __future__ import annotations

from rlt_lightning.run.catalogue.entry import Metric

PERFORMANCE = (
    Metric(
        "perf/generate_s",
        "generate",
        "seconds",
        "sampling; with vLLM workers, the wait for their completions while there is nothing to score",
        "usually the largest part; a fast engine shrinks it, `rollouts.asynchronous` hides it",
        logged_by="RLT, OPD",
        drawn="stack",
    ),
    Metric(
        "perf/push_s",
        "push",
        "seconds",
        "bringing the weights to the workers: their health check, the wait for lost workers if none is "
        "left, the push, the verification. About 0 with `HFEngine`",
        "grows with the model; jumps when a worker comes back. Large: see [pushing weights](weights.md)",
        logged_by="RLT, OPD",
        drawn="stack",
    ),
    Metric(
        "perf/score_s",
        "score",
        "seconds",
        "forwards of the student and, with a KL penalty, of the reference; of the teacher where the rollouts "
        "lack its log-probs",
        "grows with `max_length`; a part of it may be [hidden](rollouts.md#scoring-while-sampling)",
        logged_by="RLT",
        drawn="stack",
    ),
    Metric(
        "perf/train_s",
        "train",
        "seconds",
        "the policy's forward, backward and optimizer step",
        "jumps: memory pressure, or another process on the device",
        logged_by="all",
        drawn="stack",
    ),
    Metric(
        "perf/score_hidden_frac",
        "Hidden scoring",
        "fraction",
        "fraction of the score phase in which workers still sampled completions of the same step",
        "with workers on other GPUs near 1: scoring then costs no time. 0 with `HFEngine`, with workers that "
        "take turns, and where asynchronous rollouts are complete when the step begins. Low otherwise: "
        "completions end together, or scoring takes longer than sampling",
        "0 to 1",
        section="Time and memory",
        logged_by="RLT",
    ),
    Metric(
        "perf/evaluate_s",
        "Time of an evaluation",
        "seconds",
        "an evaluation of the model while it trains; no part of the step's other times",
        "small compared with the steps between two evaluations. Large: lower `max_rows` or `num_samples`, or "
        "raise `every_n_steps`",
        section="Time and memory",
        logged_by="`EvaluateEvery`",
    ),
    Metric(
        "perf/generate_peak_gib",
        "Memory while sampling",
        "GiB",
        "most memory in use during the phase: allocated on the GPU or, on a CPU, resident in the process "
        "(off Linux, or where /proc is read-only: since the start of the run)",
        "near the device's memory: lower `HFEngine`'s `max_sequences`",
        section="Time and memory",
        logged_by="RLT, OPD",
    ),
    Metric(
        "perf/push_peak_gib",
        "Memory while pushing weights",
        "GiB",
        "most memory in use during the phase",
        "above the other phases by more than two buckets: see [pushing weights](weights.md)",
        section="Time and memory",
        panel="perf/generate_peak_gib",
        logged_by="RLT, OPD",
    ),
    Metric(
        "perf/score_peak_gib",
        "Memory while scoring",
        "GiB",
        "most memory in use during the phase",
        "near the device's memory: lower `model.micro_batch_tokens`",
        section="Time and memory",
        panel="perf/generate_peak_gib",
        logged_by="RLT",
    ),
    Metric(
        "perf/train_peak_gib",
        "Memory while training",
        "GiB",
        "most memory in use during the phase",
        "near the device's memory: `model.gradient_checkpointing`, lower `model.micro_batch_tokens`",
        section="Time and memory",
        panel="perf/generate_peak_gib",
        logged_by="all",
    ),
    Metric(
        "perf/tokens_per_s",
        "Speed",
        "tokens/s",
        "RLT and OPD: sampled tokens per second of all phases. SFT: tokens, prompts included, per second of "
        "training",
        "steady",
        section="Time and memory",
        logged_by="all",
    ),
    Metric(
        "perf/generate_tokens_per_s",
        "Speed of sampling",
        "tokens/s",
        "sampled tokens per second of the phase",
        "steady; with `rollouts.asynchronous` only the waiting time counts",
        logged_by="RLT, OPD",
    ),
    Metric(
        "perf/score_tokens_per_s",
        "Speed of scoring",
        "tokens/s",
        "tokens that models computed (a shared prompt counts once) per second of the phase",
        "steady",
        panel="perf/generate_tokens_per_s",
        logged_by="RLT",
    ),
    Metric(
        "perf/train_tokens_per_s",
        "Speed of training",
        "tokens/s",
        "tokens that the policy computed per second of the phase; a token counts once, though forward and "
        "backward both compute it",
        "steady",
        panel="perf/generate_tokens_per_s",
        logged_by="all",
    ),
    Metric(
        "perf/mfu",
        "Model FLOP utilisation",
        "fraction",
        "model FLOP utilisation of the train phase: floating-point operations per second of forward and "
        "backward on the computed tokens, without the recomputation of gradient checkpointing, as a fraction "
        "of `perf/peak_tflops`",
        "on a GPU 0.3 to 0.5 with long rows. Low: rows are short, raise `model.micro_batch_tokens`",
        "0 to 1, or above if the machine was busy when the peak was measured",
        logged_by="all",
    ),
    Metric(
        "perf/peak_tflops",
        "Peak speed of the device",
        "TFLOP/s",
        "the peak for `perf/mfu`: the rate of a large matrix product in the training "
        "precision, measured when the fit starts",
        "far below the card's data sheet: it is throttled or was shared when the fit started, and `perf/mfu` "
        "is then too high",
        logged_by="all",
    ),
    Metric(
        "perf/padding_frac",
        "Wasted tokens",
        "fraction",
        "fraction of the tokens of the train phase that were computed for nothing. Rows are never padded; a "
        "process with too few sequences runs one again with weight 0",
        "0. Above: a process has fewer sequences than others have rows, raise `model.micro_batch_tokens`",
        "0 to 1",
        logged_by="all",
    ),
    Metric(
        "perf/rank_imbalance",
        "Imbalance of the ranks",
        "ratio",
        "tokens of the process that has most of them, as a multiple of the mean over processes: completions "
        "are divided over processes by their tokens",
        "near 1, and 1 with one process. Above 1.05: there are too few completions for so many processes, or "
        "one is as long as many others together",
        "1 or above",
        panel="perf/padding_frac",
        logged_by="RLT, OPD",
    ),
    Metric(
        "perf/shared_frac",
        "Shared tokens",
        "fraction",
        "fraction of the train phase's tokens that shared prompts saved",
        "RLT: near (G − 1) / G times the prompts' fraction of the tokens. SFT: 0. RLT, 0: `model.layout` or "
        "`model.attn_implementation` says so, or the model fell back, see the warning at the start",
        "0 to 1",
        panel="perf/padding_frac",
        logged_by="all",
    ),
)
DATA = (
    Metric(
        "data/completion_tokens",
        "Tokens in the loss",
        "tokens",
        "tokens that the loss of this step counts",
        "varies with the rows; always small: traces are empty or `max_length` keeps the long rows out, see "
        "`data_report.json`",
        section="Length and form",
    ),
    Metric("data/epoch", "Epochs", "passes", "passes over the data that were complete before this step"),
)
