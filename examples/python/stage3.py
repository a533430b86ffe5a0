"""Stage 3, like the config laptop/generate: the teacher explains new problems."""

from rlt_lightning import RLTModule, RolloutCallback, Sampling, TeacherRLData, Trainer
from rlt_lightning.callbacks import DistillationWriter

module = RLTModule("runs/teacher/model", "miniature")
data = TeacherRLData(
    "chains",
    seed=2,  # other problems
    num_embedded_rows=512,
    prompts_per_step=64,
    student_context=512,  # tokens
    student_system_prompt="",
)
rollouts = RolloutCallback(sampling=Sampling(temperature=0.7, max_completion_length=48))
trainer = Trainer("runs/traces", accelerator="cpu", callbacks=[rollouts, DistillationWriter("first")])
trainer.predict(module, data)
