#!/usr/bin/env bash
# Put the packages that a GPU machine without a network usually lacks into FOLDER. What it must have itself is in
# docs/gpu.md: PyTorch and well-known packages with large wheels, such as transformers and pyarrow.
# There, gpu_ladder.sh installs and uses it: KIT=FOLDER scripts/gpu_ladder.sh. A machine with a network needs no kit.
#
#   scripts/gpu_kit.sh FOLDER [GROUP ...]
#
#   core      9 MB   import, rlt fit, FSDP2, DeepSpeed, pytest; the tokenizer of the embedded model
#   kernels   1 MB   Liger and cut-cross-entropy, to compare the head with
#   plots    23 MB   matplotlib: without it benchmarks draw no picture
#
# The default is all three. Left out are datasets and pandas, W&B and TensorBoard, which no step of the ladder imports.
# Wheels are for x86-64 Linux and the CPython of PYTHON_VERSION (3.12). DRY=1 prints what would be fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?FOLDER is missing: scripts/gpu_kit.sh FOLDER [GROUP ...]}
shift
groups=("$@")
[[ ${#groups[@]} -gt 0 ]] || groups=(core kernels plots)
python=${PYTHON:-.venv/bin/python}

core=(lightning httpx2 httpcore2 truststore jsonargparse docstring_parser typeshed_client Pebble peft gguf math-verify latex2sympy2_extended
    antlr4-python3-runtime pytest pytest-timeout pytest-xdist execnet iniconfig pluggy hjson msgpack ninja py-cpuinfo
    einops)
kernels=(liger-kernel==0.8.5 cut-cross-entropy==25.1.1)
plots=(matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil)

for group in "${groups[@]}"; do
    if [[ ! $group =~ ^(core|kernels|plots)$ ]]; then
        echo "GROUP must be core, kernels or plots, but is $group." >&2
        exit 2
    fi
done

pinned() { # names with the versions of constraints.txt, as far as it has them
    local name
    for name in "$@"; do
        grep -iE -m 1 "^${name//[-_]/[-_.]}==" constraints.txt || echo "$name"
    done
}
run() { if [[ -n ${DRY:-} ]]; then echo "$@"; else "$@"; fi; }
platforms=(--platform manylinux2014_x86_64)
for number in 17 24 27 28 31; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
fetch() {
    run "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version "${PYTHON_VERSION:-3.12}" --implementation cp "${platforms[@]}" --dest "$folder/wheels" "$@"
}

run mkdir -p "$folder/wheels" "$folder/tokenizer"
for group in "${groups[@]}"; do
    declare -n names=$group
    mapfile -t wanted < <(pinned "${names[@]}")
    fetch "${wanted[@]}"
    [[ $group == core ]] || continue
    # DeepSpeed is published as source only. Built without CUDA, its wheel is pure Python.
    run "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder/wheels" \
        "$(pinned deepspeed)"
    model=$("$python" -c 'from rlt_lightning.models.embedded import embedded_model; print(embedded_model())')
    for file in config.json generation_config.json tokenizer.json tokenizer_config.json chat_template.jinja; do
        run cp "$model/$file" "$folder/tokenizer/"
    done
done
[[ -z ${DRY:-} ]] || exit 0
doubled=$(find "$folder/wheels" -name '*.whl' -printf '%f\n' | sed -E 's/-[0-9].*//' | tr '[:upper:]' '[:lower:]' | sort | uniq -d)
if [[ -n $doubled ]]; then
    echo "$folder/wheels must have one version of each package, but has more of: $doubled. Delete it and run again." >&2
    exit 1
fi
du -sh "$folder"
