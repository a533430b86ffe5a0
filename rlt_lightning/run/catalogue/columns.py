"""Columns of rollouts.jsonl and responses.jsonl whose mean is no metric."""

from __future__ import annotations

from rlt_lightning.run.catalogue.entry import Column

COMPLETION = (
    Column("step", "optimizer steps taken, as in `metrics.csv`"),
    Column("row", "number of the problem's row in its source, from 1"),
    Column("completion", "number of the completion in its group, from 0"),
    Column("policy_version", "optimizer steps taken by the weights that sampled the completions of the step"),
    Column("question", "text of the question"),
    Column("solution", "text between the solution tags, separators included"),
    Column(
        "explanation",
        "text of the explanation or, in traditional RL, of the whole answer. It is for people: training uses "
        "token ids",
    ),
    Column("finish_reason", "`stop` (end tag), `eos` (end-of-sequence token) or `length` (token limit)"),
    Column(
        "seed",
        "seed of the completion with vLLM, of its prompt with `HFEngine` ([seeds](rollouts.md#seeds))",
    ),
    Column("worker", "URL of the vLLM worker that sampled it; null with `HFEngine`"),
)
# Columns of traces.jsonl that the report shows as figures.
TRACE = (
    Column("student_tokens", "tokens of the whole text that a student is trained on", "student's tokens"),
    Column("closed", "whether the teacher closed the explanation", "closed"),
    Column("fits", "whether a student's context holds the whole text", "fits a student"),
)
# Columns of `rlt teach`; before: after an empty explanation.
TAUGHT = (
    Column("student_prob_before", "exp(mean log-prob of a solution token), before", "student's p before"),
    Column("student_prob_after", "the same after the explanation", "student's p after"),
    Column("student_log_prob_before", "the student's log-prob of the solution, before", "log-prob before"),
    Column("student_log_prob_after", "the same after the explanation", "log-prob after"),
)
TOKENS = (
    Column(
        "thought_tokens",
        "texts of the tokens that r_KL counts; with `score_given` they begin with the separator at the end "
        "of the prompt. A character of several tokens is at the last of them",
    ),
    Column("thought_kl", "KL estimate of each of them, nats, before clipping and normalisation"),
    Column("solution_tokens", "texts of the tokens that r_SS counts"),
    Column(
        "solution_log_probs",
        "the student's log-prob of each of them, nats, before clipping and normalisation",
    ),
)
RESPONSE = (
    Column(
        "id",
        "id of the problem: the set and the problem's own id or, where the set has none, the number of its "
        "row from 1",
    ),
    Column("set", "name of the set"),
    Column("sample", "number of the response to the problem, from 0"),
    Column("response", "its text, tags included; left out for GPQA"),
    Column("answer", "the answer in it; null if there is none"),
    Column("correct", "whether the answer is equivalent to the reference"),
    Column("formatted", "whether the response has thought and solution between their tags"),
    Column("timed_out", "whether judging was stopped"),
    Column(
        "same_answer", "number of the problem's first response with an equivalent answer: what maj@k counts"
    ),
    Column("num_tokens", "sampled tokens; null for a given response without it"),
    Column(
        "num_thinking_tokens",
        "tokens before the end of the thought, if a budget was forced; else null",
    ),
    Column(
        "finish_reason",
        "`eos` (end-of-sequence token) or `length` (token limit); null for a given response without it",
    ),
)
