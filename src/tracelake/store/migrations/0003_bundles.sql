-- Functions: the bundles that people push, and the invokers that run them.

-- The zip itself lies in the object store under its hash and is written before its row, so a row always has its
-- file. `names` and `executables` are what a deploy checks entrypoints against without opening the file.
CREATE TABLE bundle (
    sha256         text PRIMARY KEY CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    seq            bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    org_id         uuid NOT NULL REFERENCES org,
    bytes          bigint NOT NULL,
    unpacked_bytes bigint NOT NULL,
    names          text[] NOT NULL,
    executables    text[] NOT NULL,
    pushed_by      text NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT tl_now()
);

-- Where functions are run. An invoker says every few seconds that it is there; any replica asks any of them.
CREATE TABLE invoker (
    url         text PRIMARY KEY,
    concurrency int NOT NULL,
    seen_at     timestamptz NOT NULL DEFAULT tl_now()
);

-- Wake-ups whose delivery failed and is tried again: the re-wake sweep leaves their tasks alone, and a task that
-- waits shows the error. Entries that go through at once, which is nearly all, never enter this index.
CREATE INDEX outbox_held ON outbox (task_id) WHERE failed_at IS NULL AND tries > 0;
