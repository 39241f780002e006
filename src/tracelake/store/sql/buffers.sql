-- name: schemas_of_dag
-- The schemas of all buffered datasets that a DAG has or once had: their rows are still there.
SELECT left(job_name, -length('.sink')) AS name, buffer_schema FROM dataset
WHERE dag_name = $1 AND write_mode = 'buffered' AND job_name IS NOT NULL

-- name: ensure_buffered
-- A buffered dataset keeps its identity for as long as its DAG uses the name, through removals too.
INSERT INTO dataset (dataset_uuid, org_id, dag_name, job_name, output_index, published_name, write_mode, buffer_schema,
                     schema_hash)
VALUES ($1, $2, $3, $4, 0, $5, 'buffered', $6, $7)
ON CONFLICT (dag_name, job_name, output_index) DO UPDATE
SET published_name = excluded.published_name, buffer_schema = excluded.buffer_schema, schema_hash = excluded.schema_hash
RETURNING dataset_uuid

-- name: retire_buffered
-- Buffered datasets that the DAG no longer names lose their published name; their data stays.
UPDATE dataset SET published_name = NULL
WHERE dag_name = $1 AND write_mode = 'buffered' AND published_name IS NOT NULL AND published_name <> ALL($2::text[])
RETURNING job_name

-- name: buffers_of_dag
-- The buffered datasets in the answer of a deploy.
SELECT d.published_name AS dataset, d.dataset_uuid, dv.dataset_version, d.schema_hash
FROM dataset d JOIN dataset_version dv ON dv.dataset_uuid = d.dataset_uuid AND dv.is_current
WHERE d.dag_name = $1 AND d.write_mode = 'buffered' AND d.published_name IS NOT NULL
ORDER BY d.published_name

-- name: find_published
-- A buffered dataset that is published now, by name or by uuid, and where a publishing job's revisions begin.
SELECT d.dataset_uuid, dv.dataset_version, d.dag_name, d.published_name, d.schema_hash,
       (SELECT j.revision_base FROM job j WHERE j.job_id = $4) AS revision_base
FROM dataset d JOIN dataset_version dv ON dv.dataset_uuid = d.dataset_uuid AND dv.is_current
WHERE d.write_mode = 'buffered' AND d.published_name IS NOT NULL AND d.org_id = $1
  AND d.dataset_uuid = coalesce($2::uuid, (SELECT n.dataset_uuid FROM dataset n
                                           WHERE n.org_id = $1 AND n.published_name = $3))

-- name: find
-- A buffered dataset with its schema, published or not, by name or by uuid.
SELECT d.dataset_uuid, dv.dataset_version, d.dag_name, d.published_name, d.schema_hash, d.buffer_schema
FROM dataset d JOIN dataset_version dv USING (dataset_uuid)
WHERE d.write_mode = 'buffered' AND d.org_id = $1
  AND d.dataset_uuid = coalesce($2::uuid, (SELECT n.dataset_uuid FROM dataset n
                                           WHERE n.org_id = $1 AND n.published_name = $3))

-- name: of_sink
-- The dataset that a sink's job drains.
SELECT d.dataset_uuid, dv.dataset_version, d.dag_name, d.published_name, d.schema_hash, d.buffer_schema
FROM dataset_version dv JOIN dataset d USING (dataset_uuid) WHERE dv.job_id = $1 AND d.write_mode = 'buffered'

-- name: add_messages
-- Messages for buffers' queues, committed with their cause.
INSERT INTO outbox (kind, runtime, payload, body, available_at)
SELECT 'buffer', m.queue, '{}', m.body, tl_now() FROM unnest($1::text[], $2::text[]) AS m(queue, body)
RETURNING outbox_id, runtime, available_at

-- name: add_batch
-- A publish: the message, and a record that this job writes this dataset.
WITH writer AS (
    INSERT INTO buffer_writer (dag_name, job_name, dataset_uuid) VALUES ($3, $4, $5) ON CONFLICT DO NOTHING
)
INSERT INTO outbox (kind, runtime, payload, body, available_at) VALUES ('buffer', $1, '{}', $2, tl_now())
RETURNING outbox_id, runtime, available_at

