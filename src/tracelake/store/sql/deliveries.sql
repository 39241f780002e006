-- name: dataset_of_delivery
-- The published dataset that a delivery reads, and its position as far as the Dispatcher knows.
SELECT d.dataset_uuid, coalesce(dc.cursor, 0) AS position
FROM dataset d JOIN dataset_version dv ON dv.dataset_uuid = d.dataset_uuid AND dv.is_current
LEFT JOIN dataset_cursor dc ON dc.dataset_version = dv.dataset_version
WHERE d.org_id = $1 AND d.published_name = $2 AND d.write_mode = 'buffered'

-- name: active_deliveries
-- The deliveries of a DAG that are active, before a deploy.
SELECT delivery_id, name, dataset_uuid, job_id FROM delivery WHERE dag_name = $1 AND active

-- name: find_delivery
-- The delivery of this name and dataset, if there ever was one.
SELECT delivery_id, job_id, active FROM delivery WHERE dag_name = $1 AND name = $2 AND dataset_uuid = $3

-- name: add_delivery
-- A delivery begins behind the rows that there are.
INSERT INTO delivery (delivery_id, org_id, dag_name, name, dataset_uuid, job_id, active, spec, position)
VALUES ($1, $2, $3, $4, $5, $6, true, $7, $8)

-- name: change_delivery
-- A delivery that goes on keeps its position. One that was removed begins again behind the rows that came meanwhile.
UPDATE delivery SET spec = $2, active = true,
       position = CASE WHEN active THEN position ELSE greatest(position, $3) END
WHERE delivery_id = $1

-- name: retire_delivery
-- What a removed delivery hasn't sent is never sent.
WITH retired AS (
    UPDATE delivery SET active = false, failing_since = NULL WHERE delivery_id = $1 RETURNING delivery_id),
forgotten AS (DELETE FROM delivery_wait w USING retired r WHERE w.delivery_id = r.delivery_id)
UPDATE delivery_message m
SET state = 'dropped', finished_at = tl_now(), last_error = 'the delivery was removed',
    in_doubt = in_doubt OR under_way, under_way = false
FROM retired r WHERE m.delivery_id = r.delivery_id AND m.state IN ('waiting', 'dead')

-- name: of_job
-- The delivery that a job runs, with the dataset as it is deployed now.
SELECT v.delivery_id, v.dag_name, v.spec, d.buffer_schema, d.schema_hash, dv.dataset_version
FROM delivery v JOIN dataset d USING (dataset_uuid)
JOIN dataset_version dv ON dv.dataset_uuid = d.dataset_uuid AND dv.job_id IS NOT NULL
WHERE v.job_id = $1

-- name: lock_of_job
-- The first lock of every call of a delivery process, which its calls take one after the other.
SELECT v.delivery_id, v.position, v.job_id, v.spec, v.failing_since, v.resumed_at, d.schema_hash
FROM delivery v JOIN dataset d USING (dataset_uuid)
WHERE v.job_id = $1 FOR NO KEY UPDATE OF v

-- name: begin_attempt
-- A new attempt has nothing at hand, and doesn't know what arrived of what the last one was sending.
UPDATE delivery_message
SET handed = false, in_doubt = in_doubt OR under_way, under_way = false
WHERE delivery_id = $1 AND state = 'waiting' AND (handed OR under_way)

-- name: take_new
-- Messages that the attempt doesn't have ($3 are those that it has), oldest first. What was handed out counts only
-- for a process that doesn't say what it has: an answer may have been lost.
WITH found AS (
    SELECT m.message_id FROM delivery_message m
    WHERE m.delivery_id = $1 AND m.state = 'waiting'
      AND CASE WHEN $3::bigint[] IS NULL THEN NOT m.handed
               ELSE NOT m.under_way AND m.message_id NOT IN (SELECT unnest($3::bigint[])) END
    ORDER BY m.message_id LIMIT $2)
UPDATE delivery_message m SET handed = true FROM found WHERE m.message_id = found.message_id
RETURNING m.message_id, m.record_id, m.revision, m.made_at, m.kind, m.order_key, m.data, m.text, m.row_at, m.tries,
          greatest(0, extract(epoch FROM m.next_try_at - tl_now()))::float8 AS wait_seconds

