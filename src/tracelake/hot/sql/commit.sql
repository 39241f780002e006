-- name: begin
-- The attempt's fence, for one output.
SELECT tracelake.begin_attempt($1, $2, $3, int8range($4::bigint, $5::bigint, '[]'), $6::jsonb)

-- name: commit
-- Staged rows become the dataset's, if the fence still holds; answers how many.
SELECT tracelake.commit_output(
    $1, $2, $3, $4::jsonb, $5::bigint, $6::bigint, $7::text[], $8::bigint[], $9, $10, $11::text[], $12::jsonb
)

-- name: say
-- What follows from the commit, in the same transaction.
INSERT INTO tracelake.outbox (task_id, events, inputs) VALUES ($1, $2::jsonb, $3::jsonb)

-- name: unsaid
-- What the Dispatcher has not accepted yet, oldest first; an earlier attempt's too.
SELECT outbox_id, events, inputs FROM tracelake.outbox WHERE task_id = $1 ORDER BY outbox_id LIMIT 100

-- name: said
-- Accepted: forget it.
DELETE FROM tracelake.outbox WHERE outbox_id = $1

-- name: leftover_staging
-- Staging tables of attempts that have no fence (any more) and so can't commit them, as statements that drop them.
SELECT format('DROP TABLE IF EXISTS staging.%I', t.relname)
FROM (SELECT c.relname, regexp_match(c.relname, '^staging_([0-9a-f]{32})_[^_]+_([0-9]{1,18})_') AS names
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
      WHERE n.nspname = 'staging' AND c.relkind = 'r') t
WHERE t.names IS NOT NULL AND NOT EXISTS (
    SELECT FROM tracelake.fence f WHERE f.task_id = t.names[1]::uuid AND f.epoch = t.names[2]::bigint)
LIMIT 100

-- name: wait_little
-- What an attempt that still runs is loading isn't waited for: it is swept another time.
SET LOCAL lock_timeout = '100ms'
