-- name: lock_tasks
-- The first lock of every step: a step that decides about a task holds its row.
SELECT t.task_id, t.seq, t.job_id, t.kind, t.status, t.attempt, t.failures, t.last_outcome, t.worker_id,
       t.claim_key, t.lease_token, t.lease_expires_at, t.epoch, t.ready_at, t.range_start, t.range_end, t.inputs,
       t.output_revisions,
       t.bulk, j.active, j.paused, j.paused OR (t.bulk AND j.bulk_held) AS held, j.priority, j.operator, o.max_in_flight, j.runtime, j.timeout_seconds, j.heartbeat_timeout_seconds, j.max_attempts,
       j.idle_timeout_seconds, j.max_concurrency, j.retry_base_seconds, j.retry_max_seconds, tl_now() AS now
FROM task t JOIN job j USING (job_id) LEFT JOIN operator_cap o USING (operator)
WHERE t.task_id = ANY($1::uuid[])
ORDER BY t.task_id
FOR NO KEY UPDATE OF t

-- name: read_task
-- A task without a lock, for readers that decide nothing.
SELECT t.task_id, t.seq, t.job_id, t.kind, t.status, t.attempt, t.failures, t.last_outcome, t.worker_id,
       t.claim_key, t.lease_token, t.lease_expires_at, t.epoch, t.ready_at, t.range_start, t.range_end, t.inputs,
       t.output_revisions,
       t.bulk, j.active, j.paused, j.paused OR (t.bulk AND j.bulk_held) AS held, j.priority, j.operator, o.max_in_flight, j.runtime, j.timeout_seconds, j.heartbeat_timeout_seconds, j.max_attempts,
       j.idle_timeout_seconds, j.max_concurrency, j.retry_base_seconds, j.retry_max_seconds, tl_now() AS now
FROM task t JOIN job j USING (job_id) LEFT JOIN operator_cap o USING (operator)
WHERE t.task_id = $1

-- name: share_task
-- A task that can't change until the caller commits; several callers of one attempt don't wait for each other.
SELECT t.task_id, t.seq, t.job_id, t.kind, t.status, t.attempt, t.failures, t.last_outcome, t.worker_id,
       t.claim_key, t.lease_token, t.lease_expires_at, t.epoch, t.ready_at, t.range_start, t.range_end, t.inputs,
       t.output_revisions,
       t.bulk, j.active, j.paused, j.paused OR (t.bulk AND j.bulk_held) AS held, j.priority, j.operator, o.max_in_flight, j.runtime, j.timeout_seconds, j.heartbeat_timeout_seconds, j.max_attempts,
       j.idle_timeout_seconds, j.max_concurrency, j.retry_base_seconds, j.retry_max_seconds, tl_now() AS now
FROM task t JOIN job j USING (job_id) LEFT JOIN operator_cap o USING (operator)
WHERE t.task_id = $1
FOR SHARE OF t

-- name: lock_gates
-- Serializes claims, endings and routing of jobs that admit one thing at a time, on the job's row; then those of jobs
-- whose operator has a cap, on the operator's. All jobs come first, since the aggregate needs them all.
WITH gates AS MATERIALIZED (
    SELECT job_id, operator FROM job WHERE job_id = ANY($1::uuid[]) ORDER BY job_id FOR NO KEY UPDATE
), named AS MATERIALIZED (
    SELECT array_agg(DISTINCT operator) AS operators FROM gates
)
SELECT o.operator FROM named LEFT JOIN LATERAL (
    SELECT c.operator FROM operator_cap c WHERE c.operator = ANY(named.operators)
    ORDER BY c.operator FOR NO KEY UPDATE) o ON true

-- name: read_gates
-- The job's limits and current use; read after its row is locked, in a snapshot of its own. Of its cursor tasks the
-- one that has begun comes first, also before an older one that was canceled unclaimed and is tried again.
SELECT j.job_id, j.max_concurrency,
       (SELECT count(*) FROM task t WHERE t.job_id = j.job_id AND t.status = 'Running') AS running,
       coalesce((SELECT t.seq FROM task t
                 WHERE t.job_id = j.job_id AND t.kind = 'cursor' AND t.status IN ('Queued', 'Running')
                   AND t.attempt > 0),
                (SELECT t.seq FROM task t
                 WHERE t.job_id = j.job_id AND t.kind = 'cursor' AND t.status = 'Queued' AND t.attempt = 0))
           AS first_cursor_seq,
       o.max_in_flight,
       CASE WHEN o.operator IS NOT NULL THEN (
            SELECT count(*) FROM task t JOIN job k USING (job_id)
            WHERE t.status = 'Running' AND k.operator = o.operator) END AS in_flight
