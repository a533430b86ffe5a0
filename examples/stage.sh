# Functions that the pipelines source. $run is the folder of all stages; $run/seconds.tsv gets the seconds of each attempt.
# ALL has options of every stage: ALL="--config add/wandb --seed 1". UNTIL=STAGE ends the script after that stage.
# Of a finished training model/ stays, and what only its resume needs is deleted.
# In a SLURM job too, Lightning starts as many processes as a stage has devices.
export SLURM_JOB_NAME=interactive
# Options are read as YAML, in which "#1" is nothing, and "a: b" no text unless it has a slash. So a folder begins with ./ or /,
# and what may be more than one path is quoted: --data.source "[$(quote "$path")]".
[[ $run == [/.]* ]] || run=./$run
quote() { printf "'%s'" "${1//\'/\'\'}"; }

# SIGTERM goes to all processes of a job: bash waits until the running stage has written its checkpoint, then ends.
trap 'terminated=true' TERM

stage() {  # stage NAME RESULT COMMAND...: run the command unless its result exists
    [ -z "${terminated:-}" ] || { echo "== terminated, before $1"; exit 143; }
    [ "${last_stage:-}" != "${UNTIL:-none}" ] || { echo "== stopped after $UNTIL, before $1"; exit 0; }
    local name=$1 result=$2 begin=$SECONDS status=0
    shift 2
    last_stage=$name
    mkdir -p "$run"
    if [ -e "$run/$name/$result" ]; then
        echo "== $name: finished before ($run/$name/$result)"
    else
        echo "== $name"
        printf '%s\t0\n' "$name" >> "$run/seconds.tsv"
        "$@" ${ALL:-} --output_dir "$run/$name" --resume true || status=$?
        printf '%s\t%s\n' "$name" "$((SECONDS - begin))" >> "$run/seconds.tsv"
    fi
    [ ! -e "$run/$name/model/config.json" ] || rm -rf "$run/$name"/{checkpoints,reference}
    return $status
}