-- name: waits
-- Producers of which rows wait, with the position up to which theirs are messages.
SELECT producer, position, block FROM delivery_wait WHERE delivery_id = $1

-- name: set_waits
-- These producers wait now, and no others.
WITH ended AS (DELETE FROM delivery_wait WHERE delivery_id = $1 AND producer <> ALL ($2::text[]))
INSERT INTO delivery_wait AS w (delivery_id, producer, position, block)
SELECT $1, n.producer, n.position, n.block
FROM unnest($2::text[], $3::bigint[], $4::bigint[]) AS n(producer, position, block)
ON CONFLICT (delivery_id, producer) DO UPDATE
SET position = excluded.position, block = excluded.block, since = tl_now()
WHERE (w.position, w.block) IS DISTINCT FROM (excluded.position, excluded.block)

-- name: move_position
-- The rows up to here are messages now, or needn't be, but for those of producers that wait.
UPDATE delivery SET position = $2 WHERE delivery_id = $1

-- name: add_rows
-- A message for each row; one that says what the receiver already has, or is about to get, isn't sent again. What it
-- has isn't known after a try in doubt.
WITH r AS (
    SELECT * FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::timestamptz[],
                         $9::text[])
        WITH ORDINALITY AS u(record_id, revision, made_at, order_key, data, text, row_at, refused, place)),
judged AS (
    SELECT r.*, CASE WHEN r.refused IS NOT NULL THEN 'dead'
                     WHEN l.kind = 'row' AND l.state IN ('waiting', 'sent') AND l.data = r.data
                          AND l.text IS NOT DISTINCT FROM r.text THEN 'unchanged'
                     ELSE 'waiting' END AS state
    FROM r LEFT JOIN LATERAL (
        SELECT m.kind, m.state, m.data, m.text FROM delivery_message m
        WHERE m.delivery_id = $1 AND m.record_id = r.record_id AND (m.state IN ('waiting', 'sent') OR m.in_doubt)
        ORDER BY m.message_id DESC LIMIT 1) l ON true)
INSERT INTO delivery_message (delivery_id, record_id, revision, made_at, kind, state, order_key, data, text, row_at,
                              handed, last_error, finished_at)
SELECT $1, record_id, revision, made_at, 'row', state, order_key, CASE state WHEN 'unchanged' THEN '' ELSE data END,
       text, row_at, state = 'waiting', refused, CASE state WHEN 'waiting' THEN NULL ELSE tl_now() END
FROM judged ORDER BY place
ON CONFLICT (delivery_id, record_id, revision, made_at, kind) DO NOTHING
RETURNING message_id, record_id, revision, made_at, kind, order_key, data, text, row_at, tries, 0::float8 AS wait_seconds,
          state

-- name: supersede_by_rows
-- Dead letters of records of which a row has come since: sent again they would replace it at the receiver.
UPDATE delivery_message m
SET state = 'dropped', finished_at = tl_now(),
    last_error = 'message ' || n.message_id || ' of its record is newer; before: ' || coalesce(m.last_error, 'not tried')
FROM unnest($2::bigint[], $3::text[]) AS n(message_id, record_id)
WHERE m.delivery_id = $1 AND m.state = 'dead' AND m.record_id = n.record_id AND m.message_id < n.message_id

-- name: supersede_dead
-- Dead letters, these ($2) or all, of records of which there is a newer message. One that is unchanged isn't: it
-- repeats what may be this very letter.
UPDATE delivery_message m
SET state = 'dropped', finished_at = tl_now(),
    last_error = 'message ' || n.message_id || ' of its record is newer; before: ' || coalesce(m.last_error, 'not tried')
FROM (
    SELECT d.message_id AS letter, max(l.message_id) AS message_id
    FROM delivery_message d
    JOIN delivery_message l ON l.delivery_id = d.delivery_id AND l.record_id = d.record_id
                           AND l.message_id > d.message_id AND l.state IN ('waiting', 'sent', 'dead')
    WHERE d.delivery_id = $1 AND d.state = 'dead' AND ($2::bigint[] IS NULL OR d.message_id = ANY($2::bigint[]))
    GROUP BY d.message_id) n