FROM job j LEFT JOIN operator_cap o USING (operator) WHERE j.job_id = ANY($1::uuid[])

-- name: claim_inputs
-- Every input of the claimed tasks as it is now; frozen into the attempt. `as_of` separates later partitions of an
-- update's input from those that were there: a commit of one waits for the claim on the job's row and draws its
-- number after it. A compacted input that is read as it is comes with its rows that are still in Postgres.
SELECT c.task_id, ji.input_index, ji.dataset_uuid, ji.dataset_version, ji.trigger, ji.where_text, ji.where_tree,
       dv.revision, dv.storage, d.published_name, d.write_mode, cc.cursor AS consumed, dc.finalized,
       hot.dataset_version AS hot_version, hot.revision AS hot_revision,
       CASE WHEN c.kind = 'cursor'
            THEN coalesce(dc.cursor, frontier(ji.dataset_version, coalesce(cc.cursor, -1))) END AS position,
       CASE WHEN c.kind = 'cursor' AND ji.trigger AND dc.cursor IS NULL
            THEN (SELECT coalesce(max(last.partition_id), 0) FROM partition last) END AS as_of,
       coalesce(cc.inv_start, inv.range_start) AS inv_start, coalesce(cc.inv_end, inv.range_end) AS inv_end,
       coalesce(cc.inv_revision, inv.revision) AS inv_revision, inv.reason AS inv_reason,
       NOT ji.trigger OR c.kind <> 'partition' OR coalesce(dc.cursor >= c.range_end, false)
           OR EXISTS (SELECT 1 FROM partition p
                      WHERE p.dataset_version = ji.dataset_version AND p.current
                        AND p.range_start = c.range_start AND p.range_end = c.range_end) AS committed,
       c.kind = 'partition' AND EXISTS (
           SELECT 1 FROM task later
           WHERE later.kind = 'partition' AND later.job_id = c.job_id AND later.range_start = c.range_start
             AND later.range_end = c.range_end AND later.seq > c.seq) AS superseded
FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[])
     AS c(task_id, job_id, kind, range_start, range_end, seq)
JOIN job_input ji ON ji.job_id = c.job_id
JOIN dataset_version dv ON dv.dataset_version = ji.dataset_version
JOIN dataset d ON d.dataset_uuid = ji.dataset_uuid
LEFT JOIN dataset_cursor dc ON dc.dataset_version = ji.dataset_version
LEFT JOIN consumer_cursor cc ON cc.job_id = ji.job_id AND cc.input_index = ji.input_index
LEFT JOIN LATERAL (
    SELECT i.range_start, i.range_end, i.revision, i.reason FROM invalidation i
    WHERE dv.revision > 0 AND i.dataset_version = ji.dataset_version
      AND (i.revision = cc.inv_revision
           OR (c.kind = 'partition' AND i.range_end >= c.range_start AND i.range_start <= c.range_end))
    ORDER BY i.revision DESC LIMIT 1) inv ON true
LEFT JOIN dataset_version hot
    ON NOT ji.trigger AND dv.storage = 'parquet' AND hot.dataset_version = hot_counterpart(ji.dataset_version)
ORDER BY c.task_id, ji.input_index

