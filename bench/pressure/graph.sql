-- name: make_jobs
-- Chains of ten jobs, each with a threshold.
INSERT INTO job (job_id, org_id, dag_name, name, fingerprint, active, activation, operator, config,
                 execution_strategy, update_strategy, unique_key, secrets, trigger_count, runtime, max_attempts,
                 timeout_seconds, heartbeat_timeout_seconds, priority, max_queue_depth, max_queue_age_seconds,
                 retry_base_seconds, retry_max_seconds)
SELECT md5('job' || n)::uuid, (SELECT org_id FROM org), 'graph' || n / 10, 'step' || n % 10, 'bench', true,
       'reactive', 'noop', '{{}}', 'PerPartition', 'replace', '{{}}', '{{}}', 1, 'nobody', 3, 600, 120, 'normal',
       1000000, 86400, 30, 600
FROM generate_series(0, {jobs} - 1) AS n;
INSERT INTO dataset (dataset_uuid, org_id, dag_name, job_name, output_index)
SELECT md5('dataset' || n)::uuid, (SELECT org_id FROM org), 'graph' || n / 10, 'step' || n % 10, 0
FROM generate_series(0, {jobs} - 1) AS n;
INSERT INTO dataset_version (dataset_version, dataset_uuid, job_id, output_index, output_name, storage, is_current)
SELECT md5('version' || n)::uuid, md5('dataset' || n)::uuid, md5('job' || n)::uuid, 0, 'done', 'none', true
FROM generate_series(0, {jobs} - 1) AS n;

-- name: make_edges
-- Each job of a chain reads the one before.
INSERT INTO job_input (job_id, input_index, dataset_uuid, dataset_version, trigger)
SELECT md5('job' || n)::uuid, 0, md5('dataset' || n - 1)::uuid, md5('version' || n - 1)::uuid, true
FROM generate_series(0, {jobs} - 1) AS n WHERE n % 10 > 0;

-- name: make_tasks
-- The same number of waiting tasks in each job.
INSERT INTO task (task_id, org_id, job_id, kind, status, range_start, range_end, scope_key, woken_at)
SELECT gen_random_uuid(), (SELECT org_id FROM org), md5('job' || n % {jobs})::uuid, 'partition', 'Queued', n, n, '',
       tl_now() + interval '1 day'
FROM generate_series(0, {waiting} - 1) AS n;

-- name: make_kept
-- What a held backfill keeps: scopes of the first job of each chain, and events of these as if they were sources.
INSERT INTO held_scope (job_id, range_start, range_end, bulk)
SELECT md5('job' || n % ({jobs} / 10) * 10)::uuid, n, n, true FROM generate_series(0, {waiting} - 1) AS n;
INSERT INTO event (org_id, dataset_version, kind, range_start, range_end, revision, state, bulk)
SELECT (SELECT org_id FROM org), md5('version' || n % ({jobs} / 10) * 10)::uuid, 'partition', n, n, 0, 'held', true
FROM generate_series(0, {waiting} / 10 - 1) AS n;

-- name: set_thresholds
-- Nobody is full, or the last job of each chain is.
UPDATE job SET max_queue_depth = CASE WHEN $1::int IS NULL AND name = 'step9' THEN 1 ELSE coalesce($1::int, 1000000) END
WHERE fingerprint = 'bench'
