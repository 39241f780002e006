-- name: begin
-- What was committed at this moment is what the whole query reads; no statement, and no pause between two, takes longer
-- than the query may. A table that somebody is changing the shape of isn't waited for.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
SET LOCAL statement_timeout = {limit};
SET LOCAL idle_in_transaction_session_timeout = {limit};
SET LOCAL lock_timeout = '2s';
SELECT pg_current_snapshot()

-- name: end
-- There is nothing to keep.
ROLLBACK
