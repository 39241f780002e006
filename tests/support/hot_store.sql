-- name: open_table
-- A staging table of these columns.
SELECT staging.open_table(0, $1::jsonb)

-- name: read_table
-- The statement that reads a dataset version's table; null while there is none.
SELECT format('SELECT block_number, value FROM %s ORDER BY 1, 2', found)
FROM to_regclass('data.' || tracelake.table_of($1)) AS found WHERE found IS NOT NULL

-- name: staging_tables
-- Those of all attempts.
SELECT tablename FROM pg_tables WHERE schemaname = 'staging' ORDER BY 1
