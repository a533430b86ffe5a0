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
stage teacher_sft model/config.json $rlt fit --config laptop/smollm2_warmup
stage teacher_rlt model/config.json $rlt fit --config laptop/smollm2_rlt \
    --model.teacher "$run/teacher_sft/model"
# 3 and 4: it writes a distillation set, and a student is trained on it.
stage generate README.md $rlt predict --config laptop/smollm2_generate --model.teacher "$run/teacher_rlt/model"
stage student_sft model/config.json $rlt fit --config laptop/smollm2_sft \
    --data.source "$run/generate/distillation.jsonl"
# 5: before and after, on problems that no stage has seen.
stage evaluate_base evaluation.json $rlt test --config laptop/smollm2_evaluate
stage evaluate_student evaluation.json $rlt test --config laptop/smollm2_evaluate \
    --model.pretrained "$run/student_sft/model"

.venv/bin/python examples/picture.py "$run"
