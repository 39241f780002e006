-- name: queued
-- Waiting tasks per job; reads live rows only.
SELECT j.runtime, j.dag_name, j.name, count(*) AS waiting,
       extract(epoch FROM tl_now() - min(t.created_at))::float8 AS oldest_seconds
FROM task t JOIN job j USING (job_id) WHERE t.status = 'Queued' GROUP BY 1, 2, 3

-- name: in_flight
-- Running tasks per operator.
SELECT j.operator, count(*) AS running FROM task t JOIN job j USING (job_id) WHERE t.status = 'Running' GROUP BY 1

-- name: given_up
-- Outbox entries that need a person.
SELECT count(*) AS given_up FROM outbox WHERE failed_at IS NOT NULL

-- name: dead_letters
-- Dead letters per dataset.
SELECT coalesce(d.published_name, d.dataset_uuid::text) AS dataset, count(*) AS kept
FROM dead_letter l JOIN dataset d USING (dataset_uuid) GROUP BY 1
