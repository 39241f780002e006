-- name: register_worker
-- A worker is present; returns whether it is new.
INSERT INTO worker (worker_id, runtime, slots) VALUES ($1, $2, $3)
ON CONFLICT (worker_id) DO UPDATE SET runtime = excluded.runtime, slots = excluded.slots, seen_at = tl_now()
RETURNING started_at = seen_at AS came

-- name: unregister_worker
-- A worker is leaving.
DELETE FROM worker WHERE worker_id = $1

-- name: forget_silent_workers
-- Workers that were killed; their ids never come back.
DELETE FROM worker WHERE seen_at < tl_now() - interval '1 hour'

-- name: runtimes_served
-- Workers and their slots for each runtime that an active job, a worker or an invoker names ($1, $2: for how long a
-- worker and an invoker count as present), and the tasks that run there.
WITH present AS (
    SELECT runtime, 1 AS workers, slots FROM worker WHERE seen_at > tl_now() - make_interval(secs => $1)
    UNION ALL
    SELECT 'lambda', 1, concurrency FROM invoker
    WHERE concurrency > 0 AND seen_at > tl_now() - make_interval(secs => $2)
    UNION ALL
    SELECT DISTINCT runtime, 0, 0 FROM job WHERE active AND runtime <> 'dispatcher'
), held AS (
    SELECT j.runtime, count(*) FILTER (WHERE t.kind <> 'source') AS held, count(DISTINCT t.worker_id) AS holders
    FROM task t JOIN job j USING (job_id) WHERE t.status = 'Running' GROUP BY 1
)
SELECT p.runtime, greatest(sum(p.workers), max(coalesce(h.holders, 0)))::int AS workers, sum(p.slots)::int AS slots,
       max(coalesce(h.held, 0))::int AS held
FROM present p LEFT JOIN held h USING (runtime) GROUP BY p.runtime

-- name: waiting_facts
-- Queued tasks ($1) with everything that decides whether a claim would take them, in its order, and whether a
-- wake-up that failed is tried again.
SELECT t.task_id, j.runtime, t.ready_at, t.woken_at, j.active AS job_active,
       j.paused OR (t.bulk AND j.bulk_held) AS job_paused,
       j.max_concurrency AS cap, t.error_message AS last_error, tl_now() AS now,
       (SELECT coalesce(jsonb_agg(jsonb_build_object('cause', p.cause, 'actor', p.actor, 'since', p.since)
                                  ORDER BY p.since, p.cause), '[]')
        FROM job_pause p WHERE p.job_id = t.job_id AND (t.bulk OR NOT p.bulk_only)) AS pauses,
       t.kind = 'partition' AND EXISTS (
            SELECT 1 FROM task later
            WHERE later.kind = 'partition' AND later.job_id = t.job_id AND later.range_start = t.range_start
              AND later.range_end = t.range_end AND later.seq > t.seq) AS superseded,
       ARRAY(SELECT coalesce(d.published_name, d.dataset_uuid::text)
             FROM job_input ji JOIN dataset d ON d.dataset_uuid = ji.dataset_uuid
             LEFT JOIN dataset_cursor dc ON dc.dataset_version = ji.dataset_version
             WHERE t.kind = 'partition' AND ji.job_id = t.job_id AND ji.trigger
               AND NOT (coalesce(dc.cursor >= t.range_end, false)
                        OR EXISTS (SELECT 1 FROM partition p
                                   WHERE p.dataset_version = ji.dataset_version AND p.current
                                     AND p.range_start = t.range_start AND p.range_end = t.range_end))
             ORDER BY ji.input_index) AS not_committed,
       t.kind = 'cursor' AND (
            EXISTS (SELECT 1 FROM task e
                    WHERE e.job_id = t.job_id AND e.kind = 'cursor' AND e.status = 'Queued' AND e.seq < t.seq)
            OR EXISTS (SELECT 1 FROM task e
                       WHERE e.job_id = t.job_id AND e.kind = 'cursor' AND e.status = 'Running' AND e.seq < t.seq)
       ) AS earlier_task,
       (SELECT count(*) FROM task r WHERE r.job_id = t.job_id AND r.status = 'Running')::int AS running,
       oc.max_in_flight AS operator_cap,
       CASE WHEN oc.operator IS NULL THEN 0 ELSE (
            SELECT count(*) FROM task r JOIN job k USING (job_id)
            WHERE r.status = 'Running' AND k.operator = oc.operator)::int END AS in_flight,
       (SELECT o.last_error FROM outbox o WHERE o.task_id = t.task_id AND o.failed_at IS NULL AND o.tries > 0
        ORDER BY o.outbox_id DESC LIMIT 1) AS undelivered
FROM task t JOIN job j USING (job_id) LEFT JOIN operator_cap oc ON oc.operator = j.operator
WHERE t.task_id = ANY($1::uuid[]) AND t.status = 'Queued'
