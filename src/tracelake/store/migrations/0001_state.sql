-- The state database: what the Dispatcher knows. Every table carries live rows behind partial indexes,
-- so that what is finished costs nothing on the hot path. Hot tables (task, attempt, partition, event, outbox)
-- have no foreign keys: their parents are never deleted, and the checks would make every transaction share a
-- lock on the same few parent rows.

-- Lease and retry times come from here and nowhere else. STABLE, so that indexes serve; a simulation
-- replaces it to own the time.
CREATE FUNCTION tl_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT statement_timestamp() $$;

-- Fences writes to the data database: ever rising, advanced after a restore from backup.
CREATE SEQUENCE epoch_seq AS bigint CACHE 1;

CREATE TABLE org (
    org_id      uuid PRIMARY KEY,
    name        text NOT NULL,
    only_one    boolean NOT NULL DEFAULT true UNIQUE CHECK (only_one),
    created_at  timestamptz NOT NULL DEFAULT tl_now()
);

CREATE TABLE app_user (
    user_id     uuid PRIMARY KEY,
    org_id      uuid NOT NULL REFERENCES org,
    name        text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT tl_now(),
    UNIQUE (org_id, name)
);

CREATE TABLE user_token (
    token_hash  bytea PRIMARY KEY,
    user_id     uuid NOT NULL REFERENCES app_user,
    label       text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT tl_now(),
    revoked_at  timestamptz
);

CREATE TABLE dag (
    name            text PRIMARY KEY,
    org_id          uuid NOT NULL REFERENCES org,
    active_version  int NOT NULL,
    deployed_at     timestamptz NOT NULL DEFAULT tl_now()
);

CREATE TABLE dag_version (
    dag_name    text NOT NULL,
    version     int NOT NULL,
    org_id      uuid NOT NULL REFERENCES org,
    yaml        text NOT NULL,
    yaml_sha256 bytea NOT NULL,
    spec        jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT tl_now(),
    created_by  text NOT NULL,
    PRIMARY KEY (dag_name, version),
    UNIQUE (dag_name, yaml_sha256)
);

-- One row per generation of a job: what it computes never changes in place (fingerprint), how it is run
-- (timeouts, priority, scaling, runtime) does.
CREATE TABLE job (
    job_id                    uuid PRIMARY KEY,
    org_id                    uuid NOT NULL REFERENCES org,
    dag_name                  text NOT NULL,
    name                      text NOT NULL,
    fingerprint               text NOT NULL,
    active                    boolean NOT NULL,
    activation                text NOT NULL,
    source_kind               text,
    operator                  text NOT NULL,
    config                    jsonb NOT NULL,
    execution_strategy        text,
    update_strategy           text NOT NULL,
    unique_key                text[] NOT NULL,
    secrets                   text[] NOT NULL,
    udf                       jsonb,
    trigger_count             int NOT NULL,
    runtime                   text NOT NULL,
    max_attempts              int NOT NULL,
    timeout_seconds           int NOT NULL,
    heartbeat_timeout_seconds int NOT NULL,
    priority                  text NOT NULL,
    max_concurrency           int,
    max_queue_depth           int,
    max_queue_age_seconds     int,
    idle_timeout_seconds      int,
    retry_base_seconds        double precision NOT NULL,
    retry_max_seconds         double precision NOT NULL,
    paused                    boolean NOT NULL DEFAULT false,
    created_at                timestamptz NOT NULL DEFAULT tl_now(),
    retired_at                timestamptz,
    UNIQUE (dag_name, name, fingerprint)
);
CREATE UNIQUE INDEX job_active ON job (dag_name, name) WHERE active;

CREATE TABLE dataset (
    dataset_uuid   uuid PRIMARY KEY,
    org_id         uuid NOT NULL REFERENCES org,
    dag_name       text NOT NULL,
    job_name       text,
    output_index   int,
    published_name text,
    write_mode     text NOT NULL DEFAULT 'task' CHECK (write_mode IN ('task', 'buffered')),
    buffer_schema  jsonb,
    created_at     timestamptz NOT NULL DEFAULT tl_now()
);
CREATE UNIQUE INDEX dataset_output ON dataset (dag_name, job_name, output_index);
CREATE UNIQUE INDEX dataset_published ON dataset (org_id, published_name);

