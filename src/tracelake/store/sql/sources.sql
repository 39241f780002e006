-- name: keep_source
-- A deployed source. Its ticks are due from now on if it is new, was away or has another schedule.
INSERT INTO source AS s (dag_name, job_name, org_id, active, schedule) VALUES ($1, $2, $3, true, $4)
ON CONFLICT (dag_name, job_name) DO UPDATE
SET active = true, schedule = excluded.schedule,
    since = CASE WHEN s.active AND s.schedule IS NOT DISTINCT FROM excluded.schedule THEN s.since ELSE tl_now() END

-- name: forget_future_deploys
-- Deploys that were made while the clock was ahead are as of now, when the DAG is deployed again.
UPDATE source SET since = tl_now() WHERE dag_name = $1 AND since > tl_now() + make_interval(secs => $2)

-- name: retire_sources
-- Sources that the DAG no longer has. What they accepted waits in case they come back.
UPDATE source SET active = false WHERE dag_name = $1 AND active AND job_name <> ALL($2::text[])

-- name: lock_source
-- Requests of one source are accepted and routed one after the other, under its row.
SELECT last_tick_by_now(s.dag_name, s.job_name, s.last_tick, $3) AS last_tick,
       s.last_number, s.since, s.allowance, s.allowed_at, tl_now() AS now
FROM source s WHERE s.dag_name = $1 AND s.job_name = $2 FOR NO KEY UPDATE

-- name: request_gate
-- What decides whether a source with code keeps a request: holds, room in its own queue, and what waits already. The
-- job's row is locked. Tasks that wait for a retry time take no room, and bulk ones none of what normal work has.
SELECT j.paused, j.bulk_held, j.max_queue_depth - q.waiting + later.waiting AS room,
       j.max_queue_depth - (q.waiting - q.bulk) + (later.waiting - later.bulk) AS normal_room,
       EXISTS (SELECT 1 FROM source_request r WHERE r.dag_name = j.dag_name AND r.job_name = j.name
                 AND r.routed_at IS NULL) AS any_waits,
       NOT j.paused AND EXISTS (SELECT 1 FROM source_request r WHERE r.dag_name = j.dag_name AND r.job_name = j.name
                                  AND r.routed_at IS NULL AND NOT r.bulk) AS normal_waits
FROM job j
LEFT JOIN LATERAL (SELECT coalesce(sum(n.waiting), 0)::bigint AS waiting, coalesce(sum(n.bulk), 0)::bigint AS bulk
                   FROM queue_count n WHERE n.job_id = j.job_id) q ON j.max_queue_depth IS NOT NULL
LEFT JOIN LATERAL (SELECT count(*) AS waiting, count(*) FILTER (WHERE t.bulk) AS bulk FROM task t
                   WHERE t.job_id = j.job_id AND t.status = 'Queued' AND NOT t.stalled
                     AND t.ready_at > tl_now()) later ON j.max_queue_depth IS NOT NULL
WHERE j.job_id = $1

-- name: advance_source
-- The last tick and the last number, which never go back.
UPDATE source SET last_tick = greatest(last_tick, $3), last_number = greatest(last_number, $4), last_at = tl_now()
WHERE dag_name = $1 AND job_name = $2

-- name: take_allowance
-- What the rate limit leaves now.
UPDATE source SET allowance = $3, allowed_at = tl_now() WHERE dag_name = $1 AND job_name = $2

-- name: add_request
-- An accepted request, routed at once or waiting.
INSERT INTO source_request (org_id, dag_name, job_name, kind, number, scope, delivery_id, content_type, body,
                            body_location, body_bytes, bulk, routed_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, CASE WHEN $13 THEN tl_now() END)
RETURNING request_id, accepted_at

-- name: delivery
-- A delivery that was accepted before, by the sender's id.
SELECT request_id, number FROM source_request WHERE dag_name = $1 AND job_name = $2 AND delivery_id = $3

-- name: begin_body
-- A body that is about to be stored.
INSERT INTO delivery_body (location) VALUES ($1)

