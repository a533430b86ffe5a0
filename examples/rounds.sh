#!/usr/bin/env bash
# Rounds of the usual pipeline, with the embedded miniature on last-digit chains: RL for right answers, a student that
# is distilled from the right answers of the RL model, and RL again with this student as its cold start. About three
# minutes on one core. After a crash run it again: it skips finished stages and resumes the interrupted one.
#
#   examples/rounds.sh [FOLDER] [ROUNDS] [RL_STEPS] [PROBLEMS]      # runs/rounds 2 8 512 by default
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/rounds} rounds=${2:-2} steps=${3:-8} problems=${4:-512}
[ -x .venv/bin/rlt ] || make --quiet setup
rlt=.venv/bin/rlt
source examples/stage.sh

evaluate() {  # evaluate NAME MODEL: on problems that no stage has seen
    stage "evaluate_$1" evaluation.json $rlt test --config configs/miniature_evaluate.yaml --model.pretrained "$2" \
        --data.max_rows "$problems"
}

start=miniature
evaluate base "$start"
for round in $(seq "$rounds"); do
    # RL from the cold start that the last round has left; every round has other problems.
    stage "rl_$round" model/config.json $rlt fit --config configs/miniature_grpo.yaml --model.teacher "$start" \
        --trainer.max_steps "$steps" --data.num_embedded_rows "$problems" --seed "$round"
    evaluate "rl_$round" "$run/rl_$round/model"
    # The RL model answers every problem four times; the first right answer is kept.
    stage "answers_$round" README.md $rlt predict --config configs/miniature_rejection.yaml \
        --model.teacher "$run/rl_$round/model" --rollouts.num_traces 4 --data.num_embedded_rows "$problems" \
        --seed "$((100 + round))"
    # A fresh student learns from the answers of all rounds; a question counts once.
    sources=$(printf "$run/answers_%s/distillation.jsonl, " $(seq "$round"))
    stage "student_$round" model/config.json $rlt fit --config configs/miniature_student_sft.yaml \
        --data.source "[${sources%, }]" --data.filters.duplicates question
    start=$run/student_$round/model
    evaluate "student_$round" "$start"
done
stage rl_last model/config.json $rlt fit --config configs/miniature_grpo.yaml --model.teacher "$start" \
    --trainer.max_steps "$steps" --data.num_embedded_rows "$problems" --seed "$((rounds + 1))"
evaluate rl_last "$run/rl_last/model"
grep -H "last-digit chains" "$run"/evaluate_*/evaluation.md
