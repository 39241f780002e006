-- name: ensure
-- The table as the dataset's schema declares it.
SELECT tracelake.ensure_buffer($1, $2::jsonb, $3::text[])

-- name: stage
-- This session's own table to load rows into.
SELECT tracelake.stage_buffer($1, $2, $3::text[])

-- name: merge
-- Staged rows, retractions and the event that follows, in the same transaction.
SELECT written, retracted, reached, outbox
FROM tracelake.merge_buffer($1, $2, $3, $4, $5, $6::bigint[], $7::text[], $8::bigint[], $9::bigint[], $10::bigint[],
                            $11::text[], $12::bigint[], $13::bigint[], $14::bigint[])

-- name: position
-- The highest position of a dataset, 0 when nothing was ever written.
SELECT coalesce((SELECT position FROM tracelake.buffer WHERE dataset_version = $1), 0)

-- name: signal_rows
-- For processes that follow the dataset: they needn't wait for their next look.
SELECT tracelake.signal_rows($1)
