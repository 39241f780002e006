-- name: begin
-- Take the snapshot that the whole query reads. The query's time limits every statement and every pause between two;
-- the wait for a table whose shape is being changed is short.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
SET LOCAL statement_timeout = {limit};
SET LOCAL idle_in_transaction_session_timeout = {limit};
SET LOCAL lock_timeout = '2s';
SELECT pg_current_snapshot()

-- name: end
-- End the snapshot; a read-only transaction has nothing to commit.
ROLLBACK
