"""The policy's loss and gradient, and the completions that it samples."""

from __future__ import annotations

from rlt_lightning.run.catalogue.entry import Metric

POLICY = (
    Metric(
        "policy/loss",
        "Loss",
        "nats",
        "RLT: the loss of this step. SFT: mean −log p of a completion token. OPD: `distill/divergence`, but "
        "weighted by importance weights and, with another tokenizer, the whole span's at each of its tokens",
        "SFT and OPD: falls. RLT: says nothing about learning. On policy, with `GRPOLoss`, it is kl_coef · "
        "`policy/kl_ref` up to rounding, since advantages sum to 0",
        section="Policy",
        logged_by="all",
    ),
    Metric(
        "policy/val_loss",
        "Loss on held-out rows",
        "nats",
        "mean −log p of a completion token of the held-out rows",
        "falls, then flat. Rises while `policy/loss` falls: overfitting",
        section="Policy",
        panel="policy/loss",
        logged_by="SFT",
    ),
    Metric(
        "policy/entropy",
        "Entropy",
        "nats",
        "entropy of the next-token distribution at the sampling temperature, mean over sampled tokens; under "
        "OPD over judged ones",
        "falls slowly. Near 0: sampling has collapsed, all completions of a group are alike. Near ln V: the "
        "model is broken",
        "0 to ln V",
        section="Policy",
        logged_by="RLT, OPD with `estimator: sampled`",
    ),
    Metric(
        "policy/kl_ref",
        "KL from the reference",
        "nats",
        "KL from the reference as it enters the loss: k3, times ratio and importance weight with "
        "`unbiased_kl`",
        "0 at the first step, grows, drops at every reference sync. Above 1: learning rate too high",
        "≥ 0",
        section="Policy",
        logged_by="RLT, unless kl_coef is 0",
    ),
    Metric(
        "policy/ratio_mean",
        "Importance ratio",
        "",
        "mean importance ratio of the policy to the policy that sampled",
        "exactly 1 on policy and, stale or not, with importance weights. Stale rollouts without them: near "
        "1; far from it, the engine's log-probs are not the trainer's",
        logged_by="RLT",
    ),
    Metric(
        "policy/clip_frac",
        "Clipped tokens",
        "fraction",
        "fraction of the tokens that clipping limits",
        "exactly 0 on policy and with importance weights. Stale rollouts without them: below 0.2",
        "0 to 1",
        logged_by="RLT",
    ),
    Metric(
        "policy/grad_norm",
        "Gradient norm",
        "",
        "global L2 norm of the gradient, before clipping",
        "steady. Far above `max_grad_norm`: every step is clipped. Towards 0: nothing to learn from. NaN or "
        "infinite stops the run",
        section="Policy",
        logged_by="all",
    ),
    Metric(
        "policy/lr",
        "Learning rate",
        "",
        "learning rate of this step",
        "follows the schedule. With `warmup_frac` above 0 the first step has 0",
        section="Policy",
        logged_by="all",
    ),
)
ROLLOUT = (
    Metric(
        "rollout/length_mean",
        "Length",
        "tokens",
        "sampled tokens per completion, end tag included",
        "steady. Falls to a few: explanations vanish. Rises to the limit: see `rollout/truncated_frac`",
        section="Length and form",
        column="num_tokens",
        label="tokens",
        held_out="as above",
    ),
    Metric(
        "rollout/length_max",
        "Longest completion",
        "tokens",
        "sampled tokens of the longest completion of the step",
        "below `rollouts.sampling.max_completion_length`",
        section="Length and form",
        panel="rollout/length_mean",
    ),
    Metric(
        "rollout/closed_frac",
        "Closed",
        "fraction",
        "fraction of the completions that end properly: with the end tag or, in traditional RL, with an "
        "end-of-sequence token",
        "above 0.9 after a warm-up. Low: the teacher does not know the format; warm it up (stage 1)",
        "0 to 1",
        section="Length and form",
        held_out="as above",
    ),
    Metric(
        "rollout/truncated_frac",
        "Cut off",
        "fraction",
        "fraction of the completions that reached the token limit",
        "near 0. High: raise `max_completion_length`, or as above. Completions that are neither closed nor "
        "truncated ended with an end-of-sequence token",
        "0 to 1",
        section="Length and form",
    ),
    Metric(
        "rollout/empty_frac",
        "Empty",
        "fraction",
        "fraction of the completions without any text",
        "0. Rises: empty explanations have no KL; make `format_penalty` larger",
        "0 to 1",
        section="Length and form",
        panel="rollout/truncated_frac",
    ),
    Metric(
        "rollout/half_character_frac",
        "Half characters",
        "fraction",
        "fraction of the completions that end within a character, whose tokens r_KL leaves out; only with a "
        "student that has another tokenizer",
        "near 0, and at most `rollout/truncated_frac`",
        "0 to 1",
        section="Length and form",
        panel="rollout/truncated_frac",
    ),
    Metric(
        "rollout/staleness",
        "Staleness",
        "steps",
        "optimizer steps between the weights that sampled and the weights that were trained",
        "0; with `rollouts.asynchronous` 1, except for the first step. At most `model.max_staleness`. If a "
        "failed worker's part was sampled later, this is the staleness of the oldest completions",
    ),
    Metric(
        "rollout/mismatch_mean",
        "Mismatch",
        "nats",
        "mean over sampled tokens of |d|, d = the trainer's log-prob − the engine's, at the sampling "
        "temperature",
        "rounding: below 5e-4 where engine and trainer compute in float32, below 0.1 in bfloat16. Above "
        "`model.mismatch_alarm` the run warns: the worker's data type or settings differ, or its weights are "
        "old",
    ),
    Metric(
        "rollout/mismatch_max",
        "Largest mismatch",
        "nats",
        "largest |d| of the step, over all processes",
        "steady. Several nats: one side finds tokens likely that the other does not, from low precision or "
        "a fault",
        panel="rollout/mismatch_mean",
        held_out="as above, but never stale: only the engine's own difference. 0 where the engine sends no "
        "log-probs",
    ),
    Metric(
        "rollout/mismatch_kl",
        "KL of the mismatch",
        "nats",
        "mean over sampled tokens of exp(d) − 1 − d, an estimate (k3) of the KL of the trainer's policy from "
        "the engine's",
        "near 0. Grows: check that `model.importance_sampling` is not null",
        "≥ 0",
    ),
    Metric(
        "rollout/effective_sample_frac",
        "Effective samples",
        "fraction",
        "(Σw)² / (n Σw²) over the n sampled tokens, w = exp(d) without a cap: the fraction of the samples "
        "that remains effective after weighting",
        "near 1. Below 0.5: the weights rest on few tokens",
        "0 to 1",
    ),
    Metric(
        "rollout/sampled_problems",
        "Sampled problems",
        "problems",
        "problems sampled for the step, over all processes: those of the step, and what dynamic "
        "sampling drew in place of others",
        "near `data.prompts_per_step`. Far above: most problems are solved always or never. Near "
        "1 + `max_rounds` times as many: as below",
        section="Dynamic sampling",
        table="dynamic_sampling",
    ),
    Metric(
        "rollout/dropped_groups",
        "Dropped groups",
        "groups",
        "groups that were dropped since their rewards were all equal, over all processes and rounds",
        "below `data.prompts_per_step`. Grows while rewards grow: the model solves most problems; add harder "
        "ones",
        section="Dynamic sampling",
        panel="rollout/sampled_problems",
        table="dynamic_sampling",
    ),
    Metric(
        "rollout/kept_equal_groups",
        "Equal groups that stayed",
        "groups",
        "groups of equal rewards that the step trains on with advantage 0, since the bound was reached, over "
        "all processes",
        "0. As many as problems: the step learns nothing; easier or harder problems, or a shorter cold start",
        section="Dynamic sampling",
        panel="rollout/sampled_problems",
        table="dynamic_sampling",
    ),
    Metric(
        "rollout/refill_rounds",
        "Rounds",
        "rounds",
        "how often the step sampled other problems; each round waits for its longest completion",
        "below `max_rounds`",
        section="Dynamic sampling",
        table="dynamic_sampling",
    ),
    Metric(
        "rollout/dropped_tokens",
        "Dropped tokens",
        "tokens",
        "sampled tokens of the dropped groups, over all processes: what dynamic sampling costs",
        "compare with `rollout/length_mean` times the completions of a step, which are kept",
        section="Dynamic sampling",
        table="dynamic_sampling",
    ),
)
