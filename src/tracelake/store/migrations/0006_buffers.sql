-- Buffered datasets: a job of the platform's own drains each one into its table.

-- `schema_hash` names the schema that a publish was checked against; it changes with `buffer_schema`, in one statement.
ALTER TABLE dataset ADD COLUMN schema_hash text;

-- Where the revisions of what a generation publishes begin: above all that earlier ones of the same name have used.
ALTER TABLE job ADD COLUMN revision_base bigint NOT NULL DEFAULT 0;

-- What waits for a buffer's queue: the message itself, ready to be published. It is written once and read once, so
-- compressing it would cost more than it saves.
ALTER TABLE outbox ADD COLUMN body text;
ALTER TABLE outbox ALTER COLUMN body SET STORAGE EXTERNAL;

-- Batches are delivered apart from wake-ups, so that neither waits behind a backlog of the other.
DROP INDEX outbox_due;
CREATE INDEX outbox_due ON outbox (available_at, outbox_id) WHERE failed_at IS NULL AND kind <> 'buffer';
CREATE INDEX outbox_due_buffer ON outbox (available_at, outbox_id) WHERE failed_at IS NULL AND kind = 'buffer';

-- Which jobs have ever published to a dataset: whom a retraction concerns. By name, since rows know their producer
-- by name, whatever generation of the job wrote them.
CREATE TABLE buffer_writer (
    dag_name     text NOT NULL,
    job_name     text NOT NULL,
    dataset_uuid uuid NOT NULL,
    since        timestamptz NOT NULL DEFAULT tl_now(),
    PRIMARY KEY (dag_name, job_name, dataset_uuid)
);
CREATE INDEX buffer_writer_dataset ON buffer_writer (dataset_uuid);

-- Updates that began and were given up may have published what they read: a reorg finds them by how far that was.
CREATE FUNCTION read_upto(inputs jsonb) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT max((i->>'upto')::bigint) FROM jsonb_array_elements(inputs) AS i
$$;
CREATE INDEX task_cursor_given_up ON task (job_id, read_upto(inputs))
    WHERE kind = 'cursor' AND status IN ('Failed', 'Canceled') AND attempt > 0;

-- Messages that the sink gave up, whole, with the reason. `batch_id` is the message's own.
CREATE TABLE dead_letter (
    dead_letter_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    org_id         uuid NOT NULL,
    dataset_uuid   uuid NOT NULL,
    batch_id       uuid NOT NULL UNIQUE,
    message        text NOT NULL,
    kind           text NOT NULL,
    producer       text NOT NULL,
    row_count      bigint,
    reason         text NOT NULL,
    tries          bigint NOT NULL,
    task_id        uuid NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT tl_now()
);
CREATE INDEX dead_letter_dataset ON dead_letter (dataset_uuid, dead_letter_id);

-- Datasets that were declared before there was a sink get what a deploy gives them now: a name for their job, the
-- job with its task, and the hash of their schema.
UPDATE dataset d
SET job_name = dv.output_name || '.sink', output_index = 0,
    buffer_schema = jsonb_build_object('columns', d.buffer_schema->'columns', 'unique', d.buffer_schema->'unique'),
    schema_hash = 'sha256:' || encode(sha256(convert_to(
        '{"columns":{'
        || (SELECT string_agg(to_json(c->>'name')::text || ':' || to_json(c->>'type')::text, ','
                              ORDER BY c->>'name' COLLATE "C")
            FROM jsonb_array_elements(d.buffer_schema->'columns') AS c)
        || '},"unique":['
        || (SELECT string_agg(to_json(u)::text, ',' ORDER BY u COLLATE "C")
            FROM jsonb_array_elements_text(d.buffer_schema->'unique') AS u)
        || ']}', 'UTF8')), 'hex')
FROM dataset_version dv
WHERE d.write_mode = 'buffered' AND dv.dataset_uuid = d.dataset_uuid
  AND NOT EXISTS (SELECT 1 FROM dataset newer
                  WHERE newer.dag_name = d.dag_name AND newer.write_mode = 'buffered'
                    AND newer.dataset_uuid <> d.dataset_uuid
                    AND (SELECT max(n.output_name) FROM dataset_version n WHERE n.dataset_uuid = newer.dataset_uuid)
                        = dv.output_name
                    AND (newer.created_at, newer.dataset_uuid) > (d.created_at, d.dataset_uuid));

INSERT INTO job (job_id, org_id, dag_name, name, fingerprint, active, activation, source_kind, operator, config,
                 update_strategy, unique_key, secrets, trigger_count, runtime, max_attempts, timeout_seconds,
                 heartbeat_timeout_seconds, priority, retry_base_seconds, retry_max_seconds)
SELECT gen_random_uuid(), d.org_id, d.dag_name, d.job_name, 'buffer_sink', d.published_name IS NOT NULL, 'source',
       'always_on', 'buffer_sink', '{}', 'append',
       ARRAY(SELECT jsonb_array_elements_text(d.buffer_schema->'unique')), '{}', 0, 'sink', 3, 600, 30, 'normal', 1, 60
FROM dataset d WHERE d.write_mode = 'buffered' AND d.job_name IS NOT NULL;

UPDATE dataset_version dv SET job_id = j.job_id, output_index = 0, is_current = j.active
FROM dataset d JOIN job j ON j.dag_name = d.dag_name AND j.name = d.job_name AND j.operator = 'buffer_sink'
WHERE dv.dataset_uuid = d.dataset_uuid AND d.write_mode = 'buffered';

INSERT INTO task (task_id, org_id, job_id, kind, status, cause)
SELECT gen_random_uuid(), j.org_id, j.job_id, 'source', 'Queued', '{"kind": "deploy"}'
FROM job j WHERE j.operator = 'buffer_sink' AND j.active;
