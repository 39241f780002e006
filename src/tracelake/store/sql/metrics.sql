-- name: queued
-- Waiting tasks per job, as they were counted when they came and went, and the age of the oldest.
SELECT j.runtime, j.dag_name, j.name, c.waiting,
       extract(epoch FROM tl_now() - (
            SELECT t.ready_at FROM task t WHERE t.job_id = j.job_id AND t.status = 'Queued' AND NOT t.stalled
            ORDER BY t.ready_at LIMIT 1))::float8 AS oldest_seconds
FROM (SELECT job_id, sum(waiting) AS waiting FROM queue_count GROUP BY 1 HAVING sum(waiting) > 0) c
JOIN job j USING (job_id)

-- name: kept
-- What is kept for a job, whatever it waits for: scopes, events and requests of sources, counted up to 10,000 of each.
SELECT j.dag_name, j.name, scopes.kept + events.kept + requests.kept AS kept
FROM job j
CROSS JOIN LATERAL (SELECT count(*) AS kept FROM (
    SELECT 1 FROM held_scope h WHERE h.job_id = j.job_id LIMIT 10000) w) scopes
CROSS JOIN LATERAL (SELECT count(*) AS kept FROM (
    SELECT 1 FROM dataset_version dv JOIN event e USING (dataset_version)
    WHERE dv.job_id = j.job_id AND e.state = 'held' LIMIT 10000) w) events
CROSS JOIN LATERAL (SELECT count(*) AS kept FROM (
    SELECT 1 FROM source_request r
    WHERE r.dag_name = j.dag_name AND r.job_name = j.name AND r.routed_at IS NULL LIMIT 10000) w) requests
WHERE j.active AND scopes.kept + events.kept + requests.kept > 0

-- name: given_up
-- Outbox entries that need a person.
SELECT count(*) AS given_up FROM outbox WHERE failed_at IS NOT NULL

-- name: dead_letters
-- Dead letters per dataset.
SELECT coalesce(d.published_name, d.dataset_uuid::text) AS dataset, count(*) AS kept
FROM dead_letter l JOIN dataset d USING (dataset_uuid) GROUP BY 1

-- name: deliveries
-- What waits, was given up and was accepted, by delivery; reads the index of open messages. Rows of one that is paused
-- don't wait for their block.
SELECT v.dag_name, v.name, v.sent, v.retracted, (v.failing_since IS NOT NULL)::int AS failing,
       greatest(0, coalesce(dc.cursor, 0) - least(v.position, f.position)) AS behind,
       CASE WHEN j.paused THEN 0 ELSE coalesce(f.held_seconds, 0) END AS held_seconds,
       (SELECT count(*) FROM delivery_message m WHERE m.delivery_id = v.delivery_id AND m.state = 'waiting') AS waiting,
       (SELECT count(*) FROM delivery_message m WHERE m.delivery_id = v.delivery_id AND m.state = 'dead') AS dead
FROM delivery v
JOIN job j USING (job_id)
LEFT JOIN dataset_version dv ON dv.dataset_uuid = v.dataset_uuid AND dv.is_current
LEFT JOIN dataset_cursor dc ON dc.dataset_version = dv.dataset_version
CROSS JOIN LATERAL (
    SELECT min(d.position) AS position,
           extract(epoch FROM tl_now() - min(d.since) FILTER (WHERE d.block IS NOT NULL))::float8 AS held_seconds
    FROM delivery_wait d WHERE d.delivery_id = v.delivery_id) f
WHERE v.active
