#!/usr/bin/env bash
# Run the benchmarks that research/speed.md quotes, keep what they write in docs/benchmarks, and put the
# figures into the pages. It takes an hour on an idle machine with 24 GB; other programs would falsify the figures.
#
#   scripts/benchmarks.sh [NAME ...]     the default: reward optimise growth startup memory data
#
# Pages quote others too: divergence generate packing balance overlap asynchronous push push_ipc quantised
# plan dynamic_sampling, which takes half an hour. push and push_ipc are benchmarks/push.py over gloo and by shared memory;
# they, generate and asynchronous need vLLM (make setup-vllm).
set -euo pipefail
cd "$(dirname "$0")/.."
default=(reward optimise growth startup memory data)
known=("${default[@]}" divergence generate packing balance overlap asynchronous push push_ipc quantised plan dynamic_sampling baseline)
names=("$@")
[[ ${#names[@]} -gt 0 ]] || names=("${default[@]}")
for name in "${names[@]}"; do
    if [[ " ${known[*]} " != *" $name "* ]]; then
        echo "NAME must be one of ${known[*]}, but is $name." >&2
        exit 2
    fi
done
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH=$PWD
for name in "${names[@]}"; do
    case $name in
    push) command=(benchmarks/push.py --backend gloo) ;;
    push_ipc) command=(benchmarks/push.py) ;;
    quantised) command=(benchmarks/quantised.py --steps 40 --seeds 2) ;;
    *) command=("benchmarks/$name.py") ;;
    esac
    "$python" "${command[@]}" --output "docs/benchmarks/$name.json"
    sed -i -E "/^unwritten:/ { s/\b$name\b(, )?//; s/, \]/]/ }" docs/benchmarks/quotes.yaml
done
"$python" scripts/quote_figures.py --write
"$python" scripts/quote_figures.py
