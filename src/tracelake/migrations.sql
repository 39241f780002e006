-- name: ledger
-- What was applied, and in which form.
CREATE TABLE IF NOT EXISTS schema_migration (
    version int PRIMARY KEY, name text NOT NULL, sha256 text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)

-- name: lock
-- One process at a time; a session that dies lets go. A table, since everybody may take an advisory lock.
LOCK TABLE schema_migration IN SHARE ROW EXCLUSIVE MODE

-- name: applied
-- In the order of application.
SELECT version, name, sha256 FROM schema_migration ORDER BY version

-- name: record
-- In the migration's own transaction.
INSERT INTO schema_migration (version, name, sha256) VALUES ($1, $2, $3)
