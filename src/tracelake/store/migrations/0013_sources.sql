-- Sources that are activated from outside: by a schedule, by a webhook, by hand.

-- How a source is activated (domain/dag/model.py), and whether it runs code: then each of its requests is a task.
ALTER TABLE job ADD COLUMN source jsonb;
ALTER TABLE job ADD COLUMN runs_code boolean NOT NULL DEFAULT false;

-- A source through all generations of its job. Its row is the lock that makes its requests one after the other.
-- `last_tick` never goes back, so no tick is made twice, whatever the clock does; ticks up to `since`, the deploy
-- of this schedule, aren't due. `last_number` counts deliveries and triggers. `allowance` is what the rate limit
-- leaves, as of `allowed_at`.
CREATE TABLE source (
    dag_name    text NOT NULL,
    job_name    text NOT NULL,
    org_id      uuid NOT NULL REFERENCES org,
    active      boolean NOT NULL,
    schedule    text,
    since       timestamptz NOT NULL DEFAULT tl_now(),
    last_tick   bigint,
    last_number bigint NOT NULL DEFAULT 0,
    last_at     timestamptz,
    allowance   double precision,
    allowed_at  timestamptz,
    PRIMARY KEY (dag_name, job_name)
);

-- Accepted ticks, deliveries and triggers. One that is not routed yet waits for its source to be released, or for
-- the next generation of its job. It belongs to the source and not to a generation: a redeploy loses none.
-- `delivery_id` is the sender's; one that was accepted once is never accepted again. A small body is kept here, a
-- larger one in the object store.
CREATE TABLE source_request (
    request_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    org_id        uuid NOT NULL,
    dag_name      text NOT NULL,
    job_name      text NOT NULL,
    kind          text NOT NULL CHECK (kind IN ('cron', 'webhook', 'manual')),
    number        bigint NOT NULL,
    scope         jsonb,
    delivery_id   text,
    content_type  text,
    body          bytea,
    body_location text,
    body_bytes    int,
    accepted_at   timestamptz NOT NULL DEFAULT tl_now(),
    routed_at     timestamptz
);
-- Bodies are read once and mostly small; compressing them would cost more than it saves.
ALTER TABLE source_request ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX source_request_number ON source_request (dag_name, job_name, kind, number);
CREATE UNIQUE INDEX source_request_delivery ON source_request (dag_name, job_name, delivery_id)
    WHERE delivery_id IS NOT NULL;
CREATE INDEX source_request_waiting ON source_request (dag_name, job_name, request_id) WHERE routed_at IS NULL;

-- The task of a request: one per generation of the job.
ALTER TABLE task ADD COLUMN request_id bigint;
ALTER TABLE task DROP CONSTRAINT task_kind_check;
ALTER TABLE task ADD CONSTRAINT task_kind_check CHECK (kind IN ('partition', 'cursor', 'source', 'request'));
ALTER TABLE task ADD CHECK ((kind = 'request') = (request_id IS NOT NULL));
CREATE UNIQUE INDEX task_request ON task (job_id, request_id) WHERE kind = 'request';

-- Which scheduler acts; the others wait until it is late. One row.
CREATE TABLE scheduler_lease (
    only_one   boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    holder     text NOT NULL,
    expires_at timestamptz NOT NULL
);

-- What callers of webhooks sign with. The latest one is shown, once; the ones before it are accepted until
-- `expires_at`. In the schema that no role but the owner may use, as the installation's other secrets.
CREATE TABLE installation.webhook_secret (
    secret_id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    dag_name   text NOT NULL,
    job_name   text NOT NULL,
    secret     text NOT NULL,
    made_at    timestamptz NOT NULL DEFAULT statement_timestamp(),
    shown_at   timestamptz,
    expires_at timestamptz
);
CREATE UNIQUE INDEX webhook_secret_current ON installation.webhook_secret (dag_name, job_name)
    WHERE expires_at IS NULL;
CREATE INDEX webhook_secret_source ON installation.webhook_secret (dag_name, job_name);

-- Manual sources that were deployed before there was this table.
INSERT INTO source (dag_name, job_name, org_id, active)
SELECT dag_name, name, org_id, true FROM job WHERE active AND source_kind = 'manual';
