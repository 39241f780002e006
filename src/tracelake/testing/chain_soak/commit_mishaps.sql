-- name: unsaid_invalidation
-- Has this task taken something back, and nobody has heard of it yet?
SELECT EXISTS (
    SELECT FROM tracelake.outbox, jsonb_array_elements(events) event
    WHERE task_id = %s AND jsonb_typeof(event -> 'invalidate') = 'object')

-- name: staging_tables
-- What this task has, or had, rows in that aren't committed.
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'staging' AND c.relkind = 'r' AND starts_with(c.relname, 'staging_' || %s)

-- name: has_rows
-- Are there any in this one now?
SELECT EXISTS (SELECT FROM {table})
