-- name: job
-- The measured job.
SELECT job_id FROM job WHERE dag_name = $1 AND name = 'step1' AND active

-- name: tasks
-- Finished tasks, as a completion leaves them.
INSERT INTO task (task_id, org_id, job_id, kind, status, range_start, range_end, scope_key, attempt, last_outcome,
                  worker_id, lease_token, lease_expires_at, epoch, inputs, output_revisions, ended_at, cause)
SELECT gen_random_uuid(), j.org_id, j.job_id, 'partition', 'Completed', n, n, '0;0', 1, 'Completed', 'seed',
       gen_random_uuid(), tl_now(), nextval('epoch_seq'),
       jsonb_build_array(jsonb_build_object(
           'input_index', 0, 'dataset_uuid', ji.dataset_uuid, 'dataset_version', ji.dataset_version, 'revision', 0,
           'dataset', NULL, 'storage', 'none', 'trigger', true, 'partition_key', n || '-' || n, 'start', n,
           'end', n, 'where', NULL, 'where_tree', NULL, 'invalidation', NULL)),
       jsonb_build_object(dv.dataset_version, 0), tl_now(), '{"kind": "scope"}'
FROM job j JOIN job_input ji USING (job_id) JOIN dataset_version dv USING (job_id)
CROSS JOIN generate_series($2::bigint, $3::bigint) AS n
WHERE j.job_id = $1

-- name: attempts
-- The one attempt of each.
INSERT INTO attempt (task_id, attempt, worker_id, lease_token, epoch, claimed_at, ended_at, outcome,
                     completion_digest, result)
SELECT t.task_id, 1, 'seed', t.lease_token, t.epoch, tl_now(), tl_now(), 'Completed', sha256(t.task_id::text::bytea),
       '{"status": "Completed", "task_status": "Completed", "retry_at": null}'
FROM task t WHERE t.job_id = $1 AND t.range_start BETWEEN $2 AND $3

-- name: events
-- The events that each of them sent.
INSERT INTO event (org_id, dataset_version, task_id, attempt, kind, range_start, range_end, revision, state)
SELECT t.org_id, dv.dataset_version, t.task_id, 1, 'partition', t.range_start, t.range_end, 0, 'counted'
FROM task t JOIN dataset_version dv USING (job_id) WHERE t.job_id = $1 AND t.range_start BETWEEN $2 AND $3

-- name: inputs
-- The scopes that they were made for.
INSERT INTO partition (dataset_version, version_no, range_start, range_end, stored, current, revision)
SELECT dv.dataset_version, dv.version_no, n, n, false, true, 0
FROM job_input ji JOIN dataset_version dv USING (dataset_version)
CROSS JOIN generate_series($2::bigint, $3::bigint) AS n WHERE ji.job_id = $1

-- name: outputs
-- The scopes that they made.
INSERT INTO partition (dataset_version, version_no, range_start, range_end, stored, current, revision, task_id,
                       attempt, epoch)
SELECT dv.dataset_version, dv.version_no, t.range_start, t.range_end, false, true, 0, t.task_id, 1, t.epoch
FROM task t JOIN dataset_version dv USING (job_id) WHERE t.job_id = $1 AND t.range_start BETWEEN $2 AND $3

-- name: vacuum
-- Statistics and visibility as autovacuum would leave them.
VACUUM ANALYZE

-- name: checkpoint
-- What was seeded is written out before anything is measured.
CHECKPOINT

-- name: queued_task
-- The task that the event made.
SELECT t.task_id FROM task t JOIN job j USING (job_id)
WHERE j.dag_name = $1 AND j.name = 'step1' AND j.active AND t.kind = 'partition' AND t.range_start = $2
  AND t.status = 'Queued'
