#!/usr/bin/env bash
# Talks to a running Dispatcher with curl alone: deploy, trigger, claim, heartbeat, complete, and the
# downstream task. Usage: conversation.sh READY_FILE   (dev.json of `tracelake dev --no-workers`, or what --ready-file wrote)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
get() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]) if sys.argv[1] != "-" else sys.stdin)
for key in sys.argv[2].split("."): value = value[int(key) if key.isdigit() else key]
print(value)' "$1" "$2"; }

user=$(get "$1" user_url) internal=$(get "$1" internal_url)
as_user="Authorization: Bearer $(get "$1" user_token)"
as_worker="X-Trace-Worker-Token: $(get "$1" worker_token)"
json="Content-Type: application/json"
call() { curl -sS --fail-with-body "$@"; }
queued() {  # the oldest queued task of a job, once there is one
  for _ in $(seq 100); do
    found=$(call -H "$as_user" "$user/v1/tasks?dag=first_steps&job=$1&status=Queued&limit=100")
    id=$(echo "$found" | python3 -c 'import json, sys
tasks = json.load(sys.stdin)["tasks"]
print(tasks[-1]["task_id"] if tasks else "")')
    [ -n "$id" ] && echo "$id" && return
    sleep 0.1
  done
  echo "no queued task of $1" >&2; return 1
}

echo "deploy    $(call -H "$as_user" --data-binary "@$here/dag.yaml" "$user/v1/dags" | get - dag_name)"
call -H "$as_user" -H "$json" -d '{"start": 0, "end": 1999}' \
  "$user/v1/sources/first_steps/request/trigger" > /dev/null
echo "trigger   blocks 0-1999"

task=$(queued ingest)
claim=$(call -H "$as_worker" -H "$json" -d "{\"task_id\": \"$task\", \"worker_id\": \"curl\"}" \
  "$internal/internal/task-claim")
attempt=$(echo "$claim" | get - attempt) lease=$(echo "$claim" | get - lease_token)
start=$(echo "$claim" | get - task.inputs.0.start) end=$(echo "$claim" | get - task.inputs.0.end)
echo "claim     $(echo "$claim" | get - status): attempt $attempt of ingest $start-$end"

fence="\"task_id\": \"$task\", \"attempt\": $attempt, \"lease_token\": \"$lease\""
beat=$(call -H "$as_worker" -H "$json" -d "{$fence}" "$internal/internal/heartbeat")
echo "heartbeat cancel: $(echo "$beat" | get - cancel)"

output="{\"output_index\": 0, \"start\": $start, \"end\": $end, \"row_count\": 0}"
complete=$(call -H "$as_worker" -H "$json" -d "{$fence, \"status\": \"Completed\", \"outputs\": [$output]}" \
  "$internal/internal/task-complete")
echo "complete  $(echo "$complete" | get - status)"
again=$(call -H "$as_worker" -H "$json" -d "{$fence, \"status\": \"Completed\", \"outputs\": [$output]}" \
  "$internal/internal/task-complete")
echo "repeated  $(echo "$again" | get - status), nothing changed"

next=$(queued transform)
echo "next      $(call -H "$as_user" "$user/v1/tasks/$next" | get - job) is queued for the same chunk"
