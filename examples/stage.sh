# The pipelines source this file; $run is the folder of all stages.

stage() {  # stage NAME RESULT COMMAND...: run the command unless its result exists
    local name=$1 result=$2
    shift 2
    if [ -e "$run/$name/$result" ]; then
        echo "== $name: finished before ($run/$name/$result)"
    else
        echo "== $name"
        "$@" --output_dir "$run/$name" --resume true
    fi
}
