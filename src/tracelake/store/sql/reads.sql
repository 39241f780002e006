-- name: list_dags
-- A page of active DAGs by name.
SELECT name, active_version, deployed_at FROM dag WHERE name > $1 ORDER BY name LIMIT $2

-- name: jobs_of_dags
-- The active jobs of some DAGs, and by whom and why they are paused.
SELECT j.dag_name, j.name, j.activation, j.source_kind, j.operator, j.runtime, j.execution_strategy, j.priority,
       j.paused, p.paused_by, p.paused_at, p.pause_causes
FROM job j CROSS JOIN LATERAL (
    SELECT max(actor) FILTER (WHERE cause = 'person') AS paused_by, min(since) AS paused_at,
           coalesce(array_agg(cause ORDER BY since, cause), '{}') AS pause_causes
    FROM job_pause WHERE j.paused AND job_id = j.job_id AND NOT bulk_only) p
WHERE j.dag_name = ANY($1::text[]) AND j.active ORDER BY j.dag_name, j.name

-- name: recent_tasks
-- The newest tasks of all.
SELECT seq FROM task WHERE seq < $1 ORDER BY seq DESC LIMIT $2

-- name: recent_tasks_of_jobs
-- The newest tasks of some jobs, every generation of them, in any status. The array of one and the order by job
-- keep the planner from walking all tasks backwards in search of the job, which may have none.
SELECT t.seq FROM job j CROSS JOIN LATERAL (
    SELECT seq FROM task WHERE job_id = ANY(ARRAY[j.job_id]) AND seq < $3
    ORDER BY job_id, seq DESC LIMIT $4) t
WHERE ($1::text IS NULL OR j.dag_name = $1) AND ($2::text IS NULL OR j.name = $2)
ORDER BY t.seq DESC LIMIT $4

-- name: queued_tasks
-- Queued tasks, job by job from the index of queued ones.
SELECT t.seq FROM job j CROSS JOIN LATERAL (
    SELECT seq FROM task WHERE job_id = ANY(ARRAY[j.job_id]) AND status = 'Queued' AND seq < $3
    ORDER BY job_id DESC, seq DESC LIMIT $4) t
WHERE ($1::text IS NULL OR j.dag_name = $1) AND ($2::text IS NULL OR j.name = $2)
ORDER BY t.seq DESC LIMIT $4

-- name: running_tasks
-- Running tasks, from the index of running ones; there are never many.
SELECT t.seq FROM job j CROSS JOIN LATERAL (
    SELECT seq FROM task WHERE job_id = j.job_id AND status = 'Running' AND seq < $3 ORDER BY seq DESC LIMIT $4) t
WHERE ($1::text IS NULL OR j.dag_name = $1) AND ($2::text IS NULL OR j.name = $2)
ORDER BY t.seq DESC LIMIT $4

-- name: failed_tasks
-- Failed tasks, from the index of failed ones.
SELECT t.seq FROM task t JOIN job j USING (job_id)
WHERE t.status = 'Failed' AND t.seq < $3
  AND ($1::text IS NULL OR j.dag_name = $1) AND ($2::text IS NULL OR j.name = $2)
ORDER BY t.seq DESC LIMIT $4

-- name: canceled_tasks
-- Canceled tasks, from the index of canceled ones.
SELECT t.seq FROM task t JOIN job j USING (job_id)
WHERE t.status = 'Canceled' AND t.seq < $3
  AND ($1::text IS NULL OR j.dag_name = $1) AND ($2::text IS NULL OR j.name = $2)
ORDER BY t.seq DESC LIMIT $4

-- name: completed_tasks
-- Completed tasks: nearly all are, so walking each job's newest finds them at once.
SELECT t.seq FROM job j CROSS JOIN LATERAL (
    SELECT seq FROM task WHERE job_id = ANY(ARRAY[j.job_id]) AND status = 'Completed' AND seq < $3
    ORDER BY job_id, seq DESC LIMIT $4) t
WHERE ($1::text IS NULL OR j.dag_name = $1) AND ($2::text IS NULL OR j.name = $2)
ORDER BY t.seq DESC LIMIT $4

-- name: tasks_by_seq
-- The tasks of a page.
SELECT t.seq, t.task_id, j.dag_name, j.name AS job, j.operator, j.runtime, t.kind, t.status, t.attempt, t.failures,
       t.range_start AS start, t.range_end AS "end", t.worker_id, t.created_at, t.ready_at, t.lease_expires_at,
       t.ended_at, t.error_message, a.progress