-- name: name_body
-- A stored body that a request names from now on; none if it was dropped meanwhile.
DELETE FROM delivery_body WHERE location = $1 AND NOT dropped RETURNING location

-- name: drop_body
-- A body that no request will name, unless one does already.
UPDATE delivery_body SET dropped = true WHERE location = $1 RETURNING location

-- name: drop_late_bodies
-- Bodies that were left over long ago, or before the clock was set back, and those whose removal was broken off.
UPDATE delivery_body SET dropped = true WHERE location IN (
    SELECT location FROM delivery_body
    WHERE dropped OR begun_at < tl_now() - make_interval(secs => $1) OR begun_at > tl_now() + make_interval(secs => $1)
    LIMIT $2 FOR UPDATE SKIP LOCKED)
RETURNING location

-- name: forget_bodies
-- Their objects are gone.
DELETE FROM delivery_body WHERE location = ANY($1::text[])

-- name: waiting_sources
-- Sources that may route what waits. Read from the index of waiting requests, source by source.
WITH RECURSIVE waiting(dag_name, job_name) AS (
    (SELECT dag_name, job_name FROM source_request WHERE routed_at IS NULL ORDER BY dag_name, job_name LIMIT 1)
    UNION ALL
    SELECT n.dag_name, n.job_name FROM waiting w CROSS JOIN LATERAL (
        SELECT dag_name, job_name FROM source_request r
        WHERE r.routed_at IS NULL AND (r.dag_name, r.job_name) > (w.dag_name, w.job_name)
        ORDER BY r.dag_name, r.job_name LIMIT 1) n
)
SELECT w.dag_name, w.job_name FROM waiting w
JOIN job j ON j.dag_name = w.dag_name AND j.name = w.job_name AND j.active AND NOT j.paused
WHERE j.source_kind IN ('cron', 'webhook', 'manual')

-- name: waiting_requests
-- The oldest requests that a source has kept; without bulk ones ($4) while these can't go.
SELECT request_id, kind, number, scope, bulk FROM source_request
WHERE dag_name = $1 AND job_name = $2 AND routed_at IS NULL AND ($4 OR NOT bulk) ORDER BY request_id LIMIT $3

-- name: mark_routed
-- These have become an event or a task.
UPDATE source_request SET routed_at = tl_now() WHERE request_id = ANY($1::bigint[])

-- name: reopen_requests
-- Requests whose tasks were shelved with their job's generation, queued or at the end of an attempt, for the next one
-- to run.
UPDATE source_request r SET routed_at = NULL FROM task t
WHERE t.task_id = ANY($1::uuid[]) AND t.kind = 'request' AND t.shelved AND r.request_id = t.request_id

-- name: move_kept_events
-- Events that other generations of a source without code have kept: they are this one's to route.
UPDATE event e SET dataset_version = n.dataset_version
FROM job j JOIN dataset_version n ON n.job_id = j.job_id AND n.output_index = 0
JOIN job o ON o.dag_name = j.dag_name AND o.name = j.name AND o.job_id <> j.job_id
JOIN dataset_version v ON v.job_id = o.job_id
WHERE j.job_id = $1 AND e.dataset_version = v.dataset_version AND e.state = 'held'

