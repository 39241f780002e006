-- name: begin
-- The attempt's fence, for one output.
SELECT tracelake.begin_attempt($1, $2, $3, int8range($4::bigint, $5::bigint, '[]'), $6::jsonb)

-- name: commit
-- Staged rows become the dataset's, if the fence still holds; returns how many.
SELECT tracelake.commit_output(
    $1, $2, $3, $4::jsonb, $5::bigint, $6::bigint, $7::text[], $8::bigint[], $9, $10, $11::text[], $12::jsonb,
    $13
)

-- name: record_events
-- The events that follow from the commit, in the same transaction.
INSERT INTO tracelake.outbox (task_id, events, inputs) VALUES ($1, $2::jsonb, $3::jsonb)

-- name: pending_events
-- Events that the Dispatcher has not accepted yet, oldest first; those of earlier attempts too.
SELECT outbox_id, events, inputs FROM tracelake.outbox WHERE task_id = $1 ORDER BY outbox_id LIMIT 100

-- name: mark_delivered
-- Delete an entry whose event the Dispatcher has accepted.
DELETE FROM tracelake.outbox WHERE outbox_id = $1

-- name: end_blockers
-- Ends the sessions of guests that the session $1 waits for.
SELECT tracelake.end_blockers($1)