WHERE m.message_id = n.letter
RETURNING m.message_id, m.state, m.last_error

-- name: supersede_starting
-- Messages of records of which a newer one was tried before them, as when they were replayed meanwhile.
UPDATE delivery_message m
SET state = 'dropped', finished_at = tl_now(), last_error = 'message ' || n.message_id || ' of its record went before it'
FROM (
    SELECT d.message_id AS late, max(l.message_id) AS message_id
    FROM delivery_message d
    JOIN delivery_message l ON l.delivery_id = d.delivery_id AND l.record_id = d.record_id
                           AND l.message_id > d.message_id AND (l.state = 'sent' OR l.under_way OR l.in_doubt)
    WHERE d.delivery_id = $1 AND d.message_id = ANY($2::bigint[]) AND d.state = 'waiting'
    GROUP BY d.message_id) n
WHERE m.message_id = n.late

-- name: drop_unsent
-- Rows that no longer hold and wait, or were given up: they are never sent (again), also not by a replay, which would
-- come after their retraction. One of which a try is under way is dropped when that fails.
UPDATE delivery_message SET state = 'dropped', finished_at = tl_now(),
       last_error = CASE WHEN in_doubt THEN 'it was retracted after tries of which one may have arrived'
                         ELSE 'it was retracted before it was sent' END
WHERE delivery_id = $1 AND record_id = ANY($2::text[]) AND kind = 'row'
  AND (state = 'dead' OR (state = 'waiting' AND NOT under_way))
RETURNING message_id

-- name: add_retractions
-- A retraction for each record that a receiver has, or may have; it repeats what was sent. A retraction that was given
-- up for a newer row retracts nothing.
INSERT INTO delivery_message (delivery_id, record_id, revision, made_at, kind, state, order_key, data, text, row_at,
                              handed)
SELECT $1, g.record_id, g.revision, g.made_at, 'retracted', 'waiting', l.order_key, l.data, l.text, tl_now(), true
FROM unnest($2::text[], $3::bigint[], $4::bigint[]) WITH ORDINALITY AS g(record_id, revision, made_at, place)
CROSS JOIN LATERAL (
    SELECT m.kind, m.order_key, m.data, m.text FROM delivery_message m
    WHERE m.delivery_id = $1 AND m.record_id = g.record_id
      AND CASE m.kind WHEN 'row' THEN m.state = 'sent' OR m.in_doubt OR m.under_way
                      ELSE m.state IN ('waiting', 'sent', 'dead') END
    ORDER BY m.message_id DESC LIMIT 1) l
WHERE l.kind = 'row'
ORDER BY g.place
ON CONFLICT (delivery_id, record_id, revision, made_at, kind) DO NOTHING
RETURNING message_id, record_id, revision, made_at, kind, order_key, data, text, row_at, tries, 0::float8 AS wait_seconds

-- name: record_outcomes
-- How tries ended. Only a try that had begun can end, so a repeated report changes nothing. `refuses`: the receiver
-- wants no more, and nobody has resumed the delivery since the try began. One whose address can't be used wasn't tried.
UPDATE delivery_message m
SET under_way = false, tries = m.tries + (o.result <> 'blocked')::int, last_status = o.status, last_error = o.error,
    state = CASE o.result WHEN 'sent' THEN 'sent' WHEN 'dead' THEN 'dead' ELSE 'waiting' END,
    in_doubt = m.in_doubt OR o.in_doubt,
    next_try_at = tl_now() + make_interval(secs => o.delay),
    finished_at = CASE WHEN o.result IN ('sent', 'dead') THEN tl_now() END
FROM unnest($2::bigint[], $3::text[], $4::bool[], $5::int[], $6::text[], $7::float8[])
     AS o(message_id, result, in_doubt, status, error, delay), delivery d
WHERE m.message_id = o.message_id AND m.delivery_id = $1 AND m.under_way AND m.state = 'waiting'
  AND d.delivery_id = m.delivery_id