-- A generation of a dataset. `revision` counts its invalidations. `version_no` stands for the uuid where
-- an index needs a number.
CREATE TABLE dataset_version (
    dataset_version uuid PRIMARY KEY,
    version_no      bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    dataset_uuid    uuid NOT NULL REFERENCES dataset,
    job_id          uuid REFERENCES job,
    output_index    int NOT NULL,
    output_name     text NOT NULL,
    storage         text NOT NULL CHECK (storage IN ('parquet', 'postgres', 'none')),
    revision        bigint NOT NULL DEFAULT 0,
    is_current      boolean NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT tl_now()
);
CREATE UNIQUE INDEX dataset_version_current ON dataset_version (dataset_uuid) WHERE is_current;
CREATE INDEX dataset_version_job ON dataset_version (job_id);

-- Apart from dataset_version, so that an advancing cursor never waits for readers of the version row.
CREATE TABLE dataset_cursor (
    dataset_version uuid PRIMARY KEY REFERENCES dataset_version,
    cursor          bigint NOT NULL,
    finalized       bigint,
    updated_at      timestamptz NOT NULL DEFAULT tl_now()
);

CREATE TABLE job_input (
    job_id          uuid NOT NULL REFERENCES job,
    input_index     int NOT NULL,
    dataset_uuid    uuid NOT NULL REFERENCES dataset,
    dataset_version uuid NOT NULL REFERENCES dataset_version,
    trigger         boolean NOT NULL,
    where_text      text,
    where_tree      jsonb,
    PRIMARY KEY (job_id, input_index)
);
CREATE INDEX job_input_version ON job_input (dataset_version);

-- How far a PerUpdate job has read each triggering input, and what was taken back of what it had read.
CREATE TABLE consumer_cursor (
    job_id       uuid NOT NULL,
    input_index  int NOT NULL,
    cursor       bigint NOT NULL DEFAULT -1,
    inv_start    bigint,
    inv_end      bigint,
    inv_revision bigint,
    PRIMARY KEY (job_id, input_index),
    FOREIGN KEY (job_id, input_index) REFERENCES job_input
);

CREATE TABLE invalidation (
    dataset_version uuid NOT NULL REFERENCES dataset_version,
    invalidation_id text NOT NULL,
    range_start     bigint NOT NULL,
    range_end       bigint NOT NULL CHECK (range_end >= range_start),
    revision        bigint NOT NULL,
    reason          text,
    task_id         uuid,
    created_at      timestamptz NOT NULL DEFAULT tl_now(),
    PRIMARY KEY (dataset_version, invalidation_id)
);
CREATE UNIQUE INDEX invalidation_revision ON invalidation (dataset_version, revision);
CREATE INDEX invalidation_range ON invalidation (dataset_version, range_end, range_start);

-- `parked`: its job was full, or may have been, when it last had a wake-up; a slot that comes free wakes it. `shelved`: stopped because
-- its job was retired; a rollback takes it up again.
CREATE TABLE task (
    task_id          uuid PRIMARY KEY,
    seq              bigint GENERATED ALWAYS AS IDENTITY,
    org_id           uuid NOT NULL,
    job_id           uuid NOT NULL,
    kind             text NOT NULL CHECK (kind IN ('partition', 'cursor', 'source')),
    status           text NOT NULL CHECK (status IN ('Queued', 'Running', 'Completed', 'Failed', 'Canceled')),
    range_start      bigint,
    range_end        bigint,
    scope_key        text,
    attempt          int NOT NULL DEFAULT 0,
    failures         int NOT NULL DEFAULT 0,
    last_outcome     text,
    worker_id        text,
    claim_key        text,
    lease_token      uuid,
    lease_expires_at timestamptz,
    epoch            bigint,
    inputs           jsonb,
    output_revisions jsonb,
    ready_at         timestamptz NOT NULL DEFAULT tl_now(),
    woken_at         timestamptz NOT NULL DEFAULT tl_now(),
    created_at       timestamptz NOT NULL DEFAULT tl_now(),
    ended_at         timestamptz,
    error_message    text,
    cause            jsonb,
    parked           boolean NOT NULL DEFAULT false,
    shelved          boolean NOT NULL DEFAULT false,
    CHECK ((kind = 'partition') = (range_start IS NOT NULL)),
    CHECK ((range_start IS NULL) = (range_end IS NULL)),
    CHECK ((status = 'Running') <= (lease_token IS NOT NULL AND lease_expires_at IS NOT NULL))
);
CREATE UNIQUE INDEX task_scope ON task (job_id, range_start, range_end, scope_key) WHERE kind = 'partition';
CREATE UNIQUE INDEX task_cursor_waiting ON task (job_id)
    WHERE kind = 'cursor' AND status = 'Queued' AND attempt = 0;
