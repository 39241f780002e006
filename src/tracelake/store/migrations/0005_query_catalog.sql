-- What the Query Service sees of the state, and what it leaves there. Its roles get these views and this table and
-- nothing else (store/query_roles.py). Views read as their owner; functions in them would not, so there are none of
-- ours in them.
CREATE SCHEMA catalog;

-- Every version that there ever was: tasks are pinned to theirs. `hot_version` is hot_counterpart() spelt out.
CREATE VIEW catalog.dataset_version AS
SELECT d.org_id, d.published_name AS dataset, d.dataset_uuid, dv.dataset_version, dv.is_current, dv.revision,
       dv.storage, dv.output_name, j.operator, d.write_mode = 'buffered' AS buffered, d.buffer_schema,
       dc.cursor, dc.finalized, hot.dataset_version AS hot_version
FROM public.dataset_version dv
JOIN public.dataset d ON d.dataset_uuid = dv.dataset_uuid
LEFT JOIN public.job j ON j.job_id = dv.job_id
LEFT JOIN public.dataset_cursor dc ON dc.dataset_version = dv.dataset_version
LEFT JOIN LATERAL (
    SELECT ji.dataset_version, row_number() OVER (ORDER BY ji.input_index) - 1 AS place
    FROM public.job_input ji JOIN public.dataset_version hv ON hv.dataset_version = ji.dataset_version
    WHERE ji.job_id = dv.job_id AND hv.storage = 'postgres') hot
  ON j.operator = 'parquet_compact' AND hot.place = dv.output_index;

-- The committed ranges of a version, and the files behind each: a list of {location, rows, bytes, min_block, max_block}.
CREATE VIEW catalog.partition AS
SELECT dataset_version, range_start, range_end, revision, row_count, committed_at,
       manifest ->> 'schema_hash' AS schema_hash, coalesce(manifest -> 'files', '[]') AS files
FROM public.partition WHERE current AND stored;

-- The same, a row for each file.
CREATE VIEW catalog.file AS
SELECT p.dataset_version, p.range_start, p.range_end, f.position, p.schema_hash, f.file ->> 'location' AS location,
       (f.file ->> 'rows')::bigint AS rows, (f.file ->> 'bytes')::bigint AS bytes,
       (f.file ->> 'min_block')::bigint AS min_block, (f.file ->> 'max_block')::bigint AS max_block
FROM catalog.partition p CROSS JOIN LATERAL jsonb_array_elements(p.files) WITH ORDINALITY AS f(file, position);

-- Which attempt of a task is the current one, and whether it may still act.
CREATE VIEW catalog.task AS SELECT task_id, org_id, attempt, status, last_outcome FROM public.task;

-- Whose a token is; one that was revoked is nobody's.
CREATE VIEW catalog.user_token WITH (security_barrier) AS
SELECT t.token_hash, u.user_id, u.org_id, u.name
FROM public.user_token t JOIN public.app_user u ON u.user_id = t.user_id WHERE t.revoked_at IS NULL;

-- One row for each query, written before it is answered. Of the statement only its hash: the text, and the values in
-- it, belong to whoever asked.
CREATE TABLE catalog.query_audit (
    query_id      uuid PRIMARY KEY,
    at            timestamptz NOT NULL DEFAULT statement_timestamp(),
    org_id        uuid NOT NULL,
    caller        text NOT NULL CHECK (caller IN ('user', 'task')),
    user_id       uuid,
    task_id       uuid,
    attempt       int,
    datasets      jsonb NOT NULL,
    sql_sha256    bytea NOT NULL CHECK (octet_length(sql_sha256) = 32),
    outcome       text NOT NULL CHECK (outcome IN ('completed', 'refused', 'failed', 'timeout', 'canceled')),
    reason        text,
    rows          bigint NOT NULL,
    bytes_scanned bigint NOT NULL,
    duration_ms   bigint NOT NULL,
    exported_to   text,
    CHECK ((caller = 'user') = (user_id IS NOT NULL)),
    CHECK ((caller = 'task') = (task_id IS NOT NULL AND attempt IS NOT NULL))
);
CREATE INDEX query_audit_at ON catalog.query_audit (at);
CREATE INDEX query_audit_task ON catalog.query_audit (task_id, attempt) WHERE task_id IS NOT NULL;
