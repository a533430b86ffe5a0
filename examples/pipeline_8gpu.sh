#!/usr/bin/env bash
# The released recipe on 8 GPUs of 80 GB: Qwen2.5-7B teacher, Bespoke-Stratos-7B student, 17K problems. Needs vLLM
# in ../vllm (docs/rollouts.md), access to the Hugging Face hub and about 1 TB of disk. After a crash run it again: it
# skips finished stages and resumes the interrupted one. `rlt plan` says beforehand whether a training stage fits.
# It trains with FSDP2; the paper's code trained with DeepSpeed: zero3.yaml in place of fsdp2.yaml, zero3_8gpu.yaml in
# place of fsdp2_8gpu.yaml, and zero3.yaml after student_sft.yaml. Not run yet.
#
#   examples/pipeline_8gpu.sh [FOLDER]      # runs/released by default
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/released}
rlt=${RLT:-.venv/bin/rlt}
c=configs o=configs/overlays
source examples/stage.sh

stage teacher_sft model/config.json $rlt fit --config $c/teacher_sft.yaml --config $o/fsdp2.yaml --trainer.devices 8
stage teacher_rlt model/config.json $rlt fit --config $c/teacher_rlt.yaml --config $o/fsdp2_8gpu.yaml \
    --model.teacher "$run/teacher_sft/model"
stage generate README.md $rlt predict --config $c/generate.yaml --config $o/generate_8gpu.yaml \
    --model.teacher "$run/teacher_rlt/model"
stage student_sft model/config.json $rlt fit --config $c/student_sft.yaml \
    --data.source "$run/generate/distillation.jsonl"
stage evaluate evaluation.json $rlt test --config $c/evaluate_paper.yaml --config $o/evaluate_8gpu.yaml \
    --model.pretrained "$run/student_sft/model"
cat "$run/evaluate/evaluation.md"
