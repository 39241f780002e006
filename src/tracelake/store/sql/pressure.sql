-- name: loads
-- Every active job with what waits in it. How old the oldest is matters for jobs with a maximum age, and how many wait
-- for a retry time only where the queue would be full with them, or is being watched until it is empty enough. Of what
-- is kept, whether there is any: a held backfill may keep a million scopes, so these are skipped over in their index.
WITH RECURSIVE counted AS MATERIALIZED (
    SELECT job_id, sum(waiting)::bigint AS waiting, sum(bulk)::bigint AS bulk FROM queue_count GROUP BY job_id
), running AS MATERIALIZED (
    SELECT job_id FROM task WHERE status = 'Running' AND bulk GROUP BY job_id
), kept_scopes AS (
    (SELECT job_id, bulk FROM held_scope ORDER BY job_id, bulk LIMIT 1)
    UNION ALL
    SELECT next.job_id, next.bulk FROM kept_scopes k CROSS JOIN LATERAL (
        SELECT h.job_id, h.bulk FROM held_scope h WHERE (h.job_id, h.bulk) > (k.job_id, k.bulk)
        ORDER BY h.job_id, h.bulk LIMIT 1) next
), kept_events AS (
    (SELECT dataset_version, bulk FROM event WHERE state = 'held' ORDER BY dataset_version, bulk LIMIT 1)
    UNION ALL
    SELECT next.dataset_version, next.bulk FROM kept_events k CROSS JOIN LATERAL (
        SELECT e.dataset_version, e.bulk FROM event e
        WHERE e.state = 'held' AND (e.dataset_version, e.bulk) > (k.dataset_version, k.bulk)
        ORDER BY e.dataset_version, e.bulk LIMIT 1) next
), kept AS MATERIALIZED (
    SELECT job_id, bool_or(bulk) AS bulk, bool_or(NOT bulk) AS normal FROM (
        SELECT job_id, bulk FROM kept_scopes
        UNION ALL
        SELECT dv.job_id, e.bulk FROM kept_events e JOIN dataset_version dv USING (dataset_version)) k
    GROUP BY job_id
), persons AS MATERIALIZED (
    SELECT DISTINCT job_id FROM job_pause WHERE caused_by IS NULL
)
SELECT j.job_id, j.dag_name, j.name, j.priority = 'bulk' AS bulk, j.max_queue_depth, j.max_queue_age_seconds,
       NOT j.paused AND (j.backlog OR coalesce(k.normal OR (k.bulk AND NOT j.bulk_held), false)) AS backlog,
       j.paused AND p.job_id IS NOT NULL AS paused_by_person,
       coalesce(c.bulk > 0, false) OR r.job_id IS NOT NULL OR coalesce(k.bulk, false) AS bulk_work,
       greatest(0, coalesce(c.waiting, 0) - coalesce(later.tasks, 0)) AS waiting,
       CASE WHEN first.ready_at <= tl_now() THEN first.ready_at END AS oldest
FROM job j LEFT JOIN counted c USING (job_id) LEFT JOIN running r USING (job_id) LEFT JOIN kept k USING (job_id)
LEFT JOIN persons p USING (job_id) LEFT JOIN pressure w USING (job_id)
LEFT JOIN LATERAL (
    SELECT t.ready_at FROM task t WHERE t.job_id = j.job_id AND t.status = 'Queued' AND NOT t.stalled
    ORDER BY t.ready_at LIMIT 1) first
    ON c.waiting > 0 AND j.max_queue_age_seconds IS NOT NULL
LEFT JOIN LATERAL (
    SELECT count(*) AS tasks FROM task t
    WHERE t.job_id = j.job_id AND t.status = 'Queued' AND NOT t.stalled AND t.ready_at > tl_now()) later
    ON c.waiting > 0 AND (c.waiting >= j.max_queue_depth OR w.job_id IS NOT NULL)
WHERE j.active

-- name: trips
-- Jobs that hold others, and the time.
SELECT p.job_id, p.tier, p.since, p.changed_at, p.over_since FROM pressure p

-- name: edges
-- Who makes the tasks of whom: producers of triggering inputs, and for a sink the jobs that publish to its dataset.
SELECT ji.job_id AS consumer, dv.job_id AS producer
FROM job_input ji JOIN job c ON c.job_id = ji.job_id AND c.active
JOIN dataset_version dv USING (dataset_version) JOIN job p ON p.job_id = dv.job_id AND p.active
WHERE ji.trigger
UNION
SELECT dv.job_id, w.job_id
FROM buffer_writer b JOIN dataset_version dv ON dv.dataset_uuid = b.dataset_uuid AND dv.is_current
JOIN job s ON s.job_id = dv.job_id AND s.active
JOIN job w ON w.dag_name = b.dag_name AND w.name = b.job_name AND w.active
WHERE w.job_id <> s.job_id
ORDER BY 1, 2

