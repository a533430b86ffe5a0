#!/usr/bin/env bash
# RLT on rows of your own, which have a question and a solution and no traces: all stages, on one GPU. It ends with a
# table that compares the RLT student with its controls, and with the cost of each stage; a first table comes before RLT,
# the longest stage. After a crash run it again: it skips finished stages and resumes the interrupted one. docs/data.md
# has its settings.
#
#   examples/own_rows.sh ROWS [FOLDER]      # a file, a folder or a hub id; runs/own_rows by default
set -euo pipefail
rows=${1:?'usage: examples/own_rows.sh ROWS [FOLDER]'} run=${2:-runs/own_rows}
model=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct} configs=${CONFIGS:-own_rows/}
here=$(dirname "$0")
source "$here/stage.sh"

python "$here/own_rows.py" split "$rows" "$run/rows"
train=$run/rows/train.jsonl

# 0: the untrained model explains; 1: the teacher learns from what is worth more than filler.
stage explain README.md rlt predict --config "${configs}explain" --model.teacher "$model" --model.student "$model" \
    --data.source "$train" ${SAMPLE:-} ${EXPLAIN:-}
stage warmup model/config.json rlt fit --config "${configs}warmup" --model.pretrained "$model" \
    --data.source "$run/explain/distillation.jsonl" ${TRAIN:-} ${WARMUP:-}

answer() {  # answer NAME MODEL: 5, the test rows, greedily and sampled
    for how in greedy:0 sampled:0.7; do
        stage "evaluate_$1_${how%:*}" evaluation.json rlt test --config "${configs}evaluate" --model.pretrained "$2" \
            --data.sets "{test: $run/rows/test.jsonl}" --rollouts.sampling.temperature "${how#*:}" ${SAMPLE:-} ${ANSWER:-}
    done
}
learn() {  # learn NAME ROWS OPTION...: 4, a student, which then answers
    stage "student_$1" model/config.json rlt fit --config "${configs}sft" --model.pretrained "$model" \
        --data.source "$2" "${@:3}" ${TRAIN:-} ${LEARN:-}
    answer "$1" "$run/student_$1/model"
}
explain() {  # explain NAME TEACHER TEMPERATURE OPTION...: 3, traces of a teacher, from which a student learns
    stage "traces_$1" README.md rlt predict --config "${configs}generate" --model.teacher "$run/$2/model" \
        --model.student "$model" --data.source "$train" --rollouts.sampling.temperature "$3" "${@:4}" ${SAMPLE:-}
    learn "$1" "$run/traces_$1/distillation.jsonl"
}
table() { python "$here/own_rows.py" table "$run"; }

# From cheap to expensive. What comes before 2, RLT, is what RLT must beat.
answer base "$model"
learn solutions "$train" --data.trace_columns '[solution]'
explain control warmup 0
explain warmup warmup 0.7
explain best_of_4 warmup 0.7 --rollouts.num_traces 4 --distillation.select best_reward
table
stage rlt model/config.json rlt fit --config "${configs}rlt" --model.teacher "$run/warmup/model" \
    --model.student "$model" --data.source "$train" --data.val_source "$run/rows/held_out.jsonl" ${TRAIN:-} ${RLT:-}
explain rlt rlt 0.7
explain rlt_t0 rlt 0
table
