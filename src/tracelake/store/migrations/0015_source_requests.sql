-- A trigger of a backfill: the task that it becomes is bulk work, also after it was kept.
ALTER TABLE source_request ADD COLUMN bulk boolean NOT NULL DEFAULT false;

-- When a secret was rotated out. Before that time, which comes again when the clock is set back, it isn't accepted: so
-- no clock makes its overlap longer.
ALTER TABLE installation.webhook_secret ADD COLUMN rotated_at timestamptz;
UPDATE installation.webhook_secret SET rotated_at = least(tl_now(), expires_at) WHERE expires_at IS NOT NULL;

-- Bodies of deliveries that are stored, or are about to be, and that no request names yet. The transaction that
-- accepts a delivery takes its body out of here; what is left over is removed, and can't be named any more when it is
-- `dropped`.
CREATE TABLE delivery_body (
    location text PRIMARY KEY,
    begun_at timestamptz NOT NULL DEFAULT tl_now(),
    dropped  boolean NOT NULL DEFAULT false
);

-- The last tick of a source up to now. One that lies further in the future than `ahead` seconds was made while the clock
-- was ahead: then it is the last that every tick has a row for.
CREATE FUNCTION last_tick_by_now(dag text, job text, recorded bigint, ahead float8) RETURNS bigint LANGUAGE sql STABLE
    AS $$
        SELECT CASE WHEN to_timestamp(recorded) <= tl_now() + make_interval(secs => ahead) THEN recorded ELSE (
            SELECT max(r.number) FROM source_request r
            WHERE r.dag_name = dag AND r.job_name = job AND r.kind = 'cron'
              AND r.number <= floor(extract(epoch FROM tl_now()))::bigint) END
    $$;
