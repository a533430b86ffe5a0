#!/usr/bin/env bash
# Make ../vllm, a virtual environment with a vLLM server for NVIDIA GPUs (docs/hardware.md; about 10 GB).
# Run: scripts/setup_vllm_gpu.sh            DRY_RUN=1: check the driver, print the commands, run none
# VENV: another folder. PYTHON: another Python. VLLM: what to install in place of PyPI's vllm, such as a wheel
# that vLLM releases for CUDA 12, with INDEX=https://download.pytorch.org/whl/cu129 for drivers below 580.
# DRIVER: the driver version of the machine that will run it, if this one has none, as when an image is built.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=0.32.0
VENV=${VENV:-../vllm}
PYTHON=${PYTHON:-python3}
VLLM=${VLLM:-vllm==$VERSION}
INDEX=${INDEX:-}
STAMP="$VENV/.installed-$VERSION"

run() {
  if [[ -n ${DRY_RUN:-} ]]; then echo "$*"; else "$@"; fi
}

fail() {
  echo "setup_vllm_gpu.sh: $*" >&2
  exit 2
}

driver=${DRIVER:-}
if [[ -z $driver ]]; then
  command -v nvidia-smi > /dev/null || fail "nvidia-smi must be on PATH, but is not: no NVIDIA driver is installed." \
    "Run this on the GPU node, name its driver (DRIVER=580), or use scripts/setup_vllm_cpu.sh."
  drivers=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader || true)
  driver=${drivers%%$'\n'*} # one line a GPU; a pipe to head could end nvidia-smi, and with it this script
fi
major=${driver%%.*}
[[ $major =~ ^[0-9]+$ ]] || fail "nvidia-smi must report a driver version, but reports '$driver'."
[[ -n $INDEX && $VLLM != "vllm==$VERSION" ]] || (( major >= 580 )) || fail "PyPI's PyTorch and vLLM are built for" \
  "CUDA 13, so the driver must be 580 or newer, but is $driver. Update it, or set both VLLM and INDEX to builds for" \
  "CUDA 12 (docs/hardware.md)."
(( major >= 525 )) || fail "Builds for CUDA 12 need driver 525 or newer, but it is $driver. Update it."
[[ -f $STAMP ]] && exit 0

options=(--quiet --no-compile)
[[ -z $INDEX ]] || options+=(--extra-index-url "$INDEX")
run "$PYTHON" -m venv --clear "$VENV"
run "$VENV/bin/python" -m pip install "${options[@]}" "$VLLM"
# Workers that this project starts find the package without this; a worker started by hand needs it.
run "$VENV/bin/python" -m pip install --quiet --no-deps .
device="torch.cuda.get_device_name()"
[[ -z ${DRIVER:-} ]] || device="'for driver $driver'" # there may be no GPU here
run "$VENV/bin/python" -c "import torch, vllm; print(vllm.__version__, torch.__version__, $device)"
run touch "$STAMP"