FROM task t JOIN job j USING (job_id)
LEFT JOIN attempt a ON a.task_id = t.task_id AND a.attempt = t.attempt
WHERE t.seq = ANY($1::bigint[]) ORDER BY t.seq DESC

-- name: task_detail
-- One task with its progress and what an attempt has saved.
SELECT t.seq, t.task_id, j.dag_name, j.name AS job, j.operator, j.runtime, t.kind, t.status, t.attempt, t.failures,
       t.range_start AS start, t.range_end AS "end", t.worker_id, t.created_at, t.ready_at, t.lease_expires_at,
       t.ended_at, t.error_message, a.progress, s.value AS state, t.cause, t.inputs, t.job_id
FROM task t JOIN job j USING (job_id)
LEFT JOIN attempt a ON a.task_id = t.task_id AND a.attempt = t.attempt
LEFT JOIN operator_state s ON s.job_id = t.job_id AND s.key = t.task_id::text
WHERE t.task_id = $1

-- name: task_attempts
-- The last attempts of a task.
SELECT attempt, worker_id, epoch, claimed_at, ended_at, outcome, error_message, progress
FROM attempt WHERE task_id = $1 ORDER BY attempt DESC LIMIT $2

-- name: task_outputs
-- The outputs of a job.
SELECT dv.output_index, dv.output_name AS name, dv.dataset_uuid, dv.dataset_version, d.published_name AS dataset,
       dv.storage
FROM dataset_version dv JOIN dataset d USING (dataset_uuid) WHERE dv.job_id = $1 ORDER BY dv.output_index

-- name: task_partitions
-- The partitions that a task committed.
SELECT dataset_version, range_start AS start, range_end AS "end", current, revision, row_count, location,
       committed_at
FROM partition WHERE task_id = $1 ORDER BY partition_id DESC LIMIT $2

-- name: task_events
-- The events of a task with a scope; there are few, so its own index serves.
SELECT event_id, attempt, dataset_version, kind, range_start AS start, range_end AS "end", revision, state,
       created_at
FROM event WHERE task_id = $1 ORDER BY event_id DESC LIMIT $2

-- name: source_events
-- The last events of an always-on source; it never stops, so the end of its outputs' events is read.
SELECT e.* FROM dataset_version dv CROSS JOIN LATERAL (
    SELECT event_id, attempt, dataset_version, kind, range_start AS start, range_end AS "end", revision, state,
           created_at
    FROM event WHERE event.dataset_version = dv.dataset_version ORDER BY event_id DESC LIMIT $2) e
WHERE dv.job_id = $1 ORDER BY e.event_id DESC LIMIT $2

-- name: list_datasets
-- A page of datasets in their current version, of all jobs or of some.
SELECT d.published_name AS dataset, d.dataset_uuid, dv.dataset_version, dv.revision, dv.storage, d.write_mode,
       d.dag_name, d.job_name AS job, dv.output_index, dv.output_name, dc.cursor, dc.finalized, dv.created_at,
       (SELECT count(*) FROM partition p WHERE p.dataset_version = dv.dataset_version AND p.current) AS partitions,
       d.schema_hash
FROM dataset d JOIN dataset_version dv ON dv.dataset_uuid = d.dataset_uuid AND dv.is_current
LEFT JOIN dataset_cursor dc ON dc.dataset_version = dv.dataset_version
WHERE d.dataset_uuid > $1 AND ($3::text IS NULL OR d.dag_name = $3) AND ($4::text IS NULL OR d.job_name = $4)
ORDER BY d.dataset_uuid LIMIT $2

-- name: dataset_detail
-- One dataset in its current version, by published name or by uuid.
SELECT d.published_name AS dataset, d.dataset_uuid, dv.dataset_version, dv.revision, dv.storage, d.write_mode,
       d.dag_name, d.job_name AS job, dv.output_index, dv.output_name, dc.cursor, dc.finalized, dv.created_at,
       hot_counterpart(dv.dataset_version) AS hot_version,
       (SELECT count(*) FROM partition p WHERE p.dataset_version = dv.dataset_version AND p.current) AS partitions,
       d.schema_hash, d.buffer_schema AS schema
FROM dataset d JOIN dataset_version dv ON dv.dataset_uuid = d.dataset_uuid AND dv.is_current
LEFT JOIN dataset_cursor dc ON dc.dataset_version = dv.dataset_version
WHERE d.dataset_uuid = coalesce($3::uuid, (SELECT dataset_uuid FROM dataset
                                          WHERE org_id = $1 AND published_name = $2))

