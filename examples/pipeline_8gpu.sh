#!/usr/bin/env bash
# The released recipe on 8 GPUs of 80 GB: Qwen2.5-7B teacher, Bespoke-Stratos-7B student, 17K problems. Needs vLLM
# in ../vllm (docs/rollouts.md), access to the Hugging Face hub and about 1 TB of disk. After a crash run it again: it
# skips finished stages and resumes the interrupted one. `rlt plan` says beforehand whether a training stage fits.
# It trains with FSDP2. For DeepSpeed, as in the paper's code, put hardware/zero3 in place of hardware/fsdp2,
# hardware/zero3_8gpu in place of hardware/fsdp2_8gpu, and hardware/zero3 after recipe_7b/sft. We have not run it yet.
#
#   examples/pipeline_8gpu.sh [FOLDER]      # runs/released by default
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/released}
rlt=${RLT:-.venv/bin/rlt}
source examples/stage.sh

stage teacher_sft model/config.json $rlt fit --config recipe_7b/warmup --config hardware/fsdp2 --trainer.devices 8
stage teacher_rlt model/config.json $rlt fit --config recipe_7b/rlt --config hardware/fsdp2_8gpu \
    --model.teacher "$run/teacher_sft/model"
stage generate README.md $rlt predict --config recipe_7b/generate --config hardware/generate_8gpu \
    --model.teacher "$run/teacher_rlt/model"
stage student_sft model/config.json $rlt fit --config recipe_7b/sft \
    --data.source "$run/generate/distillation.jsonl"
stage evaluate evaluation.json $rlt test --config recipe_7b/evaluate_paper --config hardware/evaluate_8gpu \
    --model.pretrained "$run/student_sft/model"
cat "$run/evaluate/evaluation.md"
