-- name: fsync
-- Does the server wait for its disk?
SHOW fsync

-- name: synchronous_commit
-- Does a commit?
SHOW synchronous_commit

-- name: table
-- Apart from the Dispatcher's own tables.
CREATE TABLE IF NOT EXISTS bench_commit (n bigint NOT NULL)

-- name: insert
-- One row, one commit.
INSERT INTO bench_commit (n) VALUES ($1)

-- name: drop
-- Leaves nothing behind.
DROP TABLE bench_commit
