"""Stage 4, like the config laptop/sft: a student learns from the explanations."""

from rlt_lightning import OptimizerConfig, SFTModule, StudentSFTData, Trainer

optimizer = OptimizerConfig(2e-4, 1e-4, betas=(0.9, 0.95), scheduler="cosine", warmup_frac=0.1)
module = SFTModule("miniature", optimizer, micro_batch_tokens=4096)
data = StudentSFTData(
    "runs/traces/distillation.jsonl",
    seed=2,
    max_length=256,  # tokens
    tags="r1",
    student_system_prompt="",
)
Trainer("runs/student", max_epochs=3, accelerator="cpu").fit(module, data)
