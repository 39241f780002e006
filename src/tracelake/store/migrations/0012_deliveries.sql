-- Deliveries: rows of buffered datasets that are sent to receivers. The Dispatcher keeps what has been sent; the process
-- that sends holds a lease and asks.

-- A delivery of one dataset. Its identity survives changes of everything else, and its removal: what it has sent stays
-- known. `position` is that of the last row that became a message, or none.
CREATE TABLE delivery (
    delivery_id   uuid PRIMARY KEY,
    org_id        uuid NOT NULL REFERENCES org,
    dag_name      text NOT NULL,
    name          text NOT NULL,
    dataset_uuid  uuid NOT NULL REFERENCES dataset,
    job_id        uuid NOT NULL UNIQUE REFERENCES job,
    active        boolean NOT NULL,
    spec          jsonb NOT NULL,
    position      bigint NOT NULL,
    sent          bigint NOT NULL DEFAULT 0,
    retracted     bigint NOT NULL DEFAULT 0,
    failing_since timestamptz,
    last_error    text,
    last_error_at timestamptz,
    last_sent_at  timestamptz,
    resumed_at    timestamptz,
    created_at    timestamptz NOT NULL DEFAULT tl_now(),
    UNIQUE (dag_name, name, dataset_uuid)
);
CREATE UNIQUE INDEX delivery_active ON delivery (dag_name, name) WHERE active;

-- One row per delivery, record and revision, and one more when it is retracted. `made_at` tells apart revisions that the
-- schema counts itself. `handed`: the current attempt has it. `under_way`: a try has begun and its end isn't known;
-- `in_doubt`: an earlier one may have arrived. `began_at` is of the last try: a refusal of one that began before the last
-- resume (`resumed_at`) doesn't pause the delivery again.
CREATE TABLE delivery_message (
    message_id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    delivery_id uuid NOT NULL REFERENCES delivery,
    record_id   text NOT NULL,
    revision    bigint NOT NULL,
    made_at     bigint NOT NULL,
    kind        text NOT NULL CHECK (kind IN ('row', 'retracted')),
    state       text NOT NULL CHECK (state IN ('waiting', 'sent', 'dead', 'dropped', 'unchanged')),
    order_key   text NOT NULL,
    data        text NOT NULL,
    text        text,
    row_at      timestamptz NOT NULL,
    tries       int NOT NULL DEFAULT 0,
    handed      boolean NOT NULL DEFAULT false,
    under_way   boolean NOT NULL DEFAULT false,
    began_at    timestamptz,
    in_doubt    boolean NOT NULL DEFAULT false,
    next_try_at timestamptz NOT NULL DEFAULT tl_now(),
    last_status int,
    last_error  text,
    created_at  timestamptz NOT NULL DEFAULT tl_now(),
    finished_at timestamptz,
    UNIQUE (delivery_id, record_id, revision, made_at, kind)
) WITH (fillfactor = 80);
CREATE INDEX delivery_message_open ON delivery_message (delivery_id, state, message_id)
    WHERE state IN ('waiting', 'dead');
CREATE INDEX delivery_message_finished ON delivery_message (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX delivery_message_newest ON delivery_message (delivery_id, message_id);