RETURNING m.message_id, m.record_id, m.kind, o.result, m.last_error AS error,
          o.result = 'gone' AND m.began_at > coalesce(d.resumed_at, '-infinity') AS refuses

-- name: drop_overtaken
-- Rows that wait for another try, or were given up, although their record was retracted since.
UPDATE delivery_message m
SET state = 'dropped', finished_at = tl_now(),
    last_error = CASE WHEN m.in_doubt THEN 'it was retracted after tries of which one may have arrived'
                      ELSE 'it was retracted before it was sent' END
WHERE m.delivery_id = $1 AND m.message_id = ANY($2::bigint[]) AND m.kind = 'row' AND m.state IN ('waiting', 'dead')
  AND EXISTS (SELECT FROM delivery_message l
              WHERE l.delivery_id = $1 AND l.record_id = m.record_id AND l.message_id > m.message_id
                AND l.kind = 'retracted' AND l.state = 'waiting')
RETURNING m.message_id, m.record_id

-- name: drop_pointless
-- Retractions of records of which no receiver has anything after all.
UPDATE delivery_message l
SET state = 'dropped', finished_at = tl_now(), last_error = 'what it retracts was never sent'
WHERE l.delivery_id = $1 AND l.record_id = ANY($2::text[]) AND l.kind = 'retracted' AND l.state = 'waiting'
  AND NOT l.under_way AND NOT l.in_doubt
  AND NOT EXISTS (
      SELECT FROM delivery_message m
      WHERE m.delivery_id = $1 AND m.record_id = l.record_id AND m.kind = 'row' AND m.message_id < l.message_id
        AND (m.state = 'sent' OR m.in_doubt OR m.under_way)
        AND m.message_id > coalesce((SELECT max(s.message_id) FROM delivery_message s
                                     WHERE s.delivery_id = $1 AND s.record_id = l.record_id
                                       AND s.kind = 'retracted' AND s.state = 'sent'), 0))
RETURNING l.message_id

-- name: start_tries
-- Tries that are about to begin: from here on the receiver may have the message.
UPDATE delivery_message SET under_way = true, began_at = tl_now()
WHERE delivery_id = $1 AND message_id = ANY($2::bigint[]) AND state = 'waiting'
RETURNING message_id

-- name: note_resume
-- Refusals of tries that began before now don't count any more, and what waits for another try needn't wait for it.
WITH resumed AS (
    UPDATE delivery SET resumed_at = tl_now(), failing_since = NULL WHERE delivery_id = $1 RETURNING delivery_id)
UPDATE delivery_message m SET next_try_at = tl_now()
FROM resumed r WHERE m.delivery_id = r.delivery_id AND m.state = 'waiting' AND m.next_try_at > tl_now()

-- name: count_outcomes
-- The delivery's counts, and since when it fails.
UPDATE delivery
SET sent = sent + $2, retracted = retracted + $3,
    last_sent_at = CASE WHEN $2 + $3 > 0 THEN tl_now() ELSE last_sent_at END,
    failing_since = CASE WHEN $2 + $3 > 0 THEN NULL WHEN $4::text IS NULL THEN failing_since
                         ELSE coalesce(failing_since, tl_now()) END,
    last_error = coalesce($4::text, last_error),
    last_error_at = CASE WHEN $4::text IS NULL THEN last_error_at ELSE tl_now() END
WHERE delivery_id = $1

-- name: note_error
-- What made a row a dead letter before it was tried. The delivery itself doesn't fail.
UPDATE delivery SET last_error = $2, last_error_at = tl_now() WHERE delivery_id = $1

-- name: note_failures
-- Attempts that failed: nothing is sent until one doesn't.
UPDATE delivery d
SET failing_since = coalesce(d.failing_since, tl_now()), last_error = f.error, last_error_at = tl_now()
FROM unnest($1::uuid[], $2::text[]) AS f(job_id, error)
WHERE d.job_id = f.job_id AND d.active

