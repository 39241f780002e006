-- name: save
-- The task's row is held, so that nobody but its current attempt writes this.
INSERT INTO operator_state (job_id, key, value, task_id, attempt, input_revisions)
SELECT t.job_id, t.task_id::text, $2::jsonb, t.task_id, t.attempt, input_revisions(t.inputs)
FROM task t WHERE t.task_id = $1
ON CONFLICT (job_id, key) DO UPDATE
SET value = excluded.value, attempt = excluded.attempt, input_revisions = excluded.input_revisions,
    updated_at = tl_now()

-- name: forget
-- The next attempt begins from nothing.
DELETE FROM operator_state WHERE job_id = $1 AND key = $2::uuid::text

-- name: saved
-- What a task's attempt may resume from: not what was derived from an input that has changed since.
SELECT s.value
FROM task t JOIN operator_state s ON s.job_id = t.job_id AND s.key = t.task_id::text
WHERE t.task_id = $1 AND s.input_revisions = input_revisions(t.inputs)
