-- name: take_snapshot
-- Export a snapshot that other sessions can import while the transaction lasts.
SELECT pg_export_snapshot()

-- name: hold_snapshot
-- Maximum idle time of a transaction, in milliseconds; 0 for no limit.
SELECT set_config('idle_in_transaction_session_timeout', %s, false)

-- name: unhurried
-- Operators bound their statements by the attempt's time.
SET statement_timeout = 0

-- name: begin_reading
-- One snapshot for all statements.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY

-- name: plain_text
-- Values as `postgres_csv` reads them, independent of server settings.
SET TimeZone = 'UTC'; SET DateStyle = 'ISO, YMD'; SET extra_float_digits = 1

-- name: columns
-- A table's columns and their types; none if there is no such table.
SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum

-- name: span
-- From which to which block there are rows; both ends come from the index on the block.
SELECT min(block_number), max(block_number) FROM {table}

-- name: chain_and_highest
-- The chain that the rows of a range are of, and the highest block that there are rows of.
SELECT (SELECT chain_id FROM {table} WHERE block_number BETWEEN {start} AND {end} LIMIT 1),
       (SELECT max(block_number) FROM {table})

-- name: open_table
-- A staging table for rows of an output.
SELECT staging.open_table(%s, %s::jsonb)

-- name: open_like
-- A further staging table with the same columns.
SELECT staging.open_like(%s)

-- name: discard
-- Drop staging tables whose rows won't be committed.
SELECT staging.discard(%s::text[])

-- name: discard_output
-- Drop all staging tables of an output.
SELECT staging.discard_output(%s)
