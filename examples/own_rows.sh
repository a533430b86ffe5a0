#!/usr/bin/env bash
# From cheap to dear: which way of training do rows of your own need? Each rung trains a student on one GPU and lets it
# answer the test rows; the later ones train teachers too, the last by RLT. The table at the end is sorted by cost and
# names the cheapest way that is not told from the best. Rows have a question and a solution; those with a reasoning_trace
# skip stage 0. After a crash run it again: it skips finished stages and resumes the interrupted one. docs/data.md has the
# rungs and the settings; with LORA=1 each training is one of adapters, as on 24 GB. UNTIL=evaluate_expert_sampled ends it
# before RLT.
#
#   examples/own_rows.sh ROWS [FOLDER]      # a file, a folder or a hub id; runs/own_rows by default
set -euo pipefail
rows=${1:?'usage: examples/own_rows.sh ROWS [FOLDER]'} run=${2:-runs/own_rows}
[[ $rows != -* ]] || { sed -n '2,10s/^# \?//p' "$0"; exit; }
model=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct} configs=${CONFIGS:-own_rows/}
here=$(dirname "$0")
source "$here/stage.sh"
train=$run/rows/train.jsonl test=$run/rows/test.jsonl
on_train=(--data.source "[$(quote "$train")]")
# Adapters take ten times the rate of all weights: add/lora has that of RLT.
if [ -n "${LORA:-}" ]; then
    TRAIN="--config add/lora --model.dtype bfloat16 ${TRAIN:-}"
    WARMUP="--model.optimizer.lr 1e-4 ${WARMUP:-}" LEARN="--model.optimizer.lr 1e-4 ${LEARN:-}"
fi

parts=$(python "$here/own_rows.py" split "$rows" "$run/rows" ${UNTIL:+--until "$UNTIL"})
echo "$parts"
trap 'python "$here/own_rows.py" table "$run"' EXIT

answer() {  # answer NAME MODEL: the test rows, greedily and sampled
    for how in greedy:0 sampled:0.7; do
        stage "evaluate_$1_${how%:*}" evaluation.json rlt test --config "${configs}evaluate" --model.pretrained "$2" \
            --data.sets "{test: $(quote "$test")}" --rollouts.sampling.temperature "${how#*:}" ${SAMPLE:-} ${ANSWER:-}
    done
}
choose() {  # choose STAGE WAY FILE: the rows that the stage learns from; false if there are none
    python "$here/own_rows.py" choose "$2" "$3" "$run/chosen/$1.jsonl" "$train" || exit
    [ ! -e "$run/chosen/$1.jsonl" ] || [ -s "$run/chosen/$1.jsonl" ]
}
teach() {  # teach STAGE MODEL FILE: a teacher learns to explain
    stage "$1" model/config.json rlt fit --config "${configs}warmup" --model.pretrained "$2" \
        --data.source "[$(quote "$3")]" ${TRAIN:-} ${WARMUP:-}
}
learn() {  # learn NAME WAY FILE OPTION...: a student learns from the rows of a file, chosen in a way, and answers
    if choose "student_$1" "$2" "$3"; then
        stage "student_$1" model/config.json rlt fit --config "${configs}sft" --model.pretrained "$model" \
            --data.source "[$(quote "$run/chosen/student_$1.jsonl")]" "${@:4}" ${TRAIN:-} ${LEARN:-}
        answer "$1" "$run/student_$1/model"
    else
        echo "== student_$1: left out, it has no row to learn from"
        [[ ! ${UNTIL:-} =~ ^(student|evaluate)_$1(_greedy|_sampled)?$ ]] || last_stage=$UNTIL
    fi
}
explain() {  # explain NAME TEACHER TEMPERATURE: a trace of each row, from which a student learns
    stage "traces_$1" README.md rlt predict --config "${configs}generate" --model.teacher "$run/$2/model" \
        --model.student "$model" "${on_train[@]}" --rollouts.max_resamples 0 \
        --rollouts.sampling.temperature "$3" ${SAMPLE:-}
    learn "$1" first "$run/traces_$1/traces.jsonl"
}

# No teacher. Where no answer is right, rlt predict ends with an error, and distillation.jsonl is empty.
answer base "$model"
stage own distillation.jsonl rlt predict --config "${configs}rejection" --model.teacher "$model" "${on_train[@]}" \
    --data.max_bad_frac 1 --rollouts.num_traces 4 ${SAMPLE:-} ${OWN:-} || [ -e "$run/own/distillation.jsonl" ]
learn own all "$run/own/distillation.jsonl"
learn solutions all "$train" --data.trace_columns '[solution]'

# A teacher is warmed up on the rows' traces. Without traces the untrained model explains, and what is worth more than
# filler is kept.
if [[ $parts == *", with traces" ]]; then
    learn raw all "$train"
    teach warmup "$model" "$train"
    stage scores ../chosen/warmup_eighth.jsonl rlt predict --config "${configs}generate" --config recipe_7b/rank \
        --model.teacher "$run/warmup/model" --model.student "$model" "${on_train[@]}" --data.max_bad_frac 0.1
    choose warmup_eighth eighth "$run/scores/scores.jsonl"
    teach warmup_eighth "$model" "$run/chosen/warmup_eighth.jsonl"
    explain eighth warmup_eighth 0
else
    stage explain README.md rlt predict --config "${configs}explain" --model.teacher "$model" --model.student "$model" \
        "${on_train[@]}" ${MIN_REWARD:+--distillation.min_reward "$MIN_REWARD"} ${SAMPLE:-} ${EXPLAIN:-}
    teach warmup "$model" "$run/explain/distillation.jsonl"
fi

# Its traces: greedy ones, then 4 of each row, which all further rungs but RLT share. Their reward is that of stage 0,
# and distillation.jsonl has those above its threshold.
explain control warmup 0
stage traces distillation.jsonl rlt predict --config "${configs}explain" --config "${configs}generate" \
    --model.teacher "$run/warmup/model" --model.student "$model" "${on_train[@]}" --rollouts.num_traces 4 \
    --rollouts.max_resamples 0 --distillation.select all ${MIN_REWARD:+--distillation.min_reward "$MIN_REWARD"} \
    ${SAMPLE:-} || [ -e "$run/traces/distillation.jsonl" ]
learn warmup first "$run/traces/traces.jsonl"
learn best_of_4 best "$run/traces/traces.jsonl"
learn quarter quarter "$run/traces/traces.jsonl"
if choose expert gap "$run/traces/distillation.jsonl"; then
    teach expert "$run/warmup/model" "$run/chosen/expert.jsonl"
    explain expert expert 0
else
    echo "== expert: left out, no trace is worth more than filler"
    [[ ${UNTIL:-} != *expert* ]] || last_stage=$UNTIL
fi

stage rlt model/config.json rlt fit --config "${configs}rlt" --model.teacher "$run/warmup/model" \
    --model.student "$model" "${on_train[@]}" --data.val_source "[$(quote "$run/rows/validation.jsonl")]" \
    ${TRAIN:-} ${RLT:-}
explain rlt rlt 0.7
explain rlt_t0 rlt 0
