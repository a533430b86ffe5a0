"""Stage 5, like the config laptop/evaluate: how many questions does the student answer right?

Answers are judged in processes that import this file again, so everything it runs is under the `if` below.
"""

from rlt_lightning import EvaluationDataModule, EvaluationModule, ResponseCallback, Sampling, Trainer

if __name__ == "__main__":
    module = EvaluationModule("runs/student/model")
    data = EvaluationDataModule({"chains": None}, max_rows=512, batch_size=128)
    sampling = Sampling(temperature=0.7, max_completion_length=72)
    rollouts = ResponseCallback(sampling=sampling, num_samples=1)
    trainer = Trainer("runs/evaluation", accelerator="cpu", callbacks=[rollouts])
    [figures] = trainer.test(module, data)
    print(f"{figures['eval/chains/pass_at_1']:.1%} of the questions are answered right")
