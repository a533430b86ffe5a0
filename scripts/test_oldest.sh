#!/usr/bin/env bash
# Check the versions that pyproject.toml allows. Resolve the newest and the oldest of them, for every Python; then
# install the oldest for one Python into .venv-oldest, and run the tests that compare numbers there (10 min, 4 GB).
# Run: make test-oldest, with uv on PATH (pip install uv) and a network.
# PYTHON_VERSION, VENV: those of the installation. uv reads its own variables, such as UV_FIND_LINKS; a file in
# UV_OVERRIDE, say with torch==2.11.0+cpu, only applies to the installation.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv-oldest}
PYTHON_VERSION=${PYTHON_VERSION:-3.11}
command -v uv > /dev/null || { echo "test_oldest.sh: uv must be on PATH, but is not: pip install uv" >&2; exit 2; }
resolved=$(mktemp)
trap 'rm "$resolved"' EXIT

for python in 3.11 3.12 3.13; do
  for extras in "" wandb,tensorboard,deepspeed,liger,quant dev,deepspeed,liger deepspeed,vllm; do
    options=()
    for extra in ${extras//,/ }; do options+=(--extra "$extra"); done
    for resolution in highest lowest-direct; do
      env -u UV_OVERRIDE uv pip compile --quiet --no-header --no-annotate --python-version "$python" --resolution "$resolution" \
        "${options[@]}" pyproject.toml > "$resolved"
      found=$(grep -E '^(torch|lightning|transformers|deepspeed|vllm)==' "$resolved" | tr '\n' ' ')
      echo "Python $python [$extras] $resolution: $(wc -l < "$resolved") packages, $found"
    done
  done
done

uv venv --quiet --clear --python "$PYTHON_VERSION" "$VENV"
uv pip install --quiet --python "$VENV" --resolution lowest-direct --editable '.[dev,deepspeed,liger]'
"$VENV/bin/rlt" fit --config laptop/rlt --trainer.max_steps 2 --output_dir "$VENV/run" --overwrite true
"$VENV/bin/python" -m pytest -q tests/unit/numerics/test_losses.py tests/unit/numerics/test_divergence.py \
  tests/unit/modules/test_rlt_module.py tests/integration/ranks/test_lora.py tests/integration/ranks/test_strategies.py