CREATE UNIQUE INDEX task_cursor_started ON task (job_id)
    WHERE kind = 'cursor' AND status IN ('Queued', 'Running') AND attempt > 0;
CREATE UNIQUE INDEX task_source ON task (job_id) WHERE kind = 'source';
CREATE INDEX task_queued ON task (job_id, seq) WHERE status = 'Queued';
CREATE INDEX task_parked ON task (job_id, seq) WHERE status = 'Queued' AND parked;
CREATE INDEX task_shelved ON task (job_id) WHERE shelved;
CREATE INDEX task_running ON task (job_id) WHERE status = 'Running';
CREATE INDEX task_lease ON task (lease_expires_at) WHERE status = 'Running';
CREATE INDEX task_wake ON task (woken_at) WHERE status = 'Queued';
CREATE INDEX task_seq ON task (seq DESC);
CREATE INDEX task_job_seq ON task (job_id, seq DESC);
CREATE INDEX task_failed ON task (seq DESC) WHERE status = 'Failed';
CREATE INDEX task_canceled ON task (seq DESC) WHERE status = 'Canceled';

CREATE TABLE attempt (
    task_id           uuid NOT NULL,
    attempt           int NOT NULL,
    worker_id         text NOT NULL,
    lease_token       uuid NOT NULL,
    epoch             bigint NOT NULL,
    claimed_at        timestamptz NOT NULL,
    ended_at          timestamptz,
    outcome           text,
    error_message     text,
    completion_digest bytea,
    result            jsonb,
    PRIMARY KEY (task_id, attempt)
);

-- `stored` partitions have data behind them and never overlap while current; a scope of a dataset with
-- storage `none` is an announcement, and announcements may.
CREATE TABLE partition (
    partition_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    dataset_version uuid NOT NULL,
    version_no      bigint NOT NULL,
    range_start     bigint NOT NULL,
    range_end       bigint NOT NULL CHECK (range_end >= range_start),
    stored          boolean NOT NULL,
    current         boolean NOT NULL,
    revision        bigint NOT NULL,
    task_id         uuid,
    attempt         int,
    epoch           bigint,
    location        text,
    manifest        jsonb,
    row_count       bigint,
    committed_at    timestamptz NOT NULL DEFAULT tl_now(),
    uncommitted_at  timestamptz,
    CONSTRAINT partitions_never_overlap EXCLUDE USING gist (
        int8range(version_no, version_no, '[]') WITH &&,
        int8range(range_start, range_end, '[]') WITH &&
    ) WHERE (current AND stored)
);
CREATE UNIQUE INDEX partition_scope ON partition (dataset_version, range_start, range_end) WHERE current;
CREATE INDEX partition_end ON partition (dataset_version, range_end) WHERE current;
CREATE INDEX partition_task ON partition (task_id);

CREATE TABLE event (
    event_id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    org_id          uuid NOT NULL,
    dataset_version uuid NOT NULL,
    task_id         uuid,
    attempt         int,
    kind            text NOT NULL CHECK (kind IN ('cursor', 'partition', 'invalidation')),
    range_start     bigint NOT NULL,
    range_end       bigint NOT NULL,
    revision        bigint NOT NULL,
    state           text NOT NULL CHECK (state IN ('counted', 'pending', 'old_version', 'old_revision')),
    created_at      timestamptz NOT NULL DEFAULT tl_now()
);
CREATE UNIQUE INDEX event_once ON event (task_id, attempt, dataset_version, kind, range_start, range_end, revision);
CREATE INDEX event_version ON event (dataset_version, event_id DESC);

CREATE TABLE outbox (
    outbox_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind         text NOT NULL,
    runtime      text NOT NULL,
    task_id      uuid,
    payload      jsonb NOT NULL,
    available_at timestamptz NOT NULL,
    tries        int NOT NULL DEFAULT 0,
    last_error   text,
    failed_at    timestamptz,
    created_at   timestamptz NOT NULL DEFAULT tl_now()
);
CREATE INDEX outbox_due ON outbox (available_at, outbox_id) WHERE failed_at IS NULL;
CREATE INDEX outbox_failed ON outbox (outbox_id) WHERE failed_at IS NOT NULL;

