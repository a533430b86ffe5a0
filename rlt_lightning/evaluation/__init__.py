"""Stage 5: how often a model answers the problems of evaluation sets right.

    datamodules/evaluation.py        datamodules/evaluation_sets.py: the sets
      problems, a batch at a time
        │
    module.py: test_step             callbacks.py: ResponseCallback brings `sample`, an engine's
      evaluate(sample, problems, judge)
        sample ─▶ responses          protocol.py: seeds, prompts, limits
        judge  ─▶ records            judging/
        │
    callbacks.py: EvaluationWriter   responses.jsonl
        │
    metrics/answers.py              pass@1, pass@k, maj@k of the records, per set and overall
    results.py: summarise, render    evaluation.json, evaluation.md, beside the paper's Table 1

`callbacks/evaluate_every.py` does the same with a student that trains.
"""
