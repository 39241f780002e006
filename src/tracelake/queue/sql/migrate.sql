-- name: lock
-- One installer at a time. The role of the queue may read this table, which isn't enough to take, or to hold up, this
-- lock; everybody may take an advisory one.
LOCK TABLE tracelake_queue.schema_version IN SHARE ROW EXCLUSIVE MODE;

-- name: bootstrap
-- Where the versions are kept, before there is a version.
CREATE SCHEMA IF NOT EXISTS tracelake_queue;
CREATE TABLE IF NOT EXISTS tracelake_queue.schema_version (
    version    integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- name: version
-- 0 is a database without a queue.
SELECT coalesce(max(version), 0) FROM tracelake_queue.schema_version;

-- name: record
-- In the transaction of the step itself.
INSERT INTO tracelake_queue.schema_version (version) VALUES ($1::int);
