-- name: followers
-- Each active job that follows a chain ($1: its operators), with its newest task that counts, what that last
-- reported, when its last error ended an attempt, and why it is paused.
SELECT j.dag_name, j.name AS job, j.runtime, t.task_id, t.status, t.lease_expires_at, t.ready_at, t.ended_at,
       t.error_message, f.ended_at AS failed_at, a.claimed_at, a.progress, p.pauses, tl_now() AS now
FROM job j
LEFT JOIN LATERAL (
    SELECT * FROM task WHERE task.job_id = ANY(ARRAY[j.job_id]) AND task.status <> 'Canceled'
    ORDER BY task.job_id, task.seq DESC LIMIT 1) t ON true
LEFT JOIN attempt a ON a.task_id = t.task_id AND a.attempt = t.attempt
LEFT JOIN LATERAL (
    SELECT ended_at FROM attempt WHERE attempt.task_id = t.task_id AND attempt.error_message = t.error_message
    ORDER BY attempt.attempt DESC LIMIT 1) f ON t.error_message IS NOT NULL
CROSS JOIN LATERAL (
    SELECT coalesce(jsonb_agg(jsonb_build_object('cause', cause, 'actor', actor, 'since', since)
                              ORDER BY since, cause), '[]') AS pauses
    FROM job_pause WHERE j.paused AND NOT bulk_only AND job_pause.job_id = j.job_id) p
WHERE j.active AND j.operator = ANY($1::text[]) ORDER BY j.dag_name, j.name
