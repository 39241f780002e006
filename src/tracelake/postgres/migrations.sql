-- name: ledger
-- The statements, for the schema $1: which migrations were applied, and in which form. The schema is only made where it
-- is missing, since IF NOT EXISTS asks for the right to make one even where there is nothing to make.
SELECT CASE WHEN to_regnamespace(quote_ident($1::text)) IS NULL THEN format('CREATE SCHEMA %I; ', $1::text) ELSE '' END
       || format(
    'CREATE TABLE IF NOT EXISTS %I.schema_migration (
         version int PRIMARY KEY, name text NOT NULL, sha256 text NOT NULL,
         applied_at timestamptz NOT NULL DEFAULT now()
     )', $1::text)

-- name: lock
-- The statement. One process at a time; a session that dies releases it. A table, since every role may take an advisory
-- lock; a role that may only read the table can neither take this lock nor block it.
SELECT format('LOCK TABLE %I.schema_migration IN SHARE ROW EXCLUSIVE MODE', $1::text)

-- name: applied
-- The query, in the order of application.
SELECT format('SELECT version, name, sha256 FROM %I.schema_migration ORDER BY version', $1::text)

-- name: record
-- The statement, for the migration's own transaction.
SELECT format('INSERT INTO %I.schema_migration (version, name, sha256) VALUES (%s, %L, %L)',
              $1::text, $2::int, $3::text, $4::text)
