#!/usr/bin/env bash
# Check and measure this project on a machine with one GPU, step by step. A step that fails does not stop the others.
#
#   scripts/gpu_ladder.sh [STEP ...]          in the project's own .venv (make setup), or PYTHON
#   KIT=FOLDER scripts/gpu_ladder.sh          without a network, with a folder of gpu_kit.sh; PYTHON has PyTorch
#   REHEARSE=1 scripts/gpu_ladder.sh          on a CPU at tiny size: shows that the steps run, and nothing else
#   PRETEND=1 scripts/gpu_ladder.sh           the same of steps 2 and 4 to 9 on the tests' pretended GPU
#
#   1 versions     imports, driver, memory, allocator, rate of matrix products                  120 s at most
#   2 numerics     log-probs, exact KL, attention with shared prefixes: CUDA against float64    180 s
#   3 benchmark    benchmarks/gpu.py at 0.5B and 7B, 16k tokens: time, memory, MFU              480 s
#   4 fit          5 iterations: fp32 on CPU and GPU, bf16-mixed, checkpointing, LoRA           720 s
#   5 strategies   the same under FSDP2, DDP, ZeRO-3, ZeRO-1, offloaded ZeRO-3, one process     420 s
#   6 tests        the tests that need a GPU                                                    150 s
#   7 profile      where the optimise phase's time goes, by kind of kernel                      240 s
#   8 kernels      head, attention, blocks and AdamW by each kernel; pinned buffers of a push   600 s
#   9 engine       tokens a second of the in-process engine and of transformers                 240 s
#   10 quantised   benchmark of 4-bit and 8-bit weights, if bitsandbytes is installed           300 s
#
# The default is 1 2 4 5 6 3 7 8 9 10, the most valuable first. OUT (runs/gpu_ladder) gets three files: ladder.md,
# ladder.json with every finding, and ladder.tar.gz with all output, the profiles and the JSON of each benchmark.
# LIMIT=seconds ends the whole in time. WORK (runs/gpu_ladder_work) holds what is installed, made and found: a call
# adds to it, so the steps can run in pieces.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
checkout=$PWD
steps=("$@")
pretend=${PRETEND:-}
all=(1 2 4 5 6 3 7 8 9 10)
[[ -z $pretend ]] || all=(2 4 5 6 7 8 9)
[[ ${#steps[@]} -gt 0 ]] || steps=("${all[@]}")
for step in "${steps[@]}"; do
    [[ $step =~ ^([1-9]|10)$ ]] || { echo "STEP must be 1 to 10, but is $step." >&2; exit 2; }
    [[ -z $pretend || $step =~ ^[2456789]$ ]] || { echo "With PRETEND, STEP must be 2 or 4 to 9, but is $step." >&2; exit 2; }
done
bring_home=$(mkdir -p "${OUT:-runs/gpu_ladder}" && realpath "${OUT:-runs/gpu_ladder}")
WORK=$(mkdir -p "${WORK:-runs/gpu_ladder_work}" && realpath "${WORK:-runs/gpu_ladder_work}")
OUT=$WORK/found
mkdir -p "$OUT"
LIMIT=${LIMIT:-7200}
rehearse=${REHEARSE:-$pretend}
slower=1 # a pretended GPU is a CPU with more to do
[[ -z $pretend ]] || slower=5
export OUT WORK REHEARSE=$rehearse PRETEND=$pretend PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
[[ -z $rehearse ]] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
begin=$SECONDS
log=$OUT/ladder.log

note() { # note CHECK PASSED SECONDS [JSON-FIELDS]
    printf '{"check": "%s", "passed": %s, "seconds": %s%s}\n' "$1" "$2" "$3" "${4:+, $4}" | tee -a "$OUT/results.jsonl"
}
check() { # check NAME SECONDS COMMAND...: run it with a time limit, keep its output, note how it ended
    local name=$1 limit=$(($2 * slower)) start=$SECONDS left=$((LIMIT - (SECONDS - begin))) reason
    shift 2
    if ((left < 15)); then
        note "$name" null 0 '"why": "skipped: no time left"'
        return 1
    fi
    ((limit < left)) || limit=$left
    printf '\n======== %s (at most %d s)\n' "$name" "$limit" >> "$log"
    timeout --kill-after=5 "$limit" "$@" > "$WORK/output" 2>&1 < /dev/null
    local status=$?
    tail -c 400000 "$WORK/output" >> "$log"
    if ((status)); then
        reason=$(grep -aE "rror|assert" "$WORK/output" | tail -n 1 | tr -d '"\\\000-\037' | cut -c 1-300)
        note "$name" false $((SECONDS - start)) "\"status\": $status, \"why\": \"$reason\""
    else
        note "$name" true $((SECONDS - start))
    fi
    return $status
}
install_kit() { # an environment of its own, which sees the machine's packages: those of an environment, too
    local env=$WORK/env site parent
    rm -rf "$env" "$WORK/packages"
    "$python" -m venv --without-pip --system-site-packages "$env" || return 1
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
    parent=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])') || return 1
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/packages" \
        "$KIT"/wheels/*.whl || return 1
    echo "import site; site.addsitedir('$parent')" > "$site/parent.pth"
    echo "import sys; sys.path.insert(1, '$WORK/packages')" > "$site/kit.pth"
    "$env/bin/python" - << 'END' || return 1
from importlib.util import find_spec
needed = "torch transformers tokenizers safetensors huggingface_hub accelerate torchmetrics lightning_utilities anyio h11 filelock tqdm yaml"
missing = [name for name in [*needed.split(), "pyarrow"] if find_spec(name) is None]
if missing:
    raise SystemExit(f"The Python of the machine (PYTHON) must have what the kit leaves out, but lacks {', '.join(missing)}.")
END
    touch "$env/.ready"
}

tokenizer=()
if [[ -n ${KIT:-} ]]; then
    KIT=$(realpath "$KIT")
    python=${PYTHON:-python3}
    if [[ ! -f $WORK/env/.ready ]]; then
        start=$SECONDS
        install_kit >> "$log" 2>&1 || { note install false $((SECONDS - start)); tail -n 20 "$log"; exit 1; }
        note install true $((SECONDS - start))
    fi
    py=$WORK/env/bin/python
    tokenizer=(--tokenizer "$KIT/tokenizer")
else
    py=${PYTHON:-.venv/bin/python}
    "$py" -c 'import torch' || { echo "$py must have this project's packages: make setup, or set PYTHON or KIT." >&2; exit 2; }
fi
if [[ -n $pretend ]]; then # every Python of the ladder, on one pretended GPU
    export PYTHONPATH=$checkout/tests:$PYTHONPATH PRETENDED_GPUS=1
    printf '#!/bin/sh\nexec "%s" -m pretended_gpu.python "$@"\n' "$(realpath -s "$(command -v "$py")")" > "$WORK/python"
    chmod +x "$WORK/python"
    py=$WORK/python
fi
if [[ -z $rehearse ]] && ! "$py" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "The ladder needs a GPU that PyTorch sees. To try the steps on a CPU: REHEARSE=1." >&2
    exit 2
fi

ladder=benchmarks/ladder
export PYTHONPATH=$checkout/benchmarks:$PYTHONPATH
accelerator=gpu precision=bf16-mixed length=128 half=bfloat16 compiled=true prompts=4 iterations=5 plain=() tiny=() few=()
if [[ -n $rehearse ]]; then
    compiled=false length=4 prompts=2 iterations=1 plain=(--model.head.compiled false) tiny=(--tiny)
    few=(--data.num_embedded_rows 16)
    [[ -n $pretend ]] || accelerator=cpu precision=32-true half=float32
fi
fit() { # fit NAME SECONDS OPTION...: a few iterations, in a folder of its own
    local name=$1 limit=$2
    shift 2
    rm -rf "$WORK/runs/$name"
    check "fit, $name" "$limit" "$py" -m rlt_lightning fit --config configs/quickstart.yaml \
        --output_dir "$WORK/runs/$name" --model.teacher "$WORK/models/teacher" --model.student "$WORK/models/student" \
        --trainer.max_steps $iterations --model.group_size $((2 * prompts)) --data.prompts_per_step $prompts \
        --rollouts.sampling.max_completion_length $length --model.micro_batch_tokens 4096 --trainer.devices 1 \
        --export.enabled false "${few[@]}" "$@"
    local status=$?
    cat "$WORK/runs/$name/metrics.csv" >> "$log" 2> /dev/null
    return $status
}
models() {
    [[ -d $WORK/models/student ]] || check "models" 120 "$py" benchmarks/small_models.py "$WORK/models" "${tokenizer[@]}" "${tiny[@]}"
}
benchmark() { # benchmark FILE SECONDS NAME OPTION...: one of benchmarks/, its JSON into OUT
    local file=$1 limit=$2 name=$3
    shift 3
    [[ -z $rehearse ]] || set -- --tiny "$@"
    check "benchmark, $name" "$limit" "$py" "benchmarks/$file.py" --output "$OUT/$name.json" "$@" || return 1
    "$py" "$ladder/adopt.py" "$name" "$OUT/$name.json"
}

for step in "${steps[@]}"; do
    case $step in
    1)
        if command -v nvidia-smi > /dev/null; then nvidia-smi >> "$log" 2>&1; fi
        check "1 versions" 120 "$py" $ladder/versions.py
        ;;
    2) check "2 numerics" 180 "$py" $ladder/numerics.py ;;
    3)
        benchmark gpu 240 gpu_0.5b --shape qwen2.5-0.5b --rounds 3
        [[ -n $rehearse ]] || benchmark gpu 240 gpu_7b --shape 7b --rounds 3
        ;;
    4)
        models
        fit fp32_cpu 120 --trainer.accelerator cpu
        fit fp32 60 --trainer.accelerator $accelerator "${plain[@]}" &&
            check "4 GPU against CPU" 30 "$py" $ladder/compare.py "first step, fp32: CPU and GPU" \
                "$WORK/runs/fp32_cpu" "$WORK/runs/fp32" 0.02
        if [[ $accelerator == cpu ]]; then
            note "fit, bf16" null 0 '"why": "skipped: needs a GPU"'
        else
            fit bf16 60 --trainer.accelerator $accelerator --trainer.precision $precision --model.student_dtype $half \
                "${plain[@]}" &&
                check "4 half against full" 30 "$py" $ladder/compare.py "first step: fp32 and bf16-mixed" \
                    "$WORK/runs/fp32" "$WORK/runs/bf16" 0.2
        fi
        fit options 150 --trainer.accelerator $accelerator --trainer.precision $precision \
            --model.gradient_checkpointing true --model.offload_frozen true --model.head.compiled $compiled
        fit lora 150 --trainer.accelerator $accelerator --trainer.precision $precision "${plain[@]}" \
            --config configs/overlays/lora.yaml --export.enabled true --export.adapter merged
        ;;
    5)
        models
        options=(--trainer.accelerator $accelerator --trainer.precision $precision "${plain[@]}")
        fit fsdp2 90 --config configs/overlays/fsdp2.yaml "${options[@]}"
        fit ddp 60 --trainer.strategy ddp "${options[@]}"
        fit zero3 90 --config configs/overlays/zero3.yaml "${options[@]}"
        fit zero1 90 --config configs/overlays/zero3.yaml --trainer.strategy.init_args.stage 1 "${options[@]}"
        fit offload 90 --config configs/overlays/cpu_offload.yaml "${options[@]}"
        ;;
    6)
        if "$py" -c 'import pytest' 2> /dev/null; then
            check "6 tests that need a GPU" 150 "$py" -m pytest -p no:cacheprovider -q -rA -m gpu \
                tests/test_rlt_module.py
        else
            note "6 tests that need a GPU" null 0 '"why": "skipped: pytest is not installed"'
        fi
        ;;
    7) check "7 profile" 240 "$py" $ladder/phases.py ;;
    8)
        check "8 kernels" 480 "$py" $ladder/kernel_times.py
        check "8 pinned buffers" 120 "$py" $ladder/pinned.py
        ;;
    9) check "9 engine" 240 "$py" $ladder/engine.py ;;
    10)
        if "$py" -c 'import bitsandbytes' 2> /dev/null; then
            options=(--steps 40 --seeds 2)
            [[ -z $rehearse ]] || options=()
            benchmark quantised 300 quantised "${options[@]}"
        else
            note "benchmark, quantised" null 0 '"why": "skipped: bitsandbytes is not installed"'
        fi
        ;;
    esac
done
"$py" $ladder/table.py
status=$?
cp "$OUT/ladder.md" "$OUT/ladder.json" "$bring_home"
tar -C "$OUT" -czf "$bring_home/ladder.tar.gz" --exclude=ladder.md --exclude=ladder.json .
echo "$bring_home: ladder.md, ladder.json, ladder.tar.gz"
exit $status