-- name: start_attempts
-- Queued to Running: the only place where an attempt begins and an epoch is drawn. Returns the state of the outputs
-- that the attempt starts from, and the state saved by an earlier attempt; a first attempt doesn't look for any.
WITH c AS (
    SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::uuid[], $6::text[], $7::float8[])
        AS c(task_id, job_id, worker_id, claim_key, lease_token, inputs, lease_seconds)
), o AS MATERIALIZED (
    SELECT dv.job_id, jsonb_object_agg(dv.dataset_version, dv.revision) AS revisions,
           jsonb_object_agg(dv.dataset_version, d.published_name) AS names
    FROM dataset_version dv JOIN dataset d USING (dataset_uuid)
    WHERE dv.job_id = ANY($2::uuid[]) GROUP BY dv.job_id
), started AS (
    UPDATE task t
    SET status = 'Running', attempt = t.attempt + 1, last_outcome = NULL, worker_id = c.worker_id, parked = false,
        stalled = false,
        claim_key = c.claim_key, lease_token = c.lease_token, inputs = c.inputs::jsonb,
        output_revisions = coalesce(o.revisions, '{}'), epoch = nextval('epoch_seq'),
        lease_expires_at = tl_now() + make_interval(secs => c.lease_seconds)
    FROM c LEFT JOIN o USING (job_id) WHERE t.task_id = c.task_id
    RETURNING t.task_id, t.attempt, t.worker_id, t.lease_token, t.lease_expires_at, t.epoch, t.output_revisions,
              o.names, t.job_id, t.inputs
), history AS (
    INSERT INTO attempt (task_id, attempt, worker_id, lease_token, epoch, claimed_at)
    SELECT task_id, attempt, worker_id, lease_token, epoch, tl_now() FROM started
)
SELECT task_id, attempt, lease_expires_at, epoch, output_revisions, names,
       CASE WHEN attempt > 1 THEN (
            SELECT s.value FROM operator_state s
            WHERE s.job_id = started.job_id AND s.key = started.task_id::text
              AND s.input_revisions = input_revisions(started.inputs)) END AS state
FROM started

-- name: extend_leases
-- Heartbeats: a longer lease, never a shorter one, for attempts that the caller has checked and holds locked.
UPDATE task t
SET lease_expires_at = greatest(t.lease_expires_at, tl_now() + make_interval(secs => h.lease_seconds))
FROM unnest($1::uuid[], $2::float8[]) AS h(task_id, lease_seconds)
WHERE t.task_id = h.task_id
RETURNING t.task_id, t.lease_expires_at

-- name: report_progress
-- The progress that an attempt reports; repeating it writes nothing.
UPDATE attempt SET progress = $3::jsonb
WHERE task_id = $1 AND attempt = $2 AND progress IS DISTINCT FROM $3::jsonb

-- name: end_attempts
-- The end of attempts, in the task and in its history. The lease token stays: it identifies a late completion.
WITH e AS (
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::int[], $5::float8[], $6::text[], $7::bytea[],
                         $8::jsonb[], $9::boolean[])
        AS e(task_id, outcome, status, failures, ready_in, error_message, digest, result, shelved)
), ended AS (
    UPDATE task t
    SET status = e.status, last_outcome = e.outcome, failures = e.failures, error_message = e.error_message,
        shelved = e.shelved,
        ready_at = CASE WHEN e.ready_in IS NULL THEN t.ready_at
                        ELSE tl_now() + make_interval(secs => e.ready_in) END,
        woken_at = CASE WHEN e.ready_in IS NULL THEN t.woken_at
                        ELSE tl_now() + make_interval(secs => e.ready_in) END,
        ended_at = CASE WHEN e.ready_in IS NULL THEN tl_now() END
    FROM e WHERE t.task_id = e.task_id
    RETURNING t.task_id, t.attempt, t.ready_at, e.outcome, e.ready_in, e.error_message, e.digest, e.result
)
UPDATE attempt a
SET outcome = e.outcome, error_message = e.error_message, ended_at = tl_now(), completion_digest = e.digest,
    result = e.result || jsonb_build_object('retry_at', CASE WHEN e.ready_in IS NOT NULL THEN e.ready_at END)
FROM ended e
WHERE a.task_id = e.task_id AND a.attempt = e.attempt
RETURNING a.task_id, a.result, e.ready_at

-- name: ended_attempts
-- The answers that these attempts got when they ended, so that a repeated completion gets the same answer.
SELECT a.task_id, a.attempt, a.lease_token, a.outcome, a.completion_digest, a.result
FROM unnest($1::uuid[], $2::int[]) AS q(task_id, attempt)
JOIN attempt a ON a.task_id = q.task_id AND a.attempt = q.attempt

-- name: park_tasks
-- Tasks whose job was full, and whose wake-up is used up: the next free slot wakes them.
UPDATE task SET parked = true WHERE task_id = ANY($1::uuid[])

-- name: stall_tasks
-- Tasks that can't run because a scope that they need was invalidated: they don't wait for a worker.
UPDATE task SET stalled = true WHERE task_id = ANY($1::uuid[]) AND NOT stalled

