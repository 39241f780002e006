#!/bin/sh
# Runs the DAG on the stack of a home (default: .tracelake), from push to logs.
set -eu
here=$(dirname "$0")
home=${1:-.tracelake}
tracelake=${TRACELAKE:-tracelake}

bundle=$("$tracelake" bundle push "$here/../functions/python" --home "$home")
yaml=$(mktemp)
trap 'rm -f "$yaml"' EXIT
sed "s/sha256:0*/$bundle/" "$here/dag.yaml" >"$yaml"
"$tracelake" deploy "$yaml" --home "$home"
"$tracelake" trigger three_runtimes/request --start 0 --end 1999 --home "$home"

for job in numbers squares chunks; do
    until "$tracelake" tasks --dag three_runtimes --job "$job" --status Completed --home "$home" --json | grep -q task_id; do
        sleep 0.2
    done
    task=$("$tracelake" tasks --dag three_runtimes --job "$job" --status Completed --home "$home" --json |
        sed -n 's/.*"task_id": *"\([0-9a-f-]*\)".*/\1/p' | head -n 1)
    echo "== $job: $task"
    "$tracelake" logs "$task" --home "$home"
done
