#!/usr/bin/env bash
# Check and measure this project on one GPU, in 20 minutes. What fails does not stop the others.
#
#   make gpu-minutes                   all calls, in the project's .venv (make setup), or by PYTHON
#   REHEARSE=1 make gpu-minutes        the same at tiny size on a CPU: shows only that everything runs
#   CALL=vllm make gpu-minutes         one call; LIMIT=seconds ends it in time
#   scripts/gpu_minutes.sh report FILE ...    results.jsonl as tables
#
#   check     240 s   CUDA against float64; phases of 0.5B, 1.5B and 7B, with their kernels
#   peers     240 s   in turns with TRL's GRPOTrainer and with a loop over samples
#   vllm      300 s   a real vLLM worker, by VLLM (.venv/bin/vllm: the extra vllm); skipped without it
#   smollm2   420 s   SmolLM2 and 2,048 problems: RLT and every cheaper way, three seeds; run again, it goes on
#
# OUT (runs/gpu_minutes) gets results.jsonl, a line for each finding as it comes, logs and profiles.txt.
#
# `scripts/gpu_minutes.sh kit` makes in KIT (.gpu) what a machine without a network usually lacks beside PyTorch and
# transformers (CPython 3.12, x86-64): kit.tar.xz, packages to unpack into PYTHONPATH, and part1 and part2, SmolLM2's
# wheel in two halves, so that they can be sent one by one.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
call=${1:-${CALL:-all}}
OUT=$(mkdir -p "${OUT:-runs/gpu_minutes}/logs" && realpath "${OUT:-runs/gpu_minutes}")
minutes=benchmarks/gpu_minutes
py=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $py ]] || py=python3

make_kit() { # the versions are those of constraints.txt, as far as it has them
    local names=(httpx2 httpcore2 truststore jsonargparse docstring_parser typeshed_client Pebble gguf math-verify
        latex2sympy2_extended antlr4-python3-runtime datasets dill multiprocess pydantic pydantic_core annotated-types
        typing-inspection liger-kernel==0.8.5) kit=${KIT:-.gpu} pins=() name platforms=() number work
    work=$(mktemp -d)
    for name in "${names[@]}"; do pins+=("$(grep -iE -m 1 "^${name//[-_]/[-_.]}==" constraints.txt || echo "$name")"); done
    for number in 17 24 27 28 31; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
    rm -rf "$kit" && mkdir -p "$kit" "$work/model"
    "$py" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --dest "$work" "${pins[@]}" || return 1
    for name in "$work"/*.whl; do "$py" -m zipfile -e "$name" "$work/site" || return 1; done
    tar -C "$work/site" -cJf "$kit/kit.tar.xz" . || return 1
    # It checks the wheel's sha256.
    name=$(PYTHONPATH=$PWD "$py" -c 'import sys; from pathlib import Path
from rlt_lightning.models.embedded import download_wheel; print(download_wheel(Path(sys.argv[1])))' "$work/model") || return 1
    split --number=2 --numeric-suffixes=1 --suffix-length=1 "$name" "$kit/part"
    rm -rf "$work"
}
case $call in
kit) make_kit; exit ;;
report) shift; exec "$py" $minutes/report.py "$@" ;;
all)
    rm -f "$OUT/results.jsonl"
    status=0
    for call in check peers vllm smollm2; do "$0" $call || status=1; done
    "$0" report "$OUT/results.jsonl"
    exit $status
    ;;
check | peers | vllm | smollm2) ;;
*) echo "The call must be all, check, peers, vllm, smollm2, report or kit, but is $call." >&2; exit 2 ;;
esac

declare -A limits=([check]=240 [peers]=240 [vllm]=300 [smollm2]=420)
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
*) run "$call" "$LIMIT" || status=1 ;;
esac
exit $status