-- name: take_due_messages
-- Due messages that no other replica is delivering; see take_due of the outbox. Few at a time: each may be large.
WITH due AS (
    SELECT outbox_id FROM outbox
    WHERE failed_at IS NULL AND kind = 'buffer' AND available_at <= tl_now() - make_interval(secs => $3)
    ORDER BY available_at, outbox_id LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE outbox o SET available_at = tl_now() + make_interval(secs => $2)
FROM due WHERE o.outbox_id = due.outbox_id
RETURNING o.outbox_id, o.runtime, o.body, o.available_at

-- name: datasets_of_writers
-- The datasets that jobs have ever published to.
SELECT w.dag_name, w.job_name, w.dataset_uuid, dv.dataset_version
FROM unnest($1::text[], $2::text[]) AS j(dag_name, job_name)
JOIN buffer_writer w USING (dag_name, job_name)
JOIN dataset_version dv ON dv.dataset_uuid = w.dataset_uuid
ORDER BY w.dag_name, w.job_name, w.dataset_uuid

-- name: revision_bases
-- Where the revisions of jobs begin.
SELECT job_id, revision_base FROM job WHERE job_id = ANY($1::uuid[])

-- name: writers
-- The producers of a dataset.
SELECT dag_name || '/' || job_name AS producer FROM buffer_writer WHERE dataset_uuid = $1 ORDER BY 1

-- name: add_dead_letter
-- A message that the sink gave up; the same one again is the same dead letter.
INSERT INTO dead_letter AS l (org_id, dataset_uuid, batch_id, message, kind, producer, row_count, reason, tries, task_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
ON CONFLICT (batch_id) DO UPDATE SET reason = excluded.reason, tries = greatest(l.tries, excluded.tries)
RETURNING dead_letter_id

-- name: list_dead_letters
-- The dead letters of a dataset, oldest first.
SELECT l.dead_letter_id, l.dataset_uuid, d.published_name AS dataset, l.batch_id, l.reason, l.tries, l.kind, l.producer,
       l.row_count, l.created_at
FROM dead_letter l JOIN dataset d USING (dataset_uuid)
WHERE l.dataset_uuid = $1 AND l.dead_letter_id > $2 ORDER BY l.dead_letter_id LIMIT $3

-- name: dead_letter
-- One dead letter with its message.
SELECT l.dead_letter_id, l.dataset_uuid, d.published_name AS dataset, l.batch_id, l.reason, l.tries, l.kind, l.producer,
       l.row_count, l.created_at, l.message
FROM dead_letter l JOIN dataset d USING (dataset_uuid) WHERE l.org_id = $1 AND l.dead_letter_id = $2

-- name: exhume
-- Dead letters that leave, some of them or all; in portions, since each may be large. None beyond the last one that
-- there was at first: one that is sent again may come back meanwhile.
DELETE FROM dead_letter WHERE dead_letter_id IN (
    SELECT l.dead_letter_id FROM dead_letter l
    WHERE l.dataset_uuid = $1 AND ($2::bigint[] IS NULL OR l.dead_letter_id = ANY($2::bigint[]))
      AND l.dead_letter_id <= $4
    ORDER BY l.dead_letter_id LIMIT $3 FOR UPDATE)
RETURNING dead_letter_id, message

-- name: last_dead_letter
-- The newest dead letter of a dataset.
SELECT coalesce(max(dead_letter_id), 0) AS last FROM dead_letter WHERE dataset_uuid = $1

-- name: overview
-- Every buffered dataset that is published or has anything left: its sink's task, its dead letters, and its
-- messages that are still in the outbox.
SELECT d.published_name AS dataset, left(d.job_name, -length('.sink')) AS name, d.dataset_uuid, d.dag_name,
       d.schema_hash, t.task_id AS sink_task_id, t.status AS sink_status, dc.cursor,
       (SELECT count(*) FROM dead_letter l WHERE l.dataset_uuid = d.dataset_uuid) AS dead_letters,
       (SELECT count(*) FROM outbox o
        WHERE o.kind = 'buffer' AND o.failed_at IS NULL
          AND o.runtime = 'buffer-' || replace(d.dataset_uuid::text, '-', '')) AS undelivered
FROM dataset d JOIN dataset_version dv USING (dataset_uuid)
LEFT JOIN task t ON t.job_id = dv.job_id AND t.kind = 'source'
LEFT JOIN dataset_cursor dc ON dc.dataset_version = dv.dataset_version
WHERE d.org_id = $1 AND d.write_mode = 'buffered' AND ($2::uuid IS NULL OR d.dataset_uuid = $2)
ORDER BY d.published_name NULLS LAST, d.dataset_uuid