-- name: wake_parked
-- The next tasks of jobs in which a slot came free: the oldest that found them full, bulk work behind
-- what comes up to $3 seconds later. Each is woken for one slot
-- only, even while its row is locked: the holder need not be about to claim or end it (a heartbeat of an attempt
-- that is over isn't), and since this transaction holds the job's row it can't wait for the holder. A superfluous
-- wake-up is harmless.
WITH next AS (
    SELECT q.task_id, j.runtime, q.bulk OR j.priority = 'bulk' AS bulk
    FROM unnest($1::uuid[], $2::int[]) AS f(job_id, slots)
    JOIN job j ON j.job_id = f.job_id AND j.active AND NOT j.paused
    CROSS JOIN LATERAL (
        SELECT c.task_id, c.bulk FROM (
            (SELECT t.task_id, t.bulk, t.seq, t.ready_at AS turn FROM task t
             WHERE t.job_id = f.job_id AND t.status = 'Queued' AND t.parked AND NOT t.bulk AND t.ready_at <= tl_now()
             ORDER BY t.seq LIMIT f.slots)
            UNION ALL
            (SELECT t.task_id, t.bulk, t.seq, t.ready_at + make_interval(secs => $3) FROM task t
             WHERE t.job_id = f.job_id AND t.status = 'Queued' AND t.parked AND t.bulk AND t.ready_at <= tl_now()
               AND NOT j.bulk_held
             ORDER BY t.seq LIMIT f.slots)) c
        ORDER BY c.turn, c.seq LIMIT f.slots) q
), free AS (
    SELECT t.task_id FROM task t WHERE t.task_id IN (SELECT task_id FROM next) FOR NO KEY UPDATE OF t SKIP LOCKED
), woken AS (
    UPDATE task t SET parked = false, woken_at = tl_now() FROM free WHERE t.task_id = free.task_id
)
SELECT task_id, runtime, bulk FROM next

-- name: wake_parked_of_operators
-- The next tasks of operators that have a cap and in which a slot came free, over all jobs that aren't full themselves;
-- bulk work behind what comes up to $3 seconds later, as within a job.
WITH next AS (
    SELECT q.task_id, q.runtime, q.is_bulk AS bulk FROM unnest($1::text[], $2::int[]) AS f(operator, slots)
    CROSS JOIN LATERAL (
        SELECT t.task_id, j.runtime, t.bulk OR j.priority = 'bulk' AS is_bulk, t.turn, t.seq
        FROM job j
        CROSS JOIN LATERAL (
            SELECT greatest(0, least(f.slots, j.max_concurrency - (
                SELECT count(*) FROM task r WHERE r.job_id = j.job_id AND r.status = 'Running'))) AS slots) w
        CROSS JOIN LATERAL (
            SELECT c.task_id, c.bulk, c.seq, c.turn FROM (
                (SELECT p.task_id, p.bulk, p.seq,
                        p.ready_at + make_interval(secs => CASE j.priority WHEN 'bulk' THEN $3 ELSE 0 END) AS turn
                 FROM task p
                 WHERE p.job_id = j.job_id AND p.status = 'Queued' AND p.parked AND NOT p.bulk
                   AND p.ready_at <= tl_now()
                 ORDER BY p.seq LIMIT w.slots)
                UNION ALL
                (SELECT p.task_id, p.bulk, p.seq, p.ready_at + make_interval(secs => $3) FROM task p
                 WHERE p.job_id = j.job_id AND p.status = 'Queued' AND p.parked AND p.bulk
                   AND p.ready_at <= tl_now() AND NOT j.bulk_held
                 ORDER BY p.seq LIMIT w.slots)) c
            ORDER BY c.turn, c.seq LIMIT w.slots) t
        WHERE j.operator = f.operator AND j.active AND NOT j.paused
        ORDER BY t.turn, t.seq LIMIT f.slots) q
), free AS (
    SELECT t.task_id FROM task t WHERE t.task_id IN (SELECT task_id FROM next) FOR NO KEY UPDATE OF t SKIP LOCKED
), woken AS (
    UPDATE task t SET parked = false, woken_at = tl_now() FROM free WHERE t.task_id = free.task_id
)
SELECT task_id, runtime, bulk FROM next

-- name: create_partition_tasks
-- One task per scope that every triggering input has committed, unique per input revisions; bulk if one of these was.
-- What a paused or held job would get is kept until it goes on, and so is what comes while a backlog is being worked
-- off. Of what comes from outside ($7) a job gets no more than its queue has room for, and the rest is kept: twice as
-- much of normal work while it holds bulk work only. Of a capped job no more tasks are woken than may run; the others
-- are woken by slots that come free.
WITH c AS (
    SELECT DISTINCT ON (c.job_id, c.range_start, c.range_end) c.*
    FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::bigint[], $5::jsonb[]) WITH ORDINALITY
        AS c(task_id, job_id, range_start, range_end, cause, position)
    ORDER BY c.job_id, c.range_start, c.range_end, c.position
), ready AS (
    SELECT c.*, j.org_id, j.max_concurrency, m.bulk, scope_key(c.job_id, c.range_start, c.range_end) AS scope_key,
           j.paused OR (m.bulk AND j.bulk_held) OR (j.backlog AND NOT $6) AS held
    FROM c JOIN job j ON j.job_id = c.job_id AND j.active
    CROSS JOIN LATERAL (
        SELECT EXISTS (SELECT 1 FROM job_input ji JOIN partition p ON p.dataset_version = ji.dataset_version
                       WHERE ji.job_id = c.job_id AND ji.trigger AND p.current AND p.bulk
                         AND p.range_start = c.range_start AND p.range_end = c.range_end) AS bulk) m
    WHERE NOT EXISTS (
        SELECT 1 FROM job_input ji
        WHERE ji.job_id = c.job_id AND ji.trigger
          AND NOT EXISTS (SELECT 1 FROM partition p
                          WHERE p.dataset_version = ji.dataset_version AND p.current
                            AND p.range_start = c.range_start AND p.range_end = c.range_end)
          AND NOT EXISTS (SELECT 1 FROM dataset_cursor dc
                          WHERE dc.dataset_version = ji.dataset_version AND dc.cursor >= c.range_end))
), rooms AS MATERIALIZED (
    SELECT j.job_id, j.max_queue_depth - q.waiting + later.tasks AS room,
           CASE WHEN EXISTS (SELECT 1 FROM pressure w WHERE w.job_id = j.job_id AND w.tier = 'bulk')
                THEN j.max_queue_depth ELSE 0 END AS more,
           EXISTS (SELECT 1 FROM held_scope h WHERE h.job_id = j.job_id AND NOT h.bulk) AS normal_kept,
           EXISTS (SELECT 1 FROM held_scope h WHERE h.job_id = j.job_id AND h.bulk) AS bulk_kept
    FROM job j
    CROSS JOIN LATERAL (SELECT coalesce(sum(n.waiting), 0)::bigint AS waiting FROM queue_count n
                        WHERE n.job_id = j.job_id) q
    CROSS JOIN LATERAL (SELECT CASE WHEN q.waiting + (SELECT count(*) FROM ready r WHERE r.job_id = j.job_id)
                                         <= j.max_queue_depth THEN 0
                                    ELSE (SELECT count(*) FROM task t
                                          WHERE t.job_id = j.job_id AND t.status = 'Queued' AND NOT t.stalled
                                            AND t.ready_at > tl_now()) END AS tasks) later
    WHERE $7 AND j.max_queue_depth IS NOT NULL AND j.job_id = ANY($2)
), judged AS (
    SELECT r.*, r.held OR (n.job_id IS NOT NULL AND (
               n.normal_kept OR (r.bulk AND n.bulk_kept)
               OR row_number() OVER (PARTITION BY r.job_id, r.held ORDER BY r.bulk, r.position)
                  > n.room + CASE WHEN r.bulk THEN 0 ELSE n.more END)) AS kept
    FROM ready r LEFT JOIN rooms n USING (job_id)
), kept AS (
    INSERT INTO held_scope (job_id, range_start, range_end, bulk, cause)
    SELECT job_id, range_start, range_end, bulk, cause FROM judged WHERE kept ORDER BY position
    ON CONFLICT (job_id, range_start, range_end) DO NOTHING
), created AS (
    INSERT INTO task (task_id, org_id, job_id, kind, status, range_start, range_end, scope_key, cause, parked, bulk)
    SELECT task_id, org_id, job_id, 'partition', 'Queued', range_start, range_end, scope_key, cause,
           max_concurrency IS NOT NULL, bulk
    FROM judged WHERE NOT kept
    ORDER BY job_id, range_start, range_end
    ON CONFLICT (job_id, range_start, range_end, scope_key) WHERE kind = 'partition' DO NOTHING
    RETURNING task_id, job_id, range_start, range_end, bulk
)
SELECT created.task_id, j.runtime, created.bulk OR j.priority = 'bulk' AS bulk,
       row_number() OVER (PARTITION BY created.job_id ORDER BY created.range_start, created.range_end)
           <= coalesce(j.max_concurrency, 2147483647) AS wake