-- name: reopen_kept_events
-- Events that generations without code have kept become requests again, for a generation that runs code. A delivery's
-- request is there; a trigger had no number yet.
WITH kept AS (
    UPDATE event e SET state = 'old_version'
    FROM job j JOIN job o ON o.dag_name = j.dag_name AND o.name = j.name
    JOIN dataset_version v ON v.job_id = o.job_id
    WHERE j.job_id = $1 AND e.dataset_version = v.dataset_version AND e.state = 'held'
    RETURNING e.event_id, e.org_id, j.dag_name, j.name AS job_name, o.source_kind AS kind, e.kind AS shape,
              e.range_start, e.range_end, e.bulk
), numbered AS (
    SELECT k.*, CASE WHEN k.kind = 'manual' THEN s.last_number + row_number() OVER (PARTITION BY k.kind ORDER BY k.event_id)
                     ELSE k.range_end END AS number
    FROM kept k JOIN source s USING (dag_name, job_name)
), advanced AS (
    UPDATE source s SET last_number = n.last FROM (
        SELECT dag_name, job_name, max(number) AS last FROM numbered WHERE kind = 'manual' GROUP BY 1, 2) n
    WHERE s.dag_name = n.dag_name AND s.job_name = n.job_name
)
INSERT INTO source_request (org_id, dag_name, job_name, kind, number, bulk, scope)
SELECT org_id, dag_name, job_name, kind, number, bulk,
       CASE WHEN kind <> 'manual' THEN NULL WHEN shape = 'cursor' THEN jsonb_build_object('cursor', range_end)
            ELSE jsonb_build_object('start', range_start, 'end', range_end) END
FROM numbered ORDER BY event_id
ON CONFLICT (dag_name, job_name, kind, number) DO UPDATE SET routed_at = NULL

-- name: create_request_tasks
-- One task per request, whose job is locked and neither paused nor held. One that was shelved goes on when its
-- generation is deployed again. Of a capped job no more tasks are woken than may run.
WITH made AS (
    INSERT INTO task (task_id, org_id, job_id, kind, status, request_id, cause, parked, bulk)
    SELECT c.task_id, j.org_id, j.job_id, 'request', 'Queued', c.request_id, c.cause, j.max_concurrency IS NOT NULL,
           r.bulk
    FROM unnest($2::uuid[], $3::bigint[], $4::jsonb[]) AS c(task_id, request_id, cause)
    JOIN source_request r USING (request_id)
    JOIN job j ON j.job_id = $1 AND j.active AND NOT j.paused AND NOT (r.bulk AND j.bulk_held)
    ORDER BY c.request_id
    ON CONFLICT (job_id, request_id) WHERE kind = 'request' DO UPDATE
    SET status = 'Queued', shelved = false, ready_at = tl_now(), woken_at = tl_now(), ended_at = NULL,
        error_message = NULL,
        last_outcome = CASE WHEN task.attempt > 0 THEN 'Canceled' ELSE task.last_outcome END
    WHERE task.shelved
    RETURNING task_id, job_id, seq, bulk
)
SELECT made.task_id, j.runtime, made.bulk OR j.priority = 'bulk' AS bulk,
       row_number() OVER (ORDER BY made.seq) <= coalesce(j.max_concurrency, 2147483647) AS wake
FROM made JOIN job j USING (job_id) ORDER BY made.seq

-- name: requests_of_tasks
-- What the tasks of sources are about.
SELECT t.task_id, r.kind, r.number, r.scope, r.delivery_id, r.content_type, r.body, r.body_location, r.body_bytes,
       r.accepted_at
FROM task t JOIN source_request r USING (request_id) WHERE t.task_id = ANY($1::uuid[])

-- name: schedules
-- Every active cron source with its last tick.
SELECT j.dag_name, j.name AS job, j.source, s.since,
       last_tick_by_now(s.dag_name, s.job_name, s.last_tick, $1) AS last_tick
FROM job j JOIN source s ON s.dag_name = j.dag_name AND s.job_name = j.name
WHERE j.active AND j.source_kind = 'cron' ORDER BY j.dag_name, j.name

-- name: take_scheduler_lease
-- One scheduler acts: the holder of the lease, or the first to ask once it has run out. A lease that ends later than any that
-- was ever given is from before the clock was set back.
INSERT INTO scheduler_lease AS l (holder, expires_at) VALUES ($1, tl_now() + make_interval(secs => $2))
ON CONFLICT (only_one) DO UPDATE SET holder = excluded.holder, expires_at = excluded.expires_at
WHERE l.holder = excluded.holder OR l.expires_at <= tl_now() OR l.expires_at > excluded.expires_at
RETURNING holder