-- name: note_ready
-- Nothing stands in the way of a delivery any more: it fails only while messages wait whose tries failed.
-- Dead letters are shown by themselves.
UPDATE delivery d SET failing_since = NULL
WHERE d.delivery_id = $1
  AND NOT EXISTS (SELECT FROM delivery_message m
                  WHERE m.delivery_id = d.delivery_id AND m.state = 'waiting' AND m.tries > 0)

-- name: finality
-- The last final block of the chains behind each producer of a dataset: the lowest of those that its job reads of,
-- however far upstream; and the highest of their heads, where every follower has reported one. Of a job that was removed,
-- its last generation counts.
WITH RECURSIVE producers AS (
    SELECT DISTINCT ON (w.dag_name, w.job_name) w.dag_name || '/' || w.job_name AS producer, j.job_id
    FROM delivery v JOIN buffer_writer w USING (dataset_uuid)
    JOIN job j ON j.dag_name = w.dag_name AND j.name = w.job_name
    WHERE v.delivery_id = $1
    ORDER BY w.dag_name, w.job_name, j.active DESC, j.created_at DESC),
upstream AS (
    SELECT producer, job_id FROM producers
    UNION
    SELECT u.producer, p.job_id
    FROM upstream u JOIN job_input ji ON ji.job_id = u.job_id
    JOIN dataset_version p ON p.dataset_version = ji.dataset_version
    WHERE p.job_id IS NOT NULL)
SELECT producer, min(finalized) AS finalized, CASE WHEN bool_and(head IS NOT NULL) THEN max(head) END AS head
FROM (
    SELECT u.producer, j.job_id, coalesce(max(dc.finalized), -1) AS finalized, min(r.head) AS head
    FROM upstream u JOIN job j ON j.job_id = u.job_id AND j.operator = $2
    JOIN dataset_version dv ON dv.job_id = j.job_id
    LEFT JOIN dataset_cursor dc ON dc.dataset_version = dv.dataset_version
    LEFT JOIN LATERAL (
        SELECT CASE WHEN jsonb_typeof(a.progress->'head') = 'number'
                    THEN least((a.progress->>'head')::numeric, 1e18)::bigint END AS head
        FROM task t JOIN attempt a ON a.task_id = t.task_id AND a.attempt = t.attempt
        WHERE t.job_id = ANY(ARRAY[j.job_id]) AND t.status <> 'Canceled'
        ORDER BY t.job_id, t.seq DESC LIMIT 1) r ON true
    GROUP BY u.producer, j.job_id) f
GROUP BY producer

-- name: overview
-- Every delivery that is active or has dead letters, with what waits, and why the newest of its dead letters is one.
-- Those without data are rows that were too large to become a message.
SELECT v.delivery_id, v.dag_name, v.name, coalesce(d.published_name, v.spec->>'dataset') AS dataset, v.spec, v.active,
       v.job_id, v.sent, v.retracted, v.failing_since, v.last_error, v.last_error_at, v.last_sent_at,
       greatest(0, coalesce(dc.cursor, 0) - least(v.position, f.position)) AS behind, f.waits_for,
       t.task_id, t.status AS task_status,
       (SELECT coalesce(array_agg(p.cause ORDER BY p.since, p.cause), '{}') FROM job_pause p
        WHERE p.job_id = v.job_id) AS paused_by, w.waiting, w.oldest_seconds,
       l.dead, l.replayable, l.too_large,
       n.message_id AS newest_dead, n.last_error AS dead_error, n.finished_at AS dead_at
FROM delivery v JOIN dataset d USING (dataset_uuid)
LEFT JOIN dataset_version dv ON dv.dataset_uuid = v.dataset_uuid AND dv.is_current
LEFT JOIN dataset_cursor dc ON dc.dataset_version = dv.dataset_version
LEFT JOIN task t ON t.job_id = v.job_id AND t.kind = 'source'
CROSS JOIN LATERAL (
    SELECT count(*) AS waiting, extract(epoch FROM tl_now() - min(m.created_at))::float8 AS oldest_seconds
    FROM delivery_message m WHERE m.delivery_id = v.delivery_id AND m.state = 'waiting') w
