"""A small model, step and GPU with simple numbers, from which tests of `rlt plan` build set-ups."""

from __future__ import annotations

from rlt_lightning.commands.plan import (
    Activations,
    Device,
    LanguageModel,
    Setup,
    Shape,
    Step,
)

# 100 weights: embedding and head of 20 each, 6 blocks of 10. Tied to nothing real, so that sums are easy.
SHAPE = Shape(
    weights=100, trained=100, block=10, num_blocks=6, outside=40, largest=20, largest_trained=20,
    hidden_size=2, num_words=10, head_trained=20, kv_per_token=12,
)  # fmt: skip


MODEL = LanguageModel("model", SHAPE, Activations(1000, 0, 70, 30), weight_bytes=4, product_bytes=4)


STEP = Step(
    num_processes=1, prompts=4, group_size=2, prompt_length=8, completion_length=10, mean_prompt_length=4,
    mean_completion_length=5, micro_batch_tokens=40, layout="auto",
)  # fmt: skip


GPU = Device("H100", memory=10_000, reserved=50)


SETUP = Setup(
    device=GPU, sharding="whole", policy=MODEL, step=STEP, master_bytes=4,
    grad_bytes=4, logits_bytes=16, bucket_numel=30, hf_sequences=8, students=(MODEL,), with_reference=True,
)  # fmt: skip
