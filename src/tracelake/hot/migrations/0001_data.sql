-- The data database: rows of Postgres outputs, the fences that guard them, and what is still to be said about them.

CREATE SCHEMA tracelake;
CREATE SCHEMA staging;
CREATE SCHEMA data;

-- An attempt's first act is to write its fence here; its commit must find that nobody with a higher epoch has
-- written one for an overlapping range since, nor anybody who read newer revisions of the inputs.
CREATE TABLE tracelake.fence (
    dataset_version uuid NOT NULL,
    task_id         uuid NOT NULL,
    epoch           bigint NOT NULL,
    span            int8range NOT NULL,
    inputs          jsonb NOT NULL,
    written_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (dataset_version, task_id, span)
);
CREATE INDEX fence_span ON tracelake.fence USING gist (span);

-- What follows from a commit (cursor events, invalidations), until the Dispatcher has accepted it.
CREATE TABLE tracelake.outbox (
    outbox_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id     uuid NOT NULL,
    events      jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX outbox_task ON tracelake.outbox (task_id, outbox_id);

CREATE FUNCTION tracelake.table_of(version uuid) RETURNS text LANGUAGE sql IMMUTABLE
    AS $$ SELECT 'd_' || replace(version::text, '-', '') $$;

-- One writer of a dataset version at a time, so that a fence can't be written between a commit's look and its end.
CREATE FUNCTION tracelake.lock_version(version uuid) RETURNS void LANGUAGE sql
    AS $$ SELECT pg_advisory_xact_lock(hashtextextended(version::text, 8600002)) $$;

-- Refuses when a higher epoch is there already: an attempt that slept through its own end must not begin.
CREATE FUNCTION tracelake.begin_attempt(version uuid, task uuid, my_epoch bigint, my_span int8range, my_inputs jsonb)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tracelake.lock_version(version);
    IF NOT tracelake.fence_holds(version, my_epoch, my_span, my_inputs) THEN
        RETURN false;
    END IF;
    INSERT INTO tracelake.fence (dataset_version, task_id, epoch, span, inputs)
    VALUES (version, task, my_epoch, my_span, my_inputs)
    ON CONFLICT (dataset_version, task_id, span)
    DO UPDATE SET epoch = excluded.epoch, inputs = excluded.inputs, written_at = now();
    -- Whoever wrote these finds them gone, which is as good as finding a higher epoch.
    DELETE FROM tracelake.fence
    WHERE dataset_version = version AND span <@ my_span AND epoch < my_epoch;
    RETURN true;
END $$;

CREATE FUNCTION tracelake.fence_holds(version uuid, my_epoch bigint, my_span int8range, my_inputs jsonb)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (
        SELECT FROM tracelake.fence f
        WHERE f.dataset_version = version AND f.span && my_span
          AND (f.epoch > my_epoch
               OR EXISTS (SELECT FROM jsonb_each_text(f.inputs) theirs
                          WHERE (my_inputs ->> theirs.key)::bigint < theirs.value::bigint))
    )
$$;

-- The table of a dataset version, made like the first rows that are committed to it.
CREATE FUNCTION tracelake.ensure_table(version uuid, staged regclass, key_columns text[])
RETURNS regclass LANGUAGE plpgsql AS $$
DECLARE
    name text := tracelake.table_of(version);
    target regclass := to_regclass(format('data.%I', name));
    differing text;
BEGIN
    IF target IS NULL THEN
        EXECUTE format('CREATE TABLE data.%I (LIKE %s)', name, staged);
        target := to_regclass(format('data.%I', name));
        IF cardinality(key_columns) > 0 THEN
            EXECUTE format('ALTER TABLE %s ADD UNIQUE (%s)', target,
                           (SELECT string_agg(format('%I', k), ', ' ORDER BY place)
                            FROM unnest(key_columns) WITH ORDINALITY AS u(k, place)));
        END IF;
        IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attname = 'block_number') THEN
            EXECUTE format('CREATE INDEX ON %s (block_number)', target);
        END IF;
        RETURN target;
    END IF;
    SELECT string_agg(coalesce(s.attname, t.attname), ', ') INTO differing
    FROM (SELECT attname, atttypid FROM pg_attribute
          WHERE attrelid = staged AND attnum > 0 AND NOT attisdropped) s
    FULL JOIN (SELECT attname, atttypid FROM pg_attribute
               WHERE attrelid = target AND attnum > 0 AND NOT attisdropped) t
      ON s.attname = t.attname AND s.atttypid = t.atttypid
    WHERE s.attname IS NULL OR t.attname IS NULL;
    IF differing IS NOT NULL THEN
        RAISE EXCEPTION 'the staged rows have other columns than the dataset: %', differing USING ERRCODE = 'TL002';
    END IF;
    RETURN target;
END $$;

-- The commit of one output: under the version's lock, if the fence still holds, the range is replaced by the staged
-- rows (or they are added, for an output that appends), and the staging table is gone.
CREATE FUNCTION tracelake.commit_output(
    version uuid, task uuid, my_epoch bigint, my_inputs jsonb, first_block bigint, last_block bigint,
    staging_table text, appends boolean, key_columns text[]
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    staged regclass := to_regclass(format('staging.%I', staging_table));
    my_span int8range := int8range(first_block, last_block, '[]');
    target regclass;
    columns text;
    outside bigint;
    inserted bigint;
BEGIN
    PERFORM tracelake.lock_version(version);
    IF NOT tracelake.fence_holds(version, my_epoch, my_span, my_inputs) OR NOT EXISTS (
        SELECT FROM tracelake.fence
        WHERE dataset_version = version AND task_id = task AND epoch = my_epoch AND span @> my_span
    ) THEN
        RAISE EXCEPTION 'a newer attempt has begun on these blocks' USING ERRCODE = 'TL001';
    END IF;
    IF staged IS NULL THEN
        target := to_regclass(format('data.%I', tracelake.table_of(version)));
        IF target IS NOT NULL AND NOT appends THEN
            EXECUTE format('DELETE FROM %s WHERE block_number BETWEEN $1 AND $2', target)
            USING first_block, last_block;
        END IF;
        RETURN 0;
    END IF;
    target := tracelake.ensure_table(version, staged, key_columns);
    SELECT string_agg(format('%I', attname), ', ') INTO columns
    FROM pg_attribute WHERE attrelid = staged AND attnum > 0 AND NOT attisdropped;
    IF NOT appends THEN
        IF NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = staged AND attname = 'block_number') THEN
            RAISE EXCEPTION 'rows of an output that is replaced by range need a column block_number'
            USING ERRCODE = 'TL002';
        END IF;
        EXECUTE format('SELECT count(*) FROM %s WHERE block_number IS NULL OR block_number NOT BETWEEN $1 AND $2',
                       staged) INTO outside USING first_block, last_block;
        IF outside > 0 THEN
            RAISE EXCEPTION '% staged rows lie outside of blocks % to %', outside, first_block, last_block
            USING ERRCODE = 'TL002';
        END IF;
        EXECUTE format('DELETE FROM %s WHERE block_number BETWEEN $1 AND $2', target) USING first_block, last_block;
        EXECUTE format('INSERT INTO %s (%s) SELECT %s FROM %s', target, columns, columns, staged);
    ELSE
        EXECUTE format('INSERT INTO %s (%s) SELECT %s FROM %s ON CONFLICT DO NOTHING',
                       target, columns, columns, staged);
    END IF;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    EXECUTE format('DROP TABLE %s', staged);
    RETURN inserted;
END $$;
