-- name: record
-- Add the row of one query.
INSERT INTO catalog.query_audit (query_id, org_id, caller, user_id, task_id, attempt, datasets, sql_sha256, outcome,
                                 reason, rows, bytes_scanned, duration_ms, exported_to)
VALUES ($1, $2, $3, $4, $5, $6, $7::text::jsonb, $8, $9, $10, $11, $12, $13, $14)

-- name: check
-- Whether a row could be added now. A standby can't take one.
SELECT has_table_privilege('catalog.query_audit', 'INSERT') AND NOT pg_is_in_recovery() AS writable
