-- name: pending_invalidation
-- Has this task invalidated a range, with the event still pending?
SELECT EXISTS (
    SELECT FROM tracelake.outbox, jsonb_array_elements(events) event
    WHERE task_id = %s AND jsonb_typeof(event -> 'invalidate') = 'object')

-- name: staging_tables
-- Staging tables of this task.
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'staging' AND c.relkind = 'r' AND starts_with(c.relname, 'staging_' || %s)

-- name: has_rows
-- Does this table have rows now?
SELECT EXISTS (SELECT FROM {table})
