-- Who serves which runtime: a worker says every few seconds that it is there, so that a task that waits, and the
-- metrics, can say whether anything could take it. Nothing is decided by it: claims are by lease alone.
CREATE TABLE worker (
    worker_id  text PRIMARY KEY,
    runtime    text NOT NULL,
    slots      int NOT NULL,
    started_at timestamptz NOT NULL DEFAULT tl_now(),
    seen_at    timestamptz NOT NULL DEFAULT tl_now()
);