-- name: release_scheduler_lease
-- A scheduler that stops lets the next one act at once.
DELETE FROM scheduler_lease WHERE holder = $1

-- name: list_sources
-- A page of active sources, always-on ones included.
SELECT j.dag_name, j.name AS job, j.source_kind AS kind, j.source, j.runs_code, j.operator, j.runtime, j.paused,
       s.since, last_tick_by_now(s.dag_name, s.job_name, s.last_tick, $5) AS last_tick,
       nullif(s.last_number, 0) AS last_number, s.last_at,
       (SELECT coalesce(array_agg(p.cause ORDER BY p.since, p.cause), '{}') FROM job_pause p
        WHERE j.paused AND p.job_id = j.job_id) AS pause_causes,
       (SELECT coalesce(array_agg(p.cause ORDER BY p.since, p.cause), '{}') FROM job_pause p
        WHERE j.bulk_held AND p.bulk_only AND p.job_id = j.job_id) AS bulk_causes,
       (SELECT count(*) FROM (SELECT 1 FROM source_request r
                              WHERE r.dag_name = j.dag_name AND r.job_name = j.name AND r.routed_at IS NULL
                              LIMIT 10000) w)
           + (SELECT count(*) FROM (SELECT 1 FROM dataset_version dv JOIN event e USING (dataset_version)
                                    WHERE dv.job_id = j.job_id AND e.state = 'held' LIMIT 10000) w) AS waiting
FROM job j LEFT JOIN source s ON s.dag_name = j.dag_name AND s.job_name = j.name
WHERE j.active AND j.activation = 'source' AND j.org_id = $1 AND j.operator <> 'buffer_sink'
  AND (j.dag_name, j.name) > ($2, $3)
ORDER BY j.dag_name, j.name LIMIT $4

-- name: webhook
-- A webhook source with the secrets that are accepted now, latest first.
SELECT j.job_id, j.source,
       ARRAY(SELECT w.secret FROM installation.webhook_secret w
             WHERE w.dag_name = j.dag_name AND w.job_name = j.name
               AND (w.expires_at IS NULL OR w.rotated_at <= tl_now() AND w.expires_at > tl_now())
             ORDER BY w.secret_id DESC) AS secrets, tl_now() AS now
FROM job j WHERE j.dag_name = $1 AND j.name = $2 AND j.active AND j.source_kind = 'webhook'

-- name: has_secret
-- Whether a webhook's secret was made.
SELECT 1 FROM installation.webhook_secret WHERE dag_name = $1 AND job_name = $2 AND expires_at IS NULL

-- name: add_secret
-- Made at deploy and by a rotation.
INSERT INTO installation.webhook_secret (dag_name, job_name, secret, shown_at)
VALUES ($1, $2, $3, CASE WHEN $4 THEN statement_timestamp() END)

-- name: show_secret
-- The secret, if nobody has seen it.
UPDATE installation.webhook_secret SET shown_at = statement_timestamp()
WHERE dag_name = $1 AND job_name = $2 AND expires_at IS NULL AND shown_at IS NULL RETURNING secret

-- name: expire_secrets
-- All secrets before a rotation are accepted for a while, none for longer than it was before. What has expired is forgotten.
WITH forgotten AS (
    DELETE FROM installation.webhook_secret
    WHERE dag_name = $1 AND job_name = $2 AND least(expires_at, tl_now() + make_interval(secs => $3)) <= tl_now()
)
UPDATE installation.webhook_secret
SET rotated_at = coalesce(rotated_at, tl_now()), expires_at = least(expires_at, tl_now() + make_interval(secs => $3))
WHERE dag_name = $1 AND job_name = $2 AND least(expires_at, tl_now() + make_interval(secs => $3)) > tl_now()
RETURNING expires_at

-- name: forget_secrets
-- Secrets of sources that are no webhooks of the DAG any more: one that comes back gets a new one.
DELETE FROM installation.webhook_secret WHERE dag_name = $1 AND job_name <> ALL($2::text[])
