-- name: unfinished
-- What keeps the load from being over: live tasks, and outbox entries that are due, given up, or put off for
-- longer than a delivery that was cut short explains.
SELECT j.dag_name || '/' || j.name || ' ' || t.task_id || ' ' || t.status || ' attempt ' || t.attempt
       || ' lease ' || coalesce(t.lease_expires_at::text, '-') || ' ready ' || t.ready_at AS what
FROM task t JOIN job j USING (job_id) WHERE t.status IN ('Queued', 'Running')
UNION ALL
SELECT 'outbox ' || outbox_id || ' ' || runtime || ' tries ' || tries || ' due ' || available_at
       || ' ' || coalesce(last_error, '') FROM outbox
WHERE failed_at IS NOT NULL OR available_at <= tl_now() OR available_at > tl_now() + make_interval(secs => 31)
LIMIT 20

-- name: scopes
-- Every task of the jobs that run per scope.
SELECT j.name AS job, t.range_start, t.range_end, t.status, t.task_id
FROM task t JOIN job j USING (job_id)
WHERE j.dag_name = 'load' AND t.kind = 'partition'

-- name: completed_attempts
-- Which attempt of each task was the one that counted; more than one would be a double commit.
SELECT task_id, array_agg(attempt ORDER BY attempt) AS attempts
FROM attempt WHERE outcome = 'Completed' GROUP BY task_id

-- name: committed_scopes
-- The current partitions of each output, and how often each scope was committed by whom.
SELECT j.name AS job, p.range_start, p.range_end, p.task_id, p.attempt
FROM partition p JOIN dataset_version dv USING (dataset_version) JOIN job j ON j.job_id = dv.job_id
WHERE j.dag_name = 'load' AND p.current AND dv.is_current

-- name: merged_ranges
-- What the PerUpdate job read, in order.
SELECT (t.inputs->0->>'after')::bigint AS after, (t.inputs->0->>'upto')::bigint AS upto, t.status
FROM task t JOIN job j USING (job_id)
WHERE j.dag_name = 'load' AND j.name = 'merge' ORDER BY t.seq

-- name: merge_cursor
-- How far the PerUpdate job has read.
SELECT cc.cursor FROM consumer_cursor cc JOIN job j USING (job_id)
WHERE j.dag_name = 'load' AND j.name = 'merge' AND j.active
