"""Stage 2, like the config laptop/rlt: RLT trains the teacher of stage 1, whose folder records its format."""

from rlt_lightning import OptimizerConfig, RLTModule, RolloutCallback, Sampling, TeacherRLData, Trainer
from rlt_lightning.callbacks import Checkpoint, ReferenceSync

optimizer = OptimizerConfig(lr=2e-4, scheduler="linear", warmup_frac=0.1)
module = RLTModule("runs/warmup/model", "miniature", optimizer=optimizer, micro_batch_tokens=4096)
data = TeacherRLData("chains", num_embedded_rows=512, prompts_per_step=8, student_system_prompt="")
callbacks = [
    RolloutCallback(sampling=Sampling(temperature=0.7, max_completion_length=48)),
    ReferenceSync(),
    Checkpoint(every_n_train_steps=10),
]
trainer = Trainer("runs/teacher", max_steps=40, accelerator="cpu", callbacks=callbacks)
trainer.fit(module, data)