-- name: dataset_versions
-- The newest generations of a dataset with their committed blocks.
SELECT dv.dataset_version, dv.is_current AS current, dv.revision, dv.storage, dv.created_at, dc.cursor,
       p.partitions, p.start, p."end", p.rows, greatest(p.updated_at, dc.updated_at) AS updated_at
FROM dataset_version dv
LEFT JOIN dataset_cursor dc ON dc.dataset_version = dv.dataset_version
CROSS JOIN LATERAL (
    SELECT count(*) AS partitions, min(range_start) AS start, max(range_end) AS "end",
           sum(row_count)::bigint AS rows, max(committed_at) AS updated_at
    FROM partition WHERE partition.dataset_version = dv.dataset_version AND partition.current) p
WHERE dv.dataset_uuid = $1 ORDER BY dv.is_current DESC, dv.version_no DESC LIMIT $2

-- name: dataset_lag
-- A version's lag: as its source reports it, or how far the triggering inputs of its job are ahead.
SELECT CASE WHEN j.activation = 'source'
            THEN (SELECT CASE WHEN jsonb_typeof(a.progress -> 'lag') = 'number'
                              THEN (a.progress ->> 'lag')::numeric::bigint END
                  FROM task t JOIN attempt a ON a.task_id = t.task_id AND a.attempt = t.attempt
                  WHERE t.job_id = j.job_id AND t.kind = 'source')
            ELSE (SELECT max(greatest(coalesce(ic.cursor, ip.last, -1) - coalesce(cc.cursor, own.last, -1), 0))
                  FROM job_input ji
                  LEFT JOIN dataset_cursor ic ON ic.dataset_version = ji.dataset_version
                  LEFT JOIN LATERAL (SELECT max(range_end) AS last FROM partition
                                     WHERE partition.dataset_version = ji.dataset_version AND current) ip ON true
                  LEFT JOIN consumer_cursor cc ON cc.job_id = ji.job_id AND cc.input_index = ji.input_index
                  WHERE ji.job_id = j.job_id AND ji.trigger) END AS behind,
       extract(epoch FROM tl_now() - greatest(own.at, dc.updated_at))::double precision AS seconds
FROM dataset_version dv JOIN job j USING (job_id)
LEFT JOIN dataset_cursor dc ON dc.dataset_version = dv.dataset_version
CROSS JOIN LATERAL (SELECT max(range_end) AS last, max(committed_at) AS at
                    FROM partition WHERE partition.dataset_version = dv.dataset_version AND current) own
WHERE dv.dataset_version = $1

-- name: current_version
-- The current version of a dataset, by published name or by uuid.
SELECT dv.dataset_uuid, dv.dataset_version FROM dataset_version dv
WHERE dv.is_current
  AND dv.dataset_uuid = coalesce($3::uuid, (SELECT dataset_uuid FROM dataset
                                           WHERE org_id = $1 AND published_name = $2))

-- name: list_partitions
-- A page of a version's current partitions, by block.
SELECT range_start AS start, range_end AS "end", current, revision, row_count, location, committed_at, task_id,
       attempt, coalesce(jsonb_path_query_array(manifest, '$.files[*].location'), '[]') AS files,
       manifest->>'verified' AS verified, manifest->'edges' AS edges,
       CASE WHEN $5 THEN coalesce(manifest->'files', '[]') END AS details
FROM partition
WHERE dataset_version = $1 AND current AND (range_start, range_end) > ($2, $3)
  AND range_end >= $6 AND range_start <= $7
ORDER BY range_start, range_end LIMIT $4

-- name: list_versions
-- A page of a DAG's versions, newest first.
SELECT v.version, v.version = d.active_version AS active, jsonb_array_length(v.spec->'jobs') AS jobs, v.created_at,
       v.created_by
FROM dag d JOIN dag_version v ON v.dag_name = d.name
WHERE d.org_id = $1 AND d.name = $2 AND v.version < $3 ORDER BY v.version DESC LIMIT $4

-- name: active_version
-- The active version of a DAG.
SELECT active_version FROM dag WHERE org_id = $1 AND name = $2

-- name: version
-- A DAG file as it was deployed.
SELECT v.version, v.version = d.active_version AS active, jsonb_array_length(v.spec->'jobs') AS jobs, v.created_at,
       v.created_by, v.dag_name, v.yaml
FROM dag d JOIN dag_version v ON v.dag_name = d.name
WHERE d.org_id = $1 AND d.name = $2 AND v.version = $3