CREATE TABLE operator_state (
    job_id      uuid NOT NULL REFERENCES job,
    key         text NOT NULL,
    value       jsonb NOT NULL,
    task_id     uuid NOT NULL,
    attempt     int NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT tl_now(),
    PRIMARY KEY (job_id, key)
);

CREATE TABLE audit (
    audit_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    org_id      uuid NOT NULL REFERENCES org,
    actor       text NOT NULL,
    action      text NOT NULL,
    subject     jsonb NOT NULL,
    at          timestamptz NOT NULL DEFAULT tl_now()
);

-- The revision of a scope: the last invalidation that touched it. Two scopes of one version that no
-- invalidation separates share it, so work elsewhere in the chain isn't repeated.
CREATE FUNCTION scope_revision(version uuid, first bigint, last bigint) RETURNS bigint LANGUAGE sql STABLE
    AS $$
        SELECT coalesce(max(i.revision), 0) FROM invalidation i
        WHERE i.dataset_version = version AND i.range_end >= first AND i.range_start <= last
    $$;

-- What makes a PerPartition task one of a kind besides job and scope: the revisions of the scope in every
-- triggering input, and in the job's own outputs (a correction must be able to ask for the same inputs again).
-- A version that was never invalidated, which is nearly every one, is not searched for invalidations.
CREATE FUNCTION scope_key(job uuid, first bigint, last bigint) RETURNS text LANGUAGE sql STABLE
    AS $$
        SELECT coalesce((SELECT string_agg(CASE WHEN dv.revision = 0 THEN '0'
                                                ELSE scope_revision(ji.dataset_version, first, last)::text END,
                                           ',' ORDER BY ji.input_index)
                         FROM job_input ji JOIN dataset_version dv USING (dataset_version)
                         WHERE ji.job_id = job AND ji.trigger), '')
            || ';' ||
               coalesce((SELECT max(CASE WHEN dv.revision = 0 THEN 0
                                         ELSE scope_revision(dv.dataset_version, first, last) END)::text
                         FROM dataset_version dv WHERE dv.job_id = job), '0')
    $$;

-- How far the current partitions of a version reach without a gap from `after` on: where a PerUpdate job may
-- read to. From the very first partition when nothing was read yet. Bounded, so that one claim stays short;
-- the next task goes on from there.
CREATE FUNCTION frontier(version uuid, after bigint) RETURNS bigint LANGUAGE sql STABLE
    AS $$
        WITH RECURSIVE walk(last, steps) AS (
            (SELECT p.range_end, 1 FROM partition p
             WHERE p.dataset_version = version AND p.current
               AND p.range_start = CASE WHEN after >= 0 THEN after + 1
                                        ELSE (SELECT min(f.range_start) FROM partition f
                                              WHERE f.dataset_version = version AND f.current) END
             ORDER BY p.range_end DESC LIMIT 1)
            UNION ALL
            SELECT p.range_end, walk.steps + 1 FROM walk, LATERAL (
                SELECT n.range_end FROM partition n
                WHERE n.dataset_version = version AND n.current AND n.range_start = walk.last + 1
                ORDER BY n.range_end DESC LIMIT 1) p
            WHERE walk.steps < 10000
        )
        SELECT max(last) FROM walk
    $$;

-- Does a PerUpdate job have anything to do: something new to read, or something taken back to undo?
CREATE FUNCTION has_updates(job uuid) RETURNS boolean LANGUAGE sql STABLE
    AS $$
        SELECT EXISTS (
            SELECT 1 FROM consumer_cursor cc
            JOIN job_input ji USING (job_id, input_index)
            LEFT JOIN dataset_cursor dc USING (dataset_version)
            WHERE cc.job_id = job
              AND (cc.inv_revision IS NOT NULL OR dc.cursor > cc.cursor
                   OR (dc.cursor IS NULL AND cc.cursor < 0 AND (
                        SELECT min(p.range_start) FROM partition p
                        WHERE p.dataset_version = ji.dataset_version AND p.current) IS NOT NULL)
                   OR (dc.cursor IS NULL AND (
                        SELECT min(p.range_end) FROM partition p
                        WHERE p.dataset_version = ji.dataset_version AND p.current
                          AND p.range_start = cc.cursor + 1) IS NOT NULL)))
    $$;
