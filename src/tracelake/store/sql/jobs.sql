-- name: cards
-- What never changes about a job's generation.
SELECT job_id, org_id, dag_name, name, operator, config, execution_strategy, update_strategy, unique_key, secrets,
       udf, activation, source_kind
FROM job WHERE job_id = ANY($1::uuid[])

-- name: outputs
-- The versions that a job's generation writes.
SELECT dv.job_id, dv.output_index, dv.output_name, dv.dataset_uuid, dv.dataset_version, dv.version_no, dv.storage
FROM dataset_version dv WHERE dv.job_id = ANY($1::uuid[]) ORDER BY dv.job_id, dv.output_index

-- name: inputs
-- The versions that a job's generation reads.
SELECT ji.job_id, ji.dataset_uuid, ji.dataset_version, dv.storage
FROM job_input ji JOIN dataset_version dv USING (dataset_version)
WHERE ji.job_id = ANY($1::uuid[]) ORDER BY ji.job_id, ji.input_index

-- name: output_state
-- What changes about outputs: their revision, and the name they are published under.
SELECT dv.dataset_version, dv.revision, d.published_name
FROM dataset_version dv JOIN dataset d USING (dataset_uuid) WHERE dv.job_id = ANY($1::uuid[])

-- name: active_job
-- A job by the name that people use.
SELECT job_id, org_id, activation, source_kind, runtime, paused FROM job
WHERE dag_name = $1 AND name = $2 AND active

-- name: set_paused
-- A paused job gets no new tasks and its tasks aren't claimed.
UPDATE job SET paused = $2 WHERE job_id = $1 AND paused <> $2 RETURNING job_id
