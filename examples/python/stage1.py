"""Stage 1, like the config laptop/warmup: the teacher learns its format."""

from rlt_lightning import OptimizerConfig, SFTModule, TeacherSFTData, Trainer

optimizer = OptimizerConfig(3e-4, 1e-4, betas=(0.9, 0.95), scheduler="cosine", warmup_frac=0.1)
module = SFTModule("miniature", optimizer, micro_batch_tokens=4096)
data = TeacherSFTData(
    "chains",
    num_embedded_rows=2048,
    max_length=256,  # tokens
    tags="r1",
    teacher_system_prompt="",
    student_system_prompt="",
)
Trainer("runs/warmup", max_epochs=1, accelerator="cpu").fit(module, data)