-- name: holds
-- Holds as they are.
SELECT job_id, caused_by, bulk_only FROM job_pause WHERE caused_by IS NOT NULL

-- name: fold_counts
-- One row per job again. Rows that another replica is folding are left to it.
WITH folded AS (
    DELETE FROM queue_count WHERE ctid = ANY(ARRAY(SELECT ctid FROM queue_count FOR UPDATE SKIP LOCKED))
    RETURNING job_id, waiting, bulk
)
INSERT INTO queue_count (job_id, waiting, bulk)
SELECT job_id, sum(waiting), sum(bulk) FROM folded GROUP BY job_id HAVING sum(waiting) <> 0 OR sum(bulk) <> 0

-- name: count_rows
-- How many rows there are to add up.
SELECT count(*) AS rows FROM queue_count

-- name: note_times
-- Since when the pressure of tripped jobs has been at 1 or above. What a clock that was set back left ahead is now.
UPDATE pressure p
SET over_since = o.over_since, since = least(p.since, tl_now()), changed_at = least(p.changed_at, tl_now())
FROM unnest($1::uuid[], $2::timestamptz[]) AS o(job_id, over_since) WHERE p.job_id = o.job_id

-- name: end_trips
-- Jobs that hold nobody any more.
DELETE FROM pressure WHERE job_id <> ALL($1::uuid[])

-- name: set_trips
-- Jobs that hold others, as decided.
INSERT INTO pressure (job_id, tier, since, changed_at, over_since)
SELECT * FROM unnest($1::uuid[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::timestamptz[])
ON CONFLICT (job_id) DO UPDATE
SET tier = excluded.tier, since = excluded.since, changed_at = excluded.changed_at, over_since = excluded.over_since

-- name: lift_holds
-- Holds that were decided before and no longer are.
DELETE FROM job_pause p WHERE p.caused_by IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM unnest($1::uuid[], $2::uuid[]) AS h(job_id, caused_by)
                  WHERE h.job_id = p.job_id AND h.caused_by = p.caused_by)
RETURNING job_id

-- name: add_holds
-- Holds as decided; one that stays keeps its time.
INSERT INTO job_pause AS p (job_id, cause, caused_by, bulk_only, chain)
SELECT h.job_id, 'backpressure of ' || c.dag_name || '/' || c.name, h.caused_by, h.bulk_only,
       string_to_array(h.chain, ' ')
FROM unnest($1::uuid[], $2::uuid[], $3::boolean[], $4::text[]) AS h(job_id, caused_by, bulk_only, chain)
JOIN job c ON c.job_id = h.caused_by
ON CONFLICT (job_id, cause) DO UPDATE
SET bulk_only = excluded.bulk_only, chain = excluded.chain, caused_by = excluded.caused_by,
    since = CASE WHEN p.bulk_only = excluded.bulk_only THEN p.since ELSE excluded.since END
WHERE (p.bulk_only, p.chain, p.caused_by) IS DISTINCT FROM (excluded.bulk_only, excluded.chain, excluded.caused_by)

-- name: flag_jobs
-- What the claim and routing read. A job that is held or released has a backlog until a look finds none.
UPDATE job j
SET paused = f.paused, bulk_held = f.bulk_held, backlog = true
FROM (SELECT h.job_id, coalesce(bool_or(NOT p.bulk_only), false) AS paused,
             coalesce(bool_or(p.bulk_only), false) AS bulk_held
      FROM unnest($1::uuid[]) AS h(job_id) LEFT JOIN job_pause p USING (job_id) GROUP BY 1) f
WHERE j.job_id = f.job_id AND (j.paused, j.bulk_held) IS DISTINCT FROM (f.paused, f.bulk_held)
RETURNING j.dag_name, j.name, j.paused, j.bulk_held

-- name: released_job
-- A job with a backlog, locked, and the room that is left in its queue and in those of its consumers. Tasks that wait
-- for a retry time take none, as they make no pressure: nobody would be held by them, and what is kept would wait
-- for them without a reason. A paused consumer gets no tasks. Whether anything is kept that may go on: what is bulk
-- waits as long as bulk work is held.
WITH below AS MATERIALIZED (
    SELECT DISTINCT c.job_id
    FROM dataset_version dv JOIN job_input ji ON ji.dataset_version = dv.dataset_version AND ji.trigger
    JOIN job c ON c.job_id = ji.job_id AND c.active AND NOT c.paused
    WHERE dv.job_id = $1
), rooms AS MATERIALIZED (
    SELECT c.job_id, c.max_queue_depth
               - (SELECT coalesce(sum(q.waiting), 0) FROM queue_count q WHERE q.job_id = c.job_id)
               + (SELECT count(*) FROM task t WHERE t.job_id = c.job_id AND t.status = 'Queued' AND NOT t.stalled
                    AND t.ready_at > tl_now()) AS room
    FROM job c WHERE c.max_queue_depth IS NOT NULL AND (c.job_id = $1 OR c.job_id IN (SELECT job_id FROM below))
)
SELECT j.paused, j.bulk_held, j.execution_strategy, j.source_kind,
       (SELECT r.room FROM rooms r WHERE r.job_id = j.job_id) AS room,
       (SELECT min(r.room) FROM rooms r JOIN below USING (job_id)) AS room_below,
       EXISTS (SELECT 1 FROM held_scope h WHERE h.job_id = j.job_id AND NOT (h.bulk AND j.bulk_held))
       OR EXISTS (SELECT 1 FROM dataset_version dv JOIN event e USING (dataset_version)
                  WHERE dv.job_id = j.job_id AND e.state = 'held' AND NOT (e.bulk AND j.bulk_held)) AS kept
