-- The clock of the queue, STABLE so that indexes serve, and one function so that a simulation can replace it.
CREATE FUNCTION tracelake_queue.clock() RETURNS timestamptz
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN statement_timestamp();

-- json, not jsonb: a body is handed back as it came and never looked into here.
CREATE TABLE tracelake_queue.messages (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    enqueued_at   timestamptz NOT NULL,
    visible_at    timestamptz NOT NULL,
    receipt       uuid,
    receive_count integer NOT NULL DEFAULT 0,
    queue         text NOT NULL,
    body          json NOT NULL
) WITH (
    fillfactor = 80,
    -- Every message leaves two or three dead tuples behind: vacuum by count, not by share of the table,
    -- without pauses, and always through the indexes, whose dead entries are what a receive would walk.
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = -1,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_threshold = 10000,
    autovacuum_analyze_scale_factor = 0,
    vacuum_index_cleanup = on,
    -- Truncation takes an exclusive lock for space that the next burst needs again.
    vacuum_truncate = false,
    toast.autovacuum_vacuum_threshold = 2000,
    toast.autovacuum_vacuum_scale_factor = 0,
    toast.autovacuum_vacuum_cost_delay = 0,
    toast.vacuum_truncate = false
);

-- A message in flight sorts behind everything visible, so a receive reads only what it takes.
CREATE INDEX messages_due ON tracelake_queue.messages (queue, visible_at, id);

CREATE TABLE tracelake_queue.dead_letters (
    id            bigint PRIMARY KEY,
    enqueued_at   timestamptz NOT NULL,
    dead_at       timestamptz NOT NULL,
    receive_count integer NOT NULL,
    queue         text NOT NULL,
    reason        text NOT NULL,
    body          json NOT NULL
);

CREATE INDEX dead_letters_of_queue ON tracelake_queue.dead_letters (queue, id);
