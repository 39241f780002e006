-- name: add
-- An entry, committed with its cause, and for how long a bulk task has been ready.
INSERT INTO outbox (kind, runtime, task_id, payload, available_at)
SELECT n.kind, n.runtime, n.task_id, n.payload, coalesce(n.available_at, tl_now())
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::jsonb[], $5::timestamptz[])
    AS n(kind, runtime, task_id, payload, available_at)
RETURNING outbox_id, kind, runtime, task_id, payload, available_at, available_at <= tl_now() AS due,
       coalesce((SELECT extract(epoch FROM tl_now() - t.ready_at) FROM task t
                 WHERE t.task_id = outbox.task_id AND outbox.payload ? 'bulk'), 0)::float8 AS waited

-- name: take_due
-- Due entries that no other replica is delivering; postponed a little, so that a crash here delays them instead of
-- losing them. Fresh ones are left for a moment to the process that committed them. Messages of buffers are taken
-- separately.
WITH due AS (
    SELECT outbox_id FROM outbox
    WHERE failed_at IS NULL AND kind <> 'buffer' AND available_at <= tl_now() - make_interval(secs => $3)
    ORDER BY available_at, outbox_id LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE outbox o SET available_at = tl_now() + make_interval(secs => $2)
FROM due WHERE o.outbox_id = due.outbox_id
RETURNING o.outbox_id, o.kind, o.runtime, o.task_id, o.payload, o.available_at, true AS due,
       coalesce((SELECT extract(epoch FROM tl_now() - t.ready_at) FROM task t
                 WHERE t.task_id = o.task_id AND o.payload ? 'bulk'), 0)::float8 AS waited

-- name: delivered
-- Entries are deleted after they were published.
DELETE FROM outbox WHERE outbox_id = ANY($1::bigint[])

-- name: failed
-- Try again later, or give up visibly. The delay follows from the entry's own number of tries: the first of the
-- array follows the first failure, the last holds from there on.
UPDATE outbox
SET tries = tries + 1, last_error = $2,
    available_at = tl_now() + make_interval(secs => ($3::float8[])[least(tries + 1, cardinality($3::float8[]))]),
    failed_at = CASE WHEN tries + 1 >= $4 THEN tl_now() END
WHERE outbox_id = ANY($1::bigint[])
RETURNING outbox_id, failed_at

-- name: deliver_held_now
-- Wake-ups of a runtime that waited for an invoker are due at once.
UPDATE outbox SET available_at = tl_now()
WHERE runtime = $1 AND failed_at IS NULL AND tries > 0 AND available_at > tl_now()

-- name: replay_failed
-- A person's decision to try given-up entries again.
UPDATE outbox SET failed_at = NULL, tries = 0, available_at = tl_now()
WHERE failed_at IS NOT NULL AND ($1::bigint[] IS NULL OR outbox_id = ANY($1::bigint[]))
RETURNING outbox_id

-- name: list_failed
-- Given-up entries with their errors.
SELECT outbox_id, kind, runtime, task_id, tries, last_error, created_at, failed_at
FROM outbox WHERE failed_at IS NOT NULL ORDER BY outbox_id LIMIT $1

-- name: lag
-- The number of due entries, and the age of the oldest.
SELECT count(*) AS due, coalesce(extract(epoch FROM max(tl_now() - available_at)), 0)::float8 AS oldest_seconds
FROM (SELECT available_at FROM outbox WHERE failed_at IS NULL AND kind <> 'buffer' AND available_at <= tl_now()
      UNION ALL
      SELECT available_at FROM outbox WHERE failed_at IS NULL AND kind = 'buffer' AND available_at <= tl_now()) waiting
