# Functions that the pipelines source. $run is the folder of all stages; $run/seconds.tsv gets the seconds of each attempt.

stage() {  # stage NAME RESULT COMMAND...: run the command unless its result exists
    local name=$1 result=$2 begin=$SECONDS status=0
    shift 2
    mkdir -p "$run"
    if [ -e "$run/$name/$result" ]; then
        echo "== $name: finished before ($run/$name/$result)"
    else
        echo "== $name"
        printf '%s\t0\n' "$name" >> "$run/seconds.tsv"
        "$@" --output_dir "$run/$name" --resume true || status=$?
        printf '%s\t%s\n' "$name" "$((SECONDS - begin))" >> "$run/seconds.tsv"
    fi
    return $status
}
