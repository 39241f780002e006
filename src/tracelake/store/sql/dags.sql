-- name: active_specs
-- Every DAG as it is deployed now.
SELECT d.name, d.active_version, v.spec, v.yaml_sha256
FROM dag d JOIN dag_version v ON v.dag_name = d.name AND v.version = d.active_version

-- name: version_of_yaml
-- The same YAML twice is one version.
SELECT version FROM dag_version WHERE dag_name = $1 AND yaml_sha256 = $2

-- name: add_version
-- A deployed version never changes.
INSERT INTO dag_version (dag_name, version, org_id, yaml, yaml_sha256, spec, created_by)
SELECT $1, coalesce(max(version), 0) + 1, $2, $3, $4, $5, $6 FROM dag_version WHERE dag_name = $1
RETURNING version

-- name: activate_version
-- Active at once.
INSERT INTO dag (name, org_id, active_version) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET active_version = excluded.active_version, deployed_at = tl_now()

-- name: retire_job
-- The generation that a deploy replaces or removes; its data stays.
UPDATE job SET active = false, retired_at = tl_now() WHERE dag_name = $1 AND name = $2 AND active RETURNING job_id

-- name: retire_versions
-- Versions of retired jobs are no longer current.
UPDATE dataset_version SET is_current = false WHERE job_id = ANY($1::uuid[])

-- name: find_generation
-- The generation of a job with this fingerprint, if there ever was one: its data is still valid.
SELECT job_id FROM job WHERE dag_name = $1 AND name = $2 AND fingerprint = $3

-- name: add_job
-- A new generation of a job.
INSERT INTO job (job_id, org_id, dag_name, name, fingerprint, active, activation, source_kind, operator, config,
                 execution_strategy, update_strategy, unique_key, secrets, udf, trigger_count, runtime, max_attempts,
                 timeout_seconds, heartbeat_timeout_seconds, priority, max_concurrency, max_queue_depth,
                 max_queue_age_seconds, idle_timeout_seconds, retry_base_seconds, retry_max_seconds, source, runs_code)
VALUES ($1, $2, $3, $4, $5, true, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22,
        $23, $24, $25, $26, $27, $28)

-- name: tune_job
-- The settings by which a job is run; they may change without affecting its results.
UPDATE job SET active = true, retired_at = NULL, runtime = $2, max_attempts = $3, timeout_seconds = $4,
       heartbeat_timeout_seconds = $5, priority = $6, max_concurrency = $7, max_queue_depth = $8,
       max_queue_age_seconds = $9, idle_timeout_seconds = $10, retry_base_seconds = $11, retry_max_seconds = $12,
       source = $13
WHERE job_id = $1

-- name: outrank
-- Rows that a generation publishes from now on replace those of other generations of the job: its revisions begin
-- above theirs, each of which is its base plus the revisions of all that it reads and writes.
UPDATE job SET revision_base = 1 + earlier.highest
FROM (SELECT max(g.revision_base
                 + coalesce((SELECT sum(dv.revision) FROM job_input ji JOIN dataset_version dv USING (dataset_version)
                             WHERE ji.job_id = g.job_id), 0)
                 + coalesce((SELECT sum(dv.revision) FROM dataset_version dv WHERE dv.job_id = g.job_id), 0)
             )::bigint AS highest, count(*) AS generations
      FROM job me JOIN job g ON g.dag_name = me.dag_name AND g.name = me.name WHERE me.job_id = $1) earlier
WHERE job_id = $1 AND earlier.generations > 1

-- name: ensure_dataset
-- An output keeps its dataset through all its versions.
INSERT INTO dataset (dataset_uuid, org_id, dag_name, job_name, output_index) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (dag_name, job_name, output_index) DO UPDATE SET output_index = excluded.output_index
RETURNING dataset_uuid

-- name: add_dataset_version
-- A new, empty generation of a dataset.
INSERT INTO dataset_version (dataset_version, dataset_uuid, job_id, output_index, output_name, storage, is_current)
VALUES ($1, $2, $3, $4, $5, $6, true)

-- name: revive_versions
-- A job that is deployed again exactly as it was gets its data back.
UPDATE dataset_version SET is_current = true WHERE job_id = $1

-- name: current_version_of_output
-- The version that an input on a job's output reads now.
SELECT d.dataset_uuid, dv.dataset_version FROM dataset d JOIN dataset_version dv USING (dataset_uuid)
WHERE d.dag_name = $1 AND d.job_name = $2 AND d.output_index = $3 AND dv.is_current

-- name: current_version_of_name
-- The version that an input on a buffered dataset reads now.
SELECT d.dataset_uuid, dv.dataset_version FROM dataset d JOIN dataset_version dv USING (dataset_uuid)
WHERE d.org_id = $1 AND d.published_name = $2 AND dv.is_current

-- name: add_input
-- An edge of the graph, pinned to the version that it reads.
INSERT INTO job_input (job_id, input_index, dataset_uuid, dataset_version, trigger, where_text, where_tree)
VALUES ($1, $2, $3, $4, $5, $6, $7)

-- name: add_consumer_cursor
-- A PerUpdate job has read nothing yet.
INSERT INTO consumer_cursor (job_id, input_index) VALUES ($1, $2)

-- name: unpublish
-- Each deploy assigns the names anew.
UPDATE dataset SET published_name = NULL WHERE dag_name = $1 AND published_name IS NOT NULL AND write_mode = 'task'

-- name: publish_output
-- A job's output under a name.
UPDATE dataset SET published_name = $4 WHERE dag_name = $1 AND job_name = $2 AND output_index = $3

-- name: outputs_of_dag
-- The outputs of each job in the answer of a deploy.
SELECT j.name AS job, dv.output_index, dv.dataset_uuid, dv.dataset_version, d.published_name
FROM job j JOIN dataset_version dv USING (job_id) JOIN dataset d USING (dataset_uuid)
WHERE j.dag_name = $1 AND j.active AND d.write_mode = 'task' ORDER BY j.name, dv.output_index

-- name: audit
-- A record of an action and its actor.
INSERT INTO audit (org_id, actor, action, subject) VALUES ($1, $2, $3, $4)