FROM created JOIN job j USING (job_id)

-- name: create_cursor_tasks
-- The one waiting task of each PerUpdate job that has something to read or to undo.
INSERT INTO task (task_id, org_id, job_id, kind, status, cause)
SELECT c.task_id, j.org_id, c.job_id, 'cursor', 'Queued', c.cause
FROM unnest($1::uuid[], $2::uuid[], $3::jsonb[]) AS c(task_id, job_id, cause)
JOIN job j ON j.job_id = c.job_id AND j.active AND NOT j.paused
WHERE has_updates(c.job_id)
ORDER BY c.job_id
ON CONFLICT (job_id) WHERE kind = 'cursor' AND status = 'Queued' AND attempt = 0 DO NOTHING
RETURNING task_id, (SELECT runtime FROM job WHERE job.job_id = task.job_id) AS runtime,
          bulk OR (SELECT priority = 'bulk' FROM job WHERE job.job_id = task.job_id) AS bulk

-- name: create_source_task
-- The task of an always-on source: one for the life of the job's generation.
INSERT INTO task (task_id, org_id, job_id, kind, status, cause)
SELECT $1, j.org_id, j.job_id, 'source', 'Queued', $3 FROM job j WHERE j.job_id = $2
ON CONFLICT (job_id) WHERE kind = 'source'
DO UPDATE SET status = 'Queued', stalled = false, ready_at = tl_now(), woken_at = tl_now(), failures = 0, ended_at = NULL
    WHERE task.status = 'Canceled'
