-- name: definitions
-- The immutable part of a job's generation.
SELECT job_id, org_id, dag_name, name, operator, config, execution_strategy, update_strategy, unique_key, secrets,
       udf, activation, source_kind, runs_code
FROM job WHERE job_id = ANY($1::uuid[])

-- name: outputs
-- The versions that a job's generation writes.
SELECT dv.job_id, dv.output_index, dv.output_name, dv.dataset_uuid, dv.dataset_version, dv.version_no, dv.storage
FROM dataset_version dv WHERE dv.job_id = ANY($1::uuid[]) ORDER BY dv.job_id, dv.output_index

-- name: inputs
-- The versions that a job's generation reads.
SELECT ji.job_id, ji.dataset_uuid, ji.dataset_version, dv.storage, ji.trigger, ji.where_tree
FROM job_input ji JOIN dataset_version dv USING (dataset_version)
WHERE ji.job_id = ANY($1::uuid[]) ORDER BY ji.job_id, ji.input_index

-- name: output_state
-- The mutable part of outputs: their revision, and their published name.
SELECT dv.dataset_version, dv.revision, d.published_name
FROM dataset_version dv JOIN dataset d USING (dataset_uuid) WHERE dv.job_id = ANY($1::uuid[])

-- name: active_job
-- A job by the name that people use.
SELECT job_id, org_id, activation, source_kind, runtime, paused, bulk_held, backlog, runs_code FROM job
WHERE dag_name = $1 AND name = $2 AND active

-- name: is_paused
-- Read under the job's lock.
SELECT paused FROM job WHERE job_id = $1

-- name: add_pause
-- A paused job gets no new tasks and its tasks aren't claimed. The job's row is locked.
WITH added AS (
    INSERT INTO job_pause (job_id, cause, actor) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING job_id
), flagged AS (
    UPDATE job SET paused = true WHERE job_id = $1 AND NOT paused RETURNING job_id
)
SELECT EXISTS (SELECT 1 FROM added) AS changed, EXISTS (SELECT 1 FROM flagged) AS flagged, true AS paused

-- name: lift_pause
-- Removes one cause; the job goes on when it was the last one. The job's row is locked.
WITH other AS (
    SELECT EXISTS (SELECT 1 FROM job_pause WHERE job_id = $1 AND cause <> $2 AND NOT bulk_only) AS causes
), lifted AS (
    DELETE FROM job_pause WHERE job_id = $1 AND cause = $2 RETURNING job_id
), flagged AS (
    UPDATE job SET paused = false, backlog = backlog
        OR EXISTS (SELECT 1 FROM held_scope h WHERE h.job_id = $1)
        OR EXISTS (SELECT 1 FROM dataset_version dv JOIN event e USING (dataset_version)
                   WHERE dv.job_id = $1 AND e.state = 'held')
    FROM other WHERE job_id = $1 AND paused AND NOT other.causes RETURNING job_id
)
SELECT EXISTS (SELECT 1 FROM lifted) AS changed, EXISTS (SELECT 1 FROM flagged) AS flagged, other.causes AS paused
FROM other

-- name: reactive_jobs
-- Jobs that may lack tasks.
SELECT job_id, execution_strategy FROM job
WHERE active AND NOT paused AND activation = 'reactive' ORDER BY job_id

-- name: missing_scopes
-- Scopes that an input has committed and for which the job has no task of this revision and that weren't skipped,
-- which only scopes are that were never invalidated; the creation of tasks checks whether the other inputs have them too. Read in pages, by range. While nothing that the job reads or
-- writes was ever invalidated, all its scopes have one key, which is computed once.
WITH whole AS MATERIALIZED (
    SELECT scope_key($1, 0, 0) AS key,
           NOT EXISTS (SELECT 1 FROM dataset_version dv WHERE dv.job_id = $1 AND dv.revision > 0)
           AND NOT EXISTS (SELECT 1 FROM job_input ji JOIN dataset_version dv USING (dataset_version)
                           WHERE ji.job_id = $1 AND dv.revision > 0) AS untouched
)
SELECT p.range_start, p.range_end,
       EXISTS (SELECT 1 FROM task t
               WHERE t.kind = 'partition' AND t.job_id = $1 AND t.range_start = p.range_start
                 AND t.range_end = p.range_end
                 AND t.scope_key = CASE WHEN whole.untouched THEN whole.key
                                        ELSE scope_key($1, p.range_start, p.range_end) END)
       OR EXISTS (SELECT 1 FROM skipped_scope s
                  WHERE s.job_id = $1 AND s.range_start = p.range_start AND s.range_end = p.range_end
                    AND (whole.untouched OR scope_key($1, p.range_start, p.range_end) !~ '[1-9]')) AS has_task
