#!/usr/bin/env bash
# Rounds of the usual pipeline, with the embedded miniature on last-digit chains: RL for right answers, a student that
# is distilled from the right answers of the RL model, and RL again with this student as its cold start. About 4 minutes
# on one core for two rounds. After a crash run it again: it skips finished stages and resumes the interrupted one.
#
#   examples/rounds.sh [FOLDER] [ROUNDS] [RL_STEPS]      # runs/rounds, 2 and 8 by default
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/rounds} rounds=${2:-2} steps=${3:-8}
[ -x .venv/bin/rlt ] || make --quiet setup
rlt=.venv/bin/rlt
source examples/stage.sh

start=miniature
for round in $(seq "$rounds"); do
    # RL from the cold start that the last round has left.
    stage "rl_$round" model/config.json $rlt fit --config configs/miniature_grpo.yaml --model.teacher "$start" \
        --trainer.max_steps "$steps" --seed "$round"
    # Other problems in every round; a problem's first right answer is kept.
    stage "answers_$round" README.md $rlt predict --config configs/miniature_rejection.yaml \
        --model.teacher "$run/rl_$round/model" --rollouts.num_traces 4 --seed "$((100 + round))"
    # A fresh student learns from all rounds' answers; a question counts once.
    sources=$(printf "$run/answers_%s/distillation.jsonl, " $(seq "$round"))
    stage "student_$round" model/config.json $rlt fit --config configs/miniature_student_sft.yaml \
        --data.source "[${sources%, }]" --data.filters.duplicates question
    start=$run/student_$round/model
done
# The last cold start's RL, and accuracies on problems that no stage has seen.
stage rl_last model/config.json $rlt fit --config configs/miniature_grpo.yaml --model.teacher "$start" \
    --trainer.max_steps "$steps" --seed "$((rounds + 1))"
for name in $(seq -f 'rl_%g student_%g' "$rounds") rl_last; do
    stage "evaluate_$name" evaluation.json $rlt test --config configs/miniature_evaluate.yaml \
        --model.pretrained "$run/$name/model"
done
grep -h "last-digit chains" "$run"/evaluate_*/evaluation.md
