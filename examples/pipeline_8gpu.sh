#!/usr/bin/env bash
# The released recipe on 8 GPUs of 80 GB: Qwen2.5-7B teacher, Bespoke-Stratos-7B student, 17K problems. Needs the
# extra vllm (docs/hardware.md), access to the Hugging Face hub and about 1 TB of disk. After a crash run it again: it
# skips finished stages and resumes the interrupted one. `rlt plan` says beforehand whether a training stage fits.
# It trains with FSDP2; STRATEGY=zero3 trains with DeepSpeed's ZeRO-3, as the paper's code did. TRAIN has options of
# stages 1, 2 and 4, EVALUATE those of stage 5, ALL those of all stages; ROWS=FOLDER replaces the hub's problems, and
# UNTIL=teacher_sft ends it after that stage. We have not run it yet.
#
#   examples/pipeline_8gpu.sh [FOLDER]      # runs/released by default
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/released} strategy=${STRATEGY:-fsdp2}
rlt=.venv/bin/rlt
source examples/stage.sh

stage teacher_sft model/config.json $rlt fit --config recipe_7b/warmup --config "hardware/$strategy" \
    --trainer.devices 8 ${ROWS:+--data.source "$ROWS"} ${TRAIN:-}
stage teacher_rlt model/config.json $rlt fit --config recipe_7b/rlt --config "hardware/${strategy}_8gpu" \
    --model.teacher "$run/teacher_sft/model" ${ROWS:+--data.source "$ROWS"} ${TRAIN:-}
stage generate README.md $rlt predict --config recipe_7b/generate --config hardware/generate_8gpu \
    --model.teacher "$run/teacher_rlt/model" ${ROWS:+--data.source "$ROWS"}
stage student_sft model/config.json $rlt fit --config recipe_7b/sft --config "hardware/$strategy" \
    --trainer.devices 8 --data.source "$run/generate/distillation.jsonl" ${TRAIN:-}
stage evaluate evaluation.json $rlt test --config recipe_7b/evaluate_paper --config hardware/evaluate_8gpu \
    --model.pretrained "$run/student_sft/model" ${EVALUATE:-}
cat "$run/evaluate/evaluation.md"
