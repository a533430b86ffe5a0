#!/usr/bin/env bash
# All five stages of RLT on a laptop CPU, with SmolLM2-135M and the embedded word sums; ends with a table and a
# picture. About 28 minutes on a shared core, 12 GB of disk. After a crash run it again: it skips finished stages and
# resumes the interrupted one.
#
#   examples/pipeline.sh [FOLDER]      # runs/pipeline by default
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/pipeline}
make --quiet setup
rlt=.venv/bin/rlt
source examples/stage.sh

# 1 and 2: the teacher learns to explain, then to explain what helps a student.
stage teacher_sft model/config.json $rlt fit --config configs/quickstart_smollm2_warmup.yaml
stage teacher_rlt model/config.json $rlt fit --config configs/quickstart_smollm2.yaml \
    --model.teacher "$run/teacher_sft/model"
# 3 and 4: it writes a distillation set, and a student is trained on it.
stage generate README.md $rlt predict --config configs/smollm2_generate.yaml --model.teacher "$run/teacher_rlt/model"
stage student_sft model/config.json $rlt fit --config configs/smollm2_student_sft.yaml \
    --data.source "$run/generate/distillation.jsonl"
# 5: before and after, on problems that no stage has seen.
stage evaluate_base evaluation.json $rlt test --config configs/smollm2_evaluate.yaml
stage evaluate_student evaluation.json $rlt test --config configs/smollm2_evaluate.yaml \
    --model.pretrained "$run/student_sft/model"

.venv/bin/python examples/picture.py "$run"