FROM whole CROSS JOIN (
    SELECT p.range_start, p.range_end FROM partition p
    WHERE p.current AND p.dataset_version = (SELECT ji.dataset_version FROM job_input ji
                                             WHERE ji.job_id = $1 AND ji.trigger AND ji.input_index = $2)
      AND (p.range_start, p.range_end) > ($3, $4)
    ORDER BY p.range_start, p.range_end LIMIT $5) p
ORDER BY p.range_start, p.range_end

-- name: skippable_scopes
-- The rows of each triggering input of these scopes, as far as they are known. Only scopes of which nothing that the job reads
-- or writes was ever invalidated: a task that repeats invalidated blocks retracts what an earlier one published. And
-- only of jobs by whose outputs nobody is triggered, who would wait for the scope.
SELECT c.job_id, c.range_start, c.range_end, ji.input_index, p.row_count, p.manifest -> 'files' AS files
FROM unnest($1::uuid[], $2::bigint[], $3::bigint[]) AS c(job_id, range_start, range_end)
JOIN job_input ji ON ji.job_id = c.job_id AND ji.trigger
JOIN partition p ON p.dataset_version = ji.dataset_version AND p.current
    AND p.range_start = c.range_start AND p.range_end = c.range_end
WHERE scope_key(c.job_id, c.range_start, c.range_end) !~ '[1-9]'
  AND NOT EXISTS (SELECT 1 FROM dataset_version dv JOIN job_input r ON r.dataset_version = dv.dataset_version AND r.trigger
                  JOIN job reader ON reader.job_id = r.job_id AND reader.active
                  WHERE dv.job_id = c.job_id)
ORDER BY c.job_id, c.range_start, c.range_end, ji.input_index

-- name: skip_scopes
-- Scopes that need no task. Recorded, so that the reconciler doesn't take them for forgotten ones.
INSERT INTO skipped_scope (job_id, range_start, range_end)
SELECT s.job_id, s.range_start, s.range_end
FROM unnest($1::uuid[], $2::bigint[], $3::bigint[]) AS s(job_id, range_start, range_end)
ORDER BY s.job_id, s.range_start, s.range_end
ON CONFLICT (job_id, range_start, range_end) DO NOTHING
RETURNING job_id

-- name: room
-- How many more tasks may wait in a job's queue. Those that wait for a retry time take no room.
SELECT CASE WHEN j.max_queue_depth IS NOT NULL THEN greatest(0, j.max_queue_depth
                   - (SELECT coalesce(sum(q.waiting), 0) FROM queue_count q WHERE q.job_id = j.job_id)
                   + (SELECT count(*) FROM task t
                      WHERE t.job_id = j.job_id AND t.status = 'Queued' AND NOT t.stalled
                        AND t.ready_at > tl_now()))::int END AS room
FROM job j WHERE j.job_id = $1

-- name: triggering_inputs
-- The inputs to compare.
SELECT input_index FROM job_input WHERE job_id = $1 AND trigger ORDER BY input_index

-- name: last_update
-- The last task of a PerUpdate job: while it is live nothing is missing, and a range that it gave up is not tried
-- again until there is something newer.
SELECT t.status, t.inputs, t.ended_at FROM task t
WHERE t.job_id = $1 AND t.kind = 'cursor' ORDER BY t.seq DESC LIMIT 1

-- name: update_moved_since
-- Whether an input advanced or was invalidated after this time.
SELECT EXISTS (
    SELECT 1 FROM job_input ji
    LEFT JOIN dataset_cursor dc USING (dataset_version)
    WHERE ji.job_id = $1 AND ji.trigger
      AND (dc.updated_at > $2
           OR EXISTS (SELECT 1 FROM partition p WHERE p.dataset_version = ji.dataset_version AND p.current
                        AND p.committed_at > $2)
           OR EXISTS (SELECT 1 FROM invalidation i WHERE i.dataset_version = ji.dataset_version
                        AND i.created_at > $2))) AS moved

-- name: idle_sources
-- Always-on sources without a task.
SELECT j.job_id FROM job j
WHERE j.active AND j.source_kind = 'always_on'
  AND NOT EXISTS (SELECT 1 FROM task t WHERE t.job_id = j.job_id AND t.kind = 'source')