FROM job j WHERE j.job_id = $1 AND j.active

-- name: wake_released
-- Tasks whose wake-up was used up while their job was held, normal ones first. Of a capped job no more than may run:
-- the others are woken by slots that come free.
WITH next AS (
    SELECT t.task_id, j.runtime, t.bulk OR j.priority = 'bulk' AS bulk
    FROM job j CROSS JOIN LATERAL (
        SELECT task_id, bulk FROM task t
        WHERE t.job_id = j.job_id AND t.status = 'Queued' AND t.parked AND t.ready_at <= tl_now()
          AND NOT (t.bulk AND j.bulk_held)
        ORDER BY t.bulk, t.seq
        LIMIT greatest(0, least($2, j.max_concurrency - (
            SELECT count(*) FROM task r WHERE r.job_id = j.job_id AND r.status = 'Running')))) t
    WHERE j.job_id = $1
), free AS (
    SELECT t.task_id FROM task t WHERE t.task_id IN (SELECT task_id FROM next) FOR NO KEY UPDATE OF t SKIP LOCKED
), woken AS (
    UPDATE task t SET parked = false, woken_at = tl_now() FROM free WHERE t.task_id = free.task_id
)
SELECT task_id, runtime, bulk FROM next

-- name: take_scopes
-- Kept scopes of a released job, in their order; bulk ones stay while bulk work is held.
WITH next AS (
    SELECT h.seq FROM held_scope h WHERE h.job_id = $1 AND NOT (h.bulk AND $2) ORDER BY h.bulk, h.seq LIMIT $3
)
DELETE FROM held_scope h USING next WHERE h.job_id = $1 AND h.seq = next.seq
RETURNING h.seq, h.range_start, h.range_end, h.cause

-- name: take_events
-- Events of a released source, in their order.
SELECT e.event_id, e.org_id, e.dataset_version, dv.storage, e.kind, e.range_start, e.range_end, e.bulk
FROM dataset_version dv CROSS JOIN LATERAL (
    (SELECT n.* FROM event n WHERE n.dataset_version = dv.dataset_version AND n.state = 'held' AND NOT n.bulk
     ORDER BY n.event_id LIMIT $3)
    UNION ALL
    (SELECT b.* FROM event b WHERE b.dataset_version = dv.dataset_version AND b.state = 'held' AND b.bulk AND NOT $2
     ORDER BY b.event_id LIMIT $3)) e
WHERE dv.job_id = $1 ORDER BY e.event_id LIMIT $3

-- name: settle_events
-- Kept events that were counted now.
UPDATE event e SET state = s.state, revision = s.revision
FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS s(event_id, state, revision) WHERE e.event_id = s.event_id

-- name: end_backlog
-- Nothing is kept any more: events are routed as they come.
UPDATE job SET backlog = false WHERE job_id = $1

-- name: report
-- Jobs with thresholds, and what waits in them.
WITH counted AS MATERIALIZED (
    SELECT job_id, sum(waiting)::bigint AS waiting FROM queue_count GROUP BY job_id
)
SELECT j.job_id, j.dag_name, j.name AS job, j.max_queue_depth, j.max_queue_age_seconds, j.priority,
       j.paused AND EXISTS (SELECT 1 FROM job_pause p WHERE p.job_id = j.job_id AND p.caused_by IS NULL)
           AS paused_by_person,
       greatest(0, coalesce(c.waiting, 0) - (
            SELECT count(*) FROM task t WHERE t.job_id = j.job_id AND t.status = 'Queued' AND NOT t.stalled
              AND t.ready_at > tl_now())) AS waiting,
       (SELECT extract(epoch FROM tl_now() - t.ready_at)::float8 FROM task t
        WHERE t.job_id = j.job_id AND t.status = 'Queued' AND NOT t.stalled AND t.ready_at <= tl_now()
        ORDER BY t.ready_at LIMIT 1) AS oldest_seconds,
       p.tier, p.since, extract(epoch FROM tl_now() - p.changed_at)::float8 AS unchanged_seconds
