#!/usr/bin/env bash
# Check and measure this project on one GPU, in five calls of 13 minutes in all. What fails does not stop the others.
#
#   make gpu-minutes                   all calls, in the project's .venv (make setup), or by PYTHON
#   REHEARSE=1 make gpu-minutes        the same at tiny size on a CPU: shows only that everything runs
#   CALL=vllm make gpu-minutes         one call; LIMIT=seconds ends it in time
#   scripts/gpu_minutes.sh report FILE ...    results.jsonl as tables
#
#   check     130 s   CUDA against float64; phases of 0.5B, 1.5B and 7B, with their kernels
#   peers     130 s   the head beside those of TRL, Liger and CCE; in turns with TRL's GRPOTrainer and a loop over samples
#   vllm      140 s   a real vLLM worker, by VLLM (.venv/bin/vllm: the extra vllm); skipped without it, as the next
#   turns      90 s   `rlt fit` and its worker take turns; the sleeping worker is killed once
#   smollm2   290 s   SmolLM2 and 2,048 problems: RLT and every cheaper way, three seeds; run again, it goes on
#
# OUT (runs/gpu_minutes) gets results.jsonl, a line for each finding as it comes, logs and profiles.txt.
#
# `scripts/gpu_minutes.sh kit` makes in KIT (.gpu) what a machine without a network usually lacks beside PyTorch and
# transformers (CPython 3.12, x86-64, CUDA 13), in ten minutes: folders 1 to 4 of at most 48 MiB. Bring folder N before
# call N: every call puts what has come into STORE, and uses it from there.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
call=${1:-${CALL:-all}}
KIT=${KIT:-.gpu} STORE=${STORE:-$HOME/.cache/gpu_minutes}
minutes=benchmarks/gpu_minutes
py=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $py ]] || py=python3
[[ $py != */* || $py == /* ]] || py=$PWD/$py

# What the trainer needs, and what vLLM needs beside that.
ours=(httpx2 httpcore2 truststore jsonargparse docstring_parser typeshed_client Pebble gguf math-verify
    latex2sympy2_extended antlr4-python3-runtime datasets dill multiprocess pydantic pydantic_core annotated-types
    typing-inspection liger-kernel trl cut-cross-entropy==25.1.1)
vllms=(vllm annotated-types anthropic apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors depyf dill
    docstring_parser email-validator fastapi httpcore2 httptools httpx2 ijson interegular jiter jmespath jsonschema
    jsonschema-specifications lark llguidance lm-format-enforcer loguru mcp mistral-common
    model-hosting-container-standards msgspec openai opentelemetry-api opentelemetry-sdk
    opentelemetry-semantic-conventions oss-harmony outlines-core partial-json-parser prometheus-fastapi-instrumentator
    pybase64 pydantic pydantic_core pydantic-extra-types pydantic-settings python-dotenv python-json-logger
    python-multipart pyzmq referencing rpds-py setproctitle sniffio sse-starlette starlette truststore
    typing-inspection uvicorn watchfiles xgrammar)
# Parts of vLLM for other attention, experts and kernels than a dense model of bfloat16 on Hopper needs.
unneeded=(vllm_flash_attn/_vllm_fa2_C* _moe_C_stable* _deepselect_C* _flashkda_C* _flashmla* _qutlass_C* vllm-rs
    third_party/deep_gemm third_party/fmha_sm100 kernels/helion/configs model_executor/layers/fused_moe/configs
    entrypoints/serve/instrumentator/static model_executor/layers/quantization/utils/configs)

pack() { # pack ARCHIVE NAME...: wheels, in the versions of constraints.txt where it has them, unpacked into an archive
    local archive=$1 name number pins=() platforms=() folder
    folder=$(mktemp -d)
    for name in "${@:2}"; do pins+=("$(grep -iE -m 1 "^${name//[-_]/[-_.]}==" constraints.txt || echo "$name")"); done
    for number in 1 2014 _2_17 _2_24 _2_27 _2_28 _2_31 _2_34; do platforms+=(--platform "manylinux${number}_x86_64"); done
    "$py" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --dest "$folder" "${pins[@]}" || return 1
    for name in "$folder"/*.whl; do "$py" -m zipfile -e "$name" "$folder/site" || return 1; done
    tar -C "$folder/site" "${unneeded[@]/#/--exclude=./vllm/}" -c . | xz "${XZ:--9}" > "$archive" && rm -rf "$folder"
}
make_kit() {
    local wheel
    rm -rf "$KIT" && mkdir -p "$KIT"/{1,2,3,4,whole}
    pack "$KIT/1/site.tar.xz" "${ours[@]}" && pack "$KIT/whole/vllm.tar.xz" "${vllms[@]}" || return 1
    # It checks the wheel's sha256.
    wheel=$(PYTHONPATH=$PWD "$py" -c 'import sys; from pathlib import Path
from rlt_lightning.models.embedded import download_wheel; print(download_wheel(Path(sys.argv[1])))' "$KIT/whole") || return 1
    halve "$KIT/whole/vllm.tar.xz" $((40 << 20)) 1 2
    halve "$wheel" $(($(stat --format %s "$wheel") / 2)) 3 4
    rm -rf "$KIT/whole"
    du -sh "$KIT"/[1-4]
}
halve() { # halve FILE BYTES FOLDER FOLDER: the first bytes into one folder, the others into another
    head -c "$2" "$1" > "$KIT/$3/$(basename "$1").1"
    tail -c "+$(($2 + 1))" "$1" > "$KIT/$4/$(basename "$1").2"
}
take_kit() { # put what has come into STORE, and unpack what is whole
    local file archive
    mkdir -p "$STORE" && cp -r "$KIT"/[1-4]/* "$STORE"
    for file in "$STORE"/*.1; do
        [[ -f ${file%.1} || ! -f ${file%.1}.2 ]] || cat "$file" "${file%.1}.2" > "${file%.1}"
    done
    for archive in site vllm; do
        [[ -d $STORE/$archive || ! -f $STORE/$archive.tar.xz ]] \
            || "$py" -m tarfile -e "$STORE/$archive.tar.xz" "$STORE/$archive" || return 1
    done
    # vLLM's packages are for its own processes only.
    printf '#!/bin/sh\nPYTHONPATH=$PYTHONPATH:%q exec %q -c "%s" "$@"\n' "$STORE/vllm" "$(command -v "$py")" \
        "import sys; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main; main()" > "$STORE/run_vllm"
    chmod +x "$STORE/run_vllm"
}
case $call in
kit) make_kit; exit ;;
report) shift; exec "$py" $minutes/report.py "$@" ;;
esac

OUT=$(mkdir -p "${OUT:-runs/gpu_minutes}/logs" && realpath "${OUT:-runs/gpu_minutes}")
[[ ! -d $KIT ]] || take_kit || exit 1
if [[ -d $STORE/site ]]; then
    export PYTHONPATH=$STORE/site${PYTHONPATH:+:$PYTHONPATH} PIP_NO_INDEX=1 PIP_FIND_LINKS=$STORE
fi
[[ ! -d $STORE/vllm ]] || VLLM=${VLLM:-$STORE/run_vllm}
declare -A limits=([check]=130 [peers]=130 [vllm]=140 [turns]=90 [smollm2]=290)
case $call in
all)
    rm -f "$OUT/results.jsonl"
    status=0
    for call in check peers vllm turns smollm2; do "$0" $call || status=1; done
    "$0" report "$OUT/results.jsonl"
    exit $status
    ;;
check | peers | vllm | turns | smollm2) ;;
*) echo "The call must be all, check, peers, vllm, turns, smollm2, report or kit, but is $call." >&2; exit 2 ;;
esac

LIMIT=${LIMIT:-${limits[$call]}}
if [[ -n ${REHEARSE:-} ]]; then LIMIT=1800 BASE=${BASE:-miniature}; fi
PYTHONPATH=$PWD:$PWD/benchmarks:$PWD/$minutes:$PWD/research:$PWD/tests/support${PYTHONPATH:+:$PYTHONPATH}
export OUT PYTHONPATH BASE=${BASE:-smollm2-135m} VLLM=${VLLM:-.venv/bin/vllm}
export HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # else asking for a GPU makes a context, which no fork of a stage can use

run() { # run SCRIPT SECONDS: its findings appear as they come; all of its output goes into a log
    local begin=$SECONDS log=$OUT/logs/$1.log status passed=true
    timeout -k 5 "$2" "$py" "$minutes/$1.py" $(($2 - 10)) < /dev/null 2>&1 | tee "$log" | grep --line-buffered '^{"check"'
    status=${PIPESTATUS[0]}
    if ((status)); then passed=false; fi
    printf '{"check": "script, %s", "passed": %s, "status": %s, "s": %s}\n' "$1" $passed "$status" $((SECONDS - begin)) \
        | tee -a "$OUT/results.jsonl"
    return "$status"
}
status=0
case $call in
check)
    run numerics $((LIMIT / 2)) || status=1
    run phases $((LIMIT - SECONDS)) || status=1
    ;;
vllm) run vllm_worker "$LIMIT" || status=1 ;;
turns) run vllm_turns "$LIMIT" || status=1 ;;
*) run "$call" "$LIMIT" || status=1 ;;
esac
exit $status