CROSS JOIN LATERAL (
    SELECT min(d.position) AS position,
           coalesce(jsonb_agg(jsonb_build_object('producer', d.producer, 'block', d.block, 'since', d.since)
                              ORDER BY d.since, d.producer) FILTER (WHERE d.block IS NOT NULL), '[]') AS waits_for
    FROM delivery_wait d WHERE d.delivery_id = v.delivery_id) f
CROSS JOIN LATERAL (
    SELECT count(*) AS dead, count(*) FILTER (WHERE m.data <> '') AS replayable,
           coalesce((array_agg(m.message_id ORDER BY m.message_id) FILTER (WHERE m.data = ''))[:10], '{}') AS too_large
    FROM delivery_message m WHERE m.delivery_id = v.delivery_id AND m.state = 'dead') l
LEFT JOIN LATERAL (
    SELECT m.message_id, m.last_error, m.finished_at
    FROM delivery_message m WHERE m.delivery_id = v.delivery_id AND m.state = 'dead'
    ORDER BY m.finished_at DESC, m.message_id DESC LIMIT 1) n ON true
WHERE v.org_id = $1 AND ($2::text IS NULL OR (v.dag_name = $2 AND v.name = $3))
  AND (v.active OR EXISTS (SELECT FROM delivery_message m WHERE m.delivery_id = v.delivery_id AND m.state = 'dead'))
ORDER BY v.dag_name, v.name, v.active DESC, v.created_at DESC

-- name: find_messages
-- Of these messages those that the delivery has, and which of them are dead letters that can't be sent.
SELECT message_id, state = 'dead' AS is_dead, data = '' AS too_large
FROM delivery_message WHERE delivery_id = $1 AND message_id = ANY($2::bigint[])

-- name: drop_dead
-- Dead letters that a person gives up for good. One that may have arrived is still retracted with its row.
WITH found AS (
    SELECT message_id FROM delivery_message
    WHERE delivery_id = $1 AND state = 'dead' AND ($2::bigint[] IS NULL OR message_id = ANY($2::bigint[]))
    ORDER BY message_id FOR UPDATE)
UPDATE delivery_message m
SET state = 'dropped', finished_at = tl_now(), last_error = concat_ws(': ', 'a person dropped it', m.last_error)
FROM found WHERE m.message_id = found.message_id
RETURNING m.message_id

-- name: messages
-- The newest messages of a delivery, of one state or all.
SELECT message_id, record_id, revision, kind, state, tries, last_status, last_error, created_at, next_try_at, finished_at
FROM delivery_message WHERE delivery_id = $1 AND ($2::text IS NULL OR state = $2)
ORDER BY message_id DESC LIMIT $3

-- name: replay
-- Dead letters wait again, with all their tries. A row that couldn't become a message stays dead, and so does a letter
-- of whose record there is a newer message.
WITH found AS (
    SELECT message_id FROM delivery_message
    WHERE delivery_id = $1 AND state = 'dead' AND data <> '' AND ($2::bigint[] IS NULL OR message_id = ANY($2::bigint[]))
    ORDER BY message_id FOR UPDATE)
UPDATE delivery_message m
SET state = 'waiting', tries = 0, handed = false, next_try_at = tl_now(), finished_at = NULL
FROM found WHERE m.message_id = found.message_id
RETURNING m.message_id

-- name: not_replayed
-- Of the messages of these ids, or else of all dead letters, those that aren't to be sent again, and why.
SELECT message_id, state, last_error FROM delivery_message
WHERE delivery_id = $1 AND (message_id = ANY($2::bigint[]) OR ($2::bigint[] IS NULL AND state = 'dead'))
ORDER BY message_id LIMIT $3

-- name: lock
-- What every call of a delivery process locks first, for those of people.
SELECT delivery_id FROM delivery WHERE delivery_id = $1 FOR NO KEY UPDATE

-- name: collect
-- Messages that ended long ago, a portion at a time. Those of removed deliveries too; their counts stay. Dead letters
-- haven't ended: they wait for a person.
DELETE FROM delivery_message WHERE message_id IN (
    SELECT message_id FROM delivery_message
    WHERE finished_at < tl_now() - make_interval(days => $1) AND state <> 'dead'
    ORDER BY finished_at LIMIT $2)
RETURNING message_id
