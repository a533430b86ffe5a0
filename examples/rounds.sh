#!/usr/bin/env bash
# Train student and teacher in turns, so that each teacher is trained against a student who can follow it: the student
# first learns from a few of the warm-up teacher's traces, then RLT trains a teacher against that student, and a student
# learns from all of its traces, and so on. research/rounds.md says why, with figures and controls. It runs miniatures,
# in about four minutes on two cores; for rows and models of your own change the lines of the stages. After a crash run
# it again.
#
#   examples/rounds.sh [FOLDER]      # runs/rounds by default
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/rounds}
rounds=2 first_traces=64
make --quiet setup
rlt=.venv/bin/rlt
source examples/stage.sh

explain() {  # explain ROUND STUDENT: the round's teacher explains the problems, scored by the student of the round before
    stage "round$1/traces" README.md $rlt predict --config laptop/generate --data.source new_chains \
        --model.teacher "$run/round$1/teacher/model" --model.student "$2" --seed $((10 * $1 + 3))
}
learn() {  # learn ROUND TRACES: a student learns from the round's traces, and answers
    stage "round$1/student" model/config.json $rlt fit --config laptop/sft --model.pretrained miniature \
        --model.optimizer.lr 5e-4 --trainer.max_epochs 9 --data.source "$2" --seed $((10 * $1 + 4))
    stage "round$1/evaluation" evaluation.json $rlt test --config laptop/evaluate \
        --data.sets '{new_chains: null}' --model.pretrained "$run/round$1/student/model"
}

stage round0/teacher model/config.json $rlt fit --config laptop/warmup --data.source new_chains --trainer.max_epochs 3 \
    --seed 1
explain 0 miniature
head -n $first_traces "$run/round0/traces/distillation.jsonl" > "$run/round0/first_traces.jsonl"
learn 0 "$run/round0/first_traces.jsonl"
for ((n = 1; n <= rounds; n++)); do
    student=$run/round$((n - 1))/student/model
    stage "round$n/teacher" model/config.json $rlt fit --config laptop/rlt --data.source new_chains \
        --model.teacher "$run/round0/teacher/model" --model.student "$student" --seed $((10 * n + 2))
    explain "$n" "$student"
    learn "$n" "$run/round$n/traces/distillation.jsonl"
done
tail -n +1 "$run"/round*/evaluation/evaluation.md
