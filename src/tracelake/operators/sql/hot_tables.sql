-- name: take_snapshot
-- What was committed at this moment, for as long as the transaction lasts and for all who know its name.
SELECT pg_export_snapshot()

-- name: hold_snapshot
-- How long a transaction may do nothing, in milliseconds; 0 for ever.
SELECT set_config('idle_in_transaction_session_timeout', %s, false)

-- name: unhurried
-- Operators bound their statements by the attempt's time.
SET statement_timeout = 0

-- name: begin_reading
-- All statements see the same.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY

-- name: plain_text
-- Values as `postgres_csv` reads them, whatever this server's habits are.
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
-- A further one with the same columns.
SELECT staging.open_like(%s)

-- name: discard
-- Staging tables whose rows nobody is going to commit.
SELECT staging.discard(%s::text[])

-- name: discard_output
-- All of an output's.
SELECT staging.discard_output(%s)