FROM job j LEFT JOIN counted c USING (job_id) LEFT JOIN pressure p USING (job_id)
WHERE j.active AND (j.max_queue_depth IS NOT NULL OR j.max_queue_age_seconds IS NOT NULL OR p.job_id IS NOT NULL)
ORDER BY j.dag_name, j.name

-- name: held_jobs
-- Every hold: of whom, because of whom, since when and by which way.
SELECT j.dag_name, j.name AS job, c.dag_name AS cause_dag, c.name AS cause_job, p.caused_by, p.bulk_only, p.since,
       p.chain, tl_now() - p.since >= interval '24 hours' AS long_held
FROM job_pause p JOIN job j ON j.job_id = p.job_id JOIN job c ON c.job_id = p.caused_by
WHERE p.caused_by IS NOT NULL AND j.active
ORDER BY j.dag_name, j.name, p.since, p.cause

-- name: backlogs
-- Jobs that run and for which something is kept (counted up to 10,000): scopes wait for room in the job's own queue,
-- and so do requests of a source with code, events of a source in those of its consumers. The fullest of these, what waits in it, and how many of its tasks
-- wait for a retry time.
WITH kept AS MATERIALIZED (
    SELECT j.job_id, j.dag_name, j.name AS job, scopes.kept AS scopes, events.kept AS events,
           requests.kept AS requests
    FROM job j
    CROSS JOIN LATERAL (SELECT count(*) AS kept FROM (
        SELECT 1 FROM held_scope h WHERE h.job_id = j.job_id AND NOT (h.bulk AND j.bulk_held) LIMIT 10000) w) scopes
    CROSS JOIN LATERAL (SELECT count(*) AS kept FROM (
        SELECT 1 FROM dataset_version dv JOIN event e USING (dataset_version)
        WHERE dv.job_id = j.job_id AND e.state = 'held' AND NOT (e.bulk AND j.bulk_held) LIMIT 10000) w) events
    CROSS JOIN LATERAL (SELECT count(*) AS kept FROM (
        SELECT 1 FROM source_request r
        WHERE r.dag_name = j.dag_name AND r.job_name = j.name AND r.routed_at IS NULL
          AND NOT (r.bulk AND j.bulk_held) LIMIT 10000) w) requests
    WHERE j.active AND NOT j.paused AND scopes.kept + events.kept + requests.kept > 0
)
SELECT k.dag_name, k.job, k.scopes, k.events, k.requests, f.dag_name AS full_dag, f.name AS full_job, f.waiting, f.max_queue_depth,
       f.later
FROM kept k
LEFT JOIN LATERAL (
    SELECT c.dag_name, c.name, greatest(0, w.tasks - l.tasks) AS waiting, c.max_queue_depth, l.tasks AS later
    FROM job c
    CROSS JOIN LATERAL (SELECT coalesce(sum(q.waiting), 0)::bigint AS tasks FROM queue_count q
                        WHERE q.job_id = c.job_id) w
    CROSS JOIN LATERAL (SELECT count(*) AS tasks FROM task t
                        WHERE t.job_id = c.job_id AND t.status = 'Queued' AND NOT t.stalled
                          AND t.ready_at > tl_now()) l
    WHERE c.max_queue_depth IS NOT NULL
      AND (k.scopes + k.requests > 0 AND c.job_id = k.job_id
           OR k.events > 0 AND c.active AND NOT c.paused AND c.job_id IN (
                SELECT ji.job_id FROM dataset_version dv JOIN job_input ji USING (dataset_version)
                WHERE dv.job_id = k.job_id AND ji.trigger))
    ORDER BY c.max_queue_depth - w.tasks + l.tasks LIMIT 1) f ON true
ORDER BY k.dag_name, k.job

-- name: operators
-- Running tasks of each operator, over all DAGs.
SELECT coalesce(r.operator, o.operator) AS operator, coalesce(r.running, 0) AS running, o.max_in_flight
FROM (SELECT j.operator, count(*) AS running FROM task t JOIN job j USING (job_id) WHERE t.status = 'Running'
      GROUP BY 1) r
FULL JOIN operator_cap o ON o.operator = r.operator ORDER BY 1

-- name: end_caps
-- Operators whose cap was taken from the settings.
DELETE FROM operator_cap WHERE operator <> ALL($1::text[])

-- name: set_caps
-- Caps of the settings; one that stays isn't written, which would wait for claims.
INSERT INTO operator_cap AS o (operator, max_in_flight) SELECT * FROM unnest($1::text[], $2::int[])
ON CONFLICT (operator) DO UPDATE SET max_in_flight = excluded.max_in_flight
WHERE o.max_in_flight <> excluded.max_in_flight
