#!/usr/bin/env bash
# The released recipe on 8 GPUs of 80 GB: Qwen2.5-7B teacher, Bespoke-Stratos-7B student, 17K problems. Beside RLT's
# student it evaluates the base, Bespoke-Stratos-7B and two controls of the warm-up teacher, which come first. Needs the
# extra vllm (docs/hardware.md), access to the Hugging Face hub and 370 GiB of disk. After a crash run it again: it
# skips finished stages and resumes the interrupted one. `rlt plan` says beforehand whether a training stage fits.
# It trains with FSDP2; STRATEGY=zero3 trains with DeepSpeed's ZeRO-3, as the paper's code did, and FAITHFUL=1 undoes
# our other choices where it can (docs/reproduce.md). TRAIN has options of the rlt fit of all stages, EVALUATE of rlt
# test, ALL of all; ROWS=FOLDER replaces the hub's problems, and UNTIL=teacher_sft ends it after that stage. We have not
# run it yet.
#
#   examples/pipeline_8gpu.sh [FOLDER]      # runs/released by default
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/released} strategy=${STRATEGY:-fsdp2}
rlt=.venv/bin/rlt rl=${FAITHFUL:+--config add/faithful} sft=${FAITHFUL:+--config add/faithful_sft}
source examples/stage.sh

evaluate() {  # evaluate NAME MODEL OPTION...
    stage "evaluate_$1" evaluation.json $rlt test --config recipe_7b/evaluate_paper --config hardware/evaluate_8gpu \
        --model.pretrained "$2" "${@:3}" ${EVALUATE:-}
}
generate() {  # generate NAME TEACHER OPTION...: traces of a teacher
    stage "generate_$1" README.md $rlt predict --config recipe_7b/generate --config hardware/generate_8gpu $rl \
        --model.teacher "$run/$2/model" ${ROWS:+--data.source "$ROWS"} "${@:3}"
}
learn() {  # learn NAME FILE: a student of traces, which is then evaluated
    stage "student_$1" model/config.json $rlt fit --config recipe_7b/sft --config "hardware/$strategy" $sft \
        --trainer.devices 8 --data.source "$2" ${TRAIN:-}
    evaluate "$1" "$run/student_$1/model"
}

# Before all training. Bespoke-Stratos-7B records no format: it is asked as its rows ask.
system=$(.venv/bin/python -c 'import sys; from rlt_lightning.datamodules.sources import read_rows
print(next(read_rows(sys.argv[1]))[1].get("system", ""))' "${ROWS:-bespokelabs/Bespoke-Stratos-17k}")
evaluate base Qwen/Qwen2.5-7B-Instruct --data.student_system_prompt \
    "You are a helpful and harmless assistant. You are Qwen developed by Alibaba. You should think step-by-step."
evaluate bespoke bespokelabs/Bespoke-Stratos-7B ${system:+--data.student_system_prompt "$system"}

# The warm-up: rollout/val_closed_frac in validate/metrics.csv should be above 0.9 (docs/pipeline.md).
stage teacher_sft model/config.json $rlt fit --config recipe_7b/warmup --config "hardware/$strategy" $sft \
    --trainer.devices 8 ${ROWS:+--data.source "$ROWS"} ${TRAIN:-}
stage validate metrics.csv $rlt validate --config recipe_7b/rlt --config "hardware/${strategy}_8gpu" $rl \
    --model.teacher "$run/teacher_sft/model" --data.val_rows 16 ${ROWS:+--data.source "$ROWS"} ${TRAIN:-}
# Its controls: greedy traces, then the best of 4 of each problem, of which the best quarter.
generate greedy teacher_sft --rollouts.sampling.temperature 0 --rollouts.max_resamples 0
learn greedy "$run/generate_greedy/distillation.jsonl"
generate of_4 teacher_sft --rollouts.num_traces 4 --rollouts.max_resamples 0
.venv/bin/python examples/own_rows.py choose quarter "$run/generate_of_4/traces.jsonl" "$run/quarter.jsonl" \
    "$run/generate_greedy/traces.jsonl"
learn quarter "$run/quarter.jsonl"

stage teacher_rlt model/config.json $rlt fit --config recipe_7b/rlt --config "hardware/${strategy}_8gpu" $rl \
    --model.teacher "$run/teacher_sft/model" ${ROWS:+--data.source "$ROWS"} ${TRAIN:-}
generate rlt teacher_rlt
learn rlt "$run/generate_rlt/distillation.jsonl"
tail -n +1 "$run"/evaluate_*/evaluation.md