RETURNING task_id, (SELECT runtime FROM job WHERE job.job_id = task.job_id) AS runtime,
          bulk OR (SELECT priority = 'bulk' FROM job WHERE job.job_id = task.job_id) AS bulk

-- name: expired_leases
-- Attempts whose lease ran out while this Dispatcher could receive their heartbeats: jobs whose lease is longer
-- than the time since it began to listen are left alone.
SELECT t.task_id FROM task t JOIN job j USING (job_id)
WHERE t.status = 'Running' AND t.lease_expires_at < tl_now()
  AND tl_now() - $1::timestamptz >= make_interval(secs => j.heartbeat_timeout_seconds)
ORDER BY t.lease_expires_at LIMIT $2

-- name: unwoken_tasks
-- Ready tasks that were not claimed since their last wake-up; the sweep that makes a lost message harmless. A
-- wake-up that can't be delivered isn't lost: it is tried again, and more of them would only pile up.
WITH due AS (
    SELECT t.task_id, t.job_id FROM task t JOIN job j USING (job_id)
    WHERE t.status = 'Queued' AND t.woken_at < tl_now() - make_interval(secs => $1)
      AND t.ready_at <= tl_now() AND j.active AND NOT j.paused AND NOT (t.bulk AND j.bulk_held)
      AND NOT EXISTS (SELECT 1 FROM outbox o
                      WHERE o.task_id = t.task_id AND o.failed_at IS NULL AND o.tries > 0)
    ORDER BY t.woken_at LIMIT $2
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
UPDATE task t SET woken_at = tl_now() FROM due JOIN job j USING (job_id)
WHERE t.task_id = due.task_id
RETURNING t.task_id, j.runtime, t.bulk OR j.priority = 'bulk' AS bulk

-- name: requeue_task
-- A person's retry: at once, with a full set of attempts. An attempt that timed out before the cancel may have been
-- answered Canceled since, so it no longer counts as late: its results are lost, and only a new attempt acts.
UPDATE task SET status = 'Queued', failures = 0, ready_at = tl_now(), woken_at = tl_now(), ended_at = NULL,
       stalled = false,
       last_outcome = CASE WHEN status = 'Canceled' AND attempt > 0 THEN 'Canceled' ELSE last_outcome END
WHERE task_id = $1

-- name: cancel_tasks
-- Canceled at once, in the history too; a running attempt learns of it by its next heartbeat.
WITH canceled AS (
    UPDATE task SET status = 'Canceled', ended_at = tl_now(), error_message = coalesce($2, error_message)
    WHERE task_id = ANY($1::uuid[])
    RETURNING task_id, attempt
)
UPDATE attempt a SET outcome = 'Canceled', ended_at = tl_now(), error_message = $2
FROM canceled c WHERE a.task_id = c.task_id AND a.attempt = c.attempt AND a.outcome IS NULL

-- name: other_cursor_task
-- Whether another cursor task of the same job covers this one: a live one that has begun, a later one that is done,
-- or, for one that was never claimed, the one that waits now.
SELECT 1 WHERE EXISTS (
    SELECT 1 FROM task t WHERE t.job_id = $1 AND t.kind = 'cursor' AND t.status IN ('Queued', 'Running')
      AND t.attempt > 0 AND t.task_id <> $2 AND ($4 > 0 OR t.seq > $3))
OR EXISTS (
    SELECT 1 FROM task t WHERE t.job_id = $1 AND t.kind = 'cursor' AND t.status = 'Queued' AND t.attempt = 0
      AND t.task_id <> $2 AND $4 = 0)
OR EXISTS (
    SELECT 1 FROM task t WHERE t.job_id = $1 AND t.seq > $3 AND t.kind = 'cursor' AND t.attempt > 0
      AND t.status = 'Completed')

-- name: shelve_tasks
-- Stopped because their job is retired; a rollback resumes them.
UPDATE task SET status = 'Canceled', shelved = true, ended_at = tl_now(), error_message = $2
WHERE task_id = ANY($1::uuid[])

-- name: keep_canceled
-- A person canceled a task that a deploy had only stopped: no rollback resumes it.
UPDATE task SET shelved = false, error_message = $2 WHERE task_id = $1 AND shelved

-- name: unshelve_tasks
-- A job that is deployed again exactly as it was goes on with the scopes at which it was stopped. As after a
-- person's retry, an attempt that was answered Canceled in between never acts again.
UPDATE task SET status = 'Queued', shelved = false, stalled = false, ready_at = tl_now(), woken_at = tl_now(), ended_at = NULL,
    error_message = NULL,
    last_outcome = CASE WHEN status = 'Canceled' AND attempt > 0 THEN 'Canceled' ELSE last_outcome END
WHERE job_id = $1 AND shelved AND kind = 'partition'
RETURNING task_id, (SELECT runtime FROM job WHERE job.job_id = task.job_id) AS runtime,
          bulk OR (SELECT priority = 'bulk' FROM job WHERE job.job_id = task.job_id) AS bulk

-- name: live_tasks_of_jobs
-- Waiting and running tasks of jobs that a deploy replaces.
SELECT t.task_id, t.job_id, t.kind, t.status FROM task t
WHERE (t.job_id = ANY($1::uuid[]) AND t.status = 'Queued')
   OR (t.job_id = ANY($1::uuid[]) AND t.status = 'Running')
ORDER BY t.task_id FOR NO KEY UPDATE

-- name: wake_queued_of_jobs
-- A wake-up now for every ready task of these jobs: they were resumed, or moved to another runtime.
UPDATE task t SET woken_at = tl_now() FROM job j
WHERE t.job_id = ANY($1::uuid[]) AND t.status = 'Queued' AND t.ready_at <= tl_now() AND j.job_id = t.job_id
RETURNING t.task_id, j.runtime, t.bulk OR j.priority = 'bulk' AS bulk

-- name: claimed_at
-- When an attempt began.
SELECT claimed_at FROM attempt WHERE task_id = $1 AND attempt = $2

-- name: save_state
-- The task's row is locked, so that only its current attempt writes this.
INSERT INTO operator_state (job_id, key, value, task_id, attempt, input_revisions)
SELECT t.job_id, t.task_id::text, $2::jsonb, t.task_id, t.attempt, input_revisions(t.inputs)
FROM task t WHERE t.task_id = $1
ON CONFLICT (job_id, key) DO UPDATE
SET value = excluded.value, attempt = excluded.attempt, input_revisions = excluded.input_revisions,
    updated_at = tl_now()

-- name: forget_state
-- The next attempt starts without saved state.
DELETE FROM operator_state WHERE job_id = $1 AND key = $2::uuid::text

-- name: saved_state
-- The state that a task's attempt may resume from: not one that was derived from an input that has changed since.
SELECT s.value
FROM task t JOIN operator_state s ON s.job_id = t.job_id AND s.key = t.task_id::text
WHERE t.task_id = $1 AND s.input_revisions = input_revisions(t.inputs)
