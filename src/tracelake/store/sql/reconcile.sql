-- name: reactive_jobs
-- Jobs that something may be missing for.
SELECT job_id, execution_strategy FROM job
WHERE active AND NOT paused AND activation = 'reactive' ORDER BY job_id

-- name: missing_scopes
-- Scopes that an input has committed and for which the job has no task of this revision; whether the other
-- inputs have them too is for the creation to check. Read in pages, by range. While nothing that the job reads or
-- writes was ever invalidated, all its scopes have one key, which is made once.
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
                                        ELSE scope_key($1, p.range_start, p.range_end) END) AS has_task
FROM whole CROSS JOIN (
    SELECT p.range_start, p.range_end FROM partition p
    WHERE p.current AND p.dataset_version = (SELECT ji.dataset_version FROM job_input ji
                                             WHERE ji.job_id = $1 AND ji.trigger AND ji.input_index = $2)
      AND (p.range_start, p.range_end) > ($3, $4)
    ORDER BY p.range_start, p.range_end LIMIT $5) p
ORDER BY p.range_start, p.range_end

-- name: triggering_inputs
-- The inputs to compare.
SELECT input_index FROM job_input WHERE job_id = $1 AND trigger ORDER BY input_index

-- name: last_update
-- The last task of a PerUpdate job: while it lives nothing is missing, and what it gave up on is not tried again
-- until there is something newer.
SELECT t.status, t.inputs, t.ended_at FROM task t
WHERE t.job_id = $1 AND t.kind = 'cursor' ORDER BY t.seq DESC LIMIT 1

-- name: update_moved_since
-- Did an input move, or was something taken back, after this time?
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
-- Always-on sources without a task: they get one.
SELECT j.job_id FROM job j
WHERE j.active AND j.source_kind = 'always_on'
  AND NOT EXISTS (SELECT 1 FROM task t WHERE t.job_id = j.job_id AND t.kind = 'source')
