#!/usr/bin/env bash
# All five stages of RLT on a laptop CPU, with SmolLM2-135M and the embedded arithmetic set; ends with a table and a
# picture. About 35 minutes on two cores, 12 GB of disk. Run it again after a crash: finished stages are passed over,
# the one that was broken off goes on.
#
#   examples/pipeline.sh [FOLDER]      # runs/pipeline by default
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/pipeline}
make --quiet setup
rlt=.venv/bin/rlt
source examples/stage.sh

# 1 and 2: the teacher learns to explain, then to explain what helps a student.
stage teacher_sft model/config.json $rlt fit --config configs/learning_warmup.yaml --checkpoint.every_n_train_steps 8
stage teacher_rlt model/config.json $rlt fit --config configs/learning_rlt.yaml \
    --model.teacher "$run/teacher_sft/model" --checkpoint.every_n_train_steps 4
# 3 and 4: it writes a distillation set, and a student is trained on it.
stage generate README.md $rlt predict --config configs/laptop_generate.yaml --model.teacher "$run/teacher_rlt/model"
stage student_sft model/config.json $rlt fit --config configs/laptop_student_sft.yaml \
    --data.source "$run/generate/distillation.jsonl"
# 5: before and after, on problems that no stage has seen.
stage evaluate_base evaluation.json $rlt test --config configs/laptop_evaluate.yaml
stage evaluate_student evaluation.json $rlt test --config configs/laptop_evaluate.yaml \
    --model.pretrained "$run/student_sft/model"

.venv/bin/python examples/picture.py "$run"
