-- name: publish
-- One round trip for the batch and its durability: set_config is local to this one-statement transaction.
INSERT INTO tracelake_queue.messages (queue, enqueued_at, visible_at, body)
SELECT $1::text, tracelake_queue.clock(), tracelake_queue.clock() + make_interval(secs => $3::float8), b.body::json
FROM unnest($2::text[]) WITH ORDINALITY AS b (body, position)
WHERE (SELECT set_config('synchronous_commit', $4::text, true)) IS NOT NULL
ORDER BY b.position
RETURNING id;

-- name: receive
-- Takes due messages and moves those received too often to the dead letters; with nothing due, returns when the next
-- message will be. Stops taking once the bodies have the maximum number of bytes. The next message with the head start
-- of the first one taken can't come below the floor.
WITH due AS MATERIALIZED (
    SELECT id, visible_at, receive_count, pg_column_size(body) AS size
    FROM tracelake_queue.messages
    WHERE queue = $1::text AND visible_at >= $5::timestamptz AND visible_at <= tracelake_queue.clock()
    ORDER BY visible_at, id
    LIMIT $2::int
    FOR UPDATE SKIP LOCKED
), weighed AS (
    SELECT id, receive_count, sum(size) OVER (ORDER BY visible_at, id) - size AS before FROM due
), taken AS (
    UPDATE tracelake_queue.messages
    SET visible_at = tracelake_queue.clock() + make_interval(secs => $3::float8),
        receive_count = receive_count + 1,
        receipt = gen_random_uuid()
    WHERE id = ANY (ARRAY(SELECT id FROM weighed
                          WHERE receive_count < $4::int AND ($6::bigint IS NULL OR before < $6::bigint)))
    RETURNING id, receipt, receive_count, enqueued_at, body
), exhausted AS (
    DELETE FROM tracelake_queue.messages
    WHERE id = ANY (ARRAY(SELECT id FROM due WHERE receive_count >= $4::int))
    RETURNING id, enqueued_at, receive_count, queue, body
), buried AS (
    INSERT INTO tracelake_queue.dead_letters (id, enqueued_at, dead_at, receive_count, queue, reason, body)
    SELECT id, enqueued_at, tracelake_queue.clock(), receive_count, queue,
           format('received %s times without an acknowledgement', receive_count), body
    FROM exhausted
    RETURNING id
), answer AS (
    SELECT t.id, t.receipt, t.receive_count, t.enqueued_at, t.body::text AS body, due.visible_at, due.size,
           NULL::float8 AS due_in, greatest(t.enqueued_at - due.visible_at, interval '0') AS head_start
    FROM taken AS t JOIN due ON due.id = t.id
    UNION ALL
    SELECT id, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL FROM buried
    UNION ALL
    SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, (
        SELECT extract(epoch FROM m.visible_at - tracelake_queue.clock())::float8
        FROM tracelake_queue.messages AS m
        WHERE m.queue = $1::text AND m.visible_at > tracelake_queue.clock()
        ORDER BY m.visible_at
        LIMIT 1
    ), NULL
    WHERE NOT EXISTS (SELECT FROM due)
)
SELECT id, receipt, receive_count, enqueued_at, body, size, due_in,
       least(visible_at, tracelake_queue.clock() - interval '200 ms' - coalesce(head_start, interval '0')) AS floor
FROM answer
ORDER BY visible_at, id;

-- name: extend
-- Only a message still in flight under this very receipt can be held longer, or released with 0 seconds.
UPDATE tracelake_queue.messages
SET visible_at = tracelake_queue.clock() + make_interval(secs => $3::float8)
WHERE id = ANY ($1::bigint[]) AND receipt = ANY ($2::uuid[]) AND visible_at > tracelake_queue.clock()
RETURNING id, receipt, queue;

-- name: ack
-- The receipt is the fence: after a redelivery it matches nothing.
DELETE FROM tracelake_queue.messages
WHERE id = ANY ($1::bigint[]) AND receipt = ANY ($2::uuid[])
  AND (SELECT set_config('synchronous_commit', $3::text, true)) IS NOT NULL
RETURNING id, receipt, queue;

-- name: dead_letter
-- Moves the message whole; a letter is kept for people, so it is durable whatever its queue is.
WITH given_up AS (
    DELETE FROM tracelake_queue.messages
    WHERE id = ANY ($1::bigint[]) AND receipt = ANY ($2::uuid[])
      AND (SELECT set_config('synchronous_commit', 'on', true)) IS NOT NULL
    RETURNING id, receipt, enqueued_at, receive_count, queue, body
), buried AS (
    INSERT INTO tracelake_queue.dead_letters (id, enqueued_at, dead_at, receive_count, queue, reason, body)
    SELECT id, enqueued_at, tracelake_queue.clock(), receive_count, queue, $3::text, body FROM given_up
)
SELECT id, receipt, queue FROM given_up;

-- name: dead_letters
-- Oldest first.
SELECT id, enqueued_at, dead_at, receive_count, reason, body::text AS body
FROM tracelake_queue.dead_letters
WHERE queue = $1::text
ORDER BY id
LIMIT $2::int;

-- name: redrive
-- A redriven letter is a new message, so that neither its age nor its receive count moves it back to the dead
-- letters at once.
WITH raised AS (
    DELETE FROM tracelake_queue.dead_letters
    WHERE queue = $1::text AND id = ANY ($2::bigint[])
      AND (SELECT set_config('synchronous_commit', 'on', true)) IS NOT NULL
    RETURNING id, queue, body
)
INSERT INTO tracelake_queue.messages (queue, enqueued_at, visible_at, body)
SELECT queue, tracelake_queue.clock(), tracelake_queue.clock(), body FROM raised ORDER BY id
RETURNING id;

-- name: discard
-- Dead letters stay until a user discards them.
DELETE FROM tracelake_queue.dead_letters
WHERE queue = $1::text AND id = ANY ($2::bigint[])
  AND (SELECT set_config('synchronous_commit', 'on', true)) IS NOT NULL
RETURNING id;

-- name: depths
-- One pass for the metrics of all queues that hold anything.
SELECT queue,
       count(*) FILTER (WHERE NOT dead AND visible_at <= tracelake_queue.clock()) AS visible,
       count(*) FILTER (WHERE NOT dead AND visible_at > tracelake_queue.clock() AND receipt IS NOT NULL) AS in_flight,
       count(*) FILTER (WHERE NOT dead AND visible_at > tracelake_queue.clock() AND receipt IS NULL) AS delayed,
       count(*) FILTER (WHERE dead) AS dead,
       coalesce(extract(epoch FROM tracelake_queue.clock() - min(enqueued_at) FILTER (WHERE NOT dead)), 0)::float8
           AS oldest_age_seconds
FROM (
    SELECT queue, visible_at, receipt, enqueued_at, false AS dead FROM tracelake_queue.messages
    UNION ALL
    SELECT queue, NULL, NULL, NULL, true FROM tracelake_queue.dead_letters
) AS everything
GROUP BY queue;

-- name: purge
-- Durable, since a crash must not undo a purge that was reported as done.
WITH dropped AS (
    DELETE FROM tracelake_queue.messages
    WHERE queue = $1::text AND (SELECT set_config('synchronous_commit', 'on', true)) IS NOT NULL
    RETURNING 1
)
SELECT count(*) FROM dropped;

-- name: notify
-- The names of the queues that gained something, many at a time.
SELECT pg_notify('tracelake_queue', name) FROM unnest($1::text[]) AS name;
