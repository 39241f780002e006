-- name: claims
-- When each attempt of a DAG's last job was claimed, in order.
SELECT a.task_id, a.attempt, extract(epoch FROM a.claimed_at)::float8 AS claimed
FROM attempt a JOIN task t USING (task_id) JOIN job j ON j.job_id = t.job_id
WHERE j.dag_name = $1 AND j.name = 'step1'
ORDER BY a.claimed_at
