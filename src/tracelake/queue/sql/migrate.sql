-- name: lock
-- One installer at a time; the number is the word "queue" in ASCII, and nothing else in this database locks it.
SELECT pg_advisory_xact_lock(487300887909);

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
