-- Fences: which attempt may commit to which blocks of a dataset version.

-- One writer of a dataset version at a time, so that no fence can be written between a commit's look and its end. A
-- row rather than an advisory lock: only roles with rights on the table can hold it.
CREATE OR REPLACE FUNCTION tracelake.lock_version(version uuid) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM tracelake.version_lock WHERE dataset_version = version FOR UPDATE;
    IF NOT FOUND THEN
        INSERT INTO tracelake.version_lock VALUES (version) ON CONFLICT DO NOTHING;
        PERFORM FROM tracelake.version_lock WHERE dataset_version = version FOR UPDATE;
    END IF;
END $$;

-- Whether no attempt of a higher epoch, and none that read newer revisions of the inputs, has a fence for these
-- blocks. plpgsql, since it is called often and a session keeps the plans of this language.
CREATE OR REPLACE FUNCTION tracelake.fence_holds(version uuid, my_epoch bigint, my_span int8range, my_inputs jsonb)
RETURNS boolean LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN NOT EXISTS (
        SELECT FROM tracelake.fence f
        WHERE f.dataset_version = version AND f.span && my_span
          AND (f.epoch > my_epoch
               OR EXISTS (SELECT FROM jsonb_each_text(f.inputs) theirs
                          WHERE (my_inputs ->> theirs.key)::bigint < theirs.value::bigint))
    );
END $$;

-- Writes an attempt's fence. Returns false when a higher epoch is there already: an attempt that was superseded
-- while suspended must not begin.
CREATE OR REPLACE FUNCTION tracelake.begin_attempt(version uuid, task uuid, my_epoch bigint, my_span int8range, my_inputs jsonb)
RETURNS boolean LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM tracelake.lock_version(version);
    IF NOT tracelake.fence_holds(version, my_epoch, my_span, my_inputs) THEN
        RETURN false;
    END IF;
    INSERT INTO tracelake.fence (dataset_version, task_id, epoch, span, inputs)
    VALUES (version, task, my_epoch, my_span, my_inputs)
    ON CONFLICT (dataset_version, task_id, span)
    DO UPDATE SET epoch = excluded.epoch, inputs = excluded.inputs, written_at = now();
    -- A missing fence is treated like a higher epoch.
    DELETE FROM tracelake.fence
    WHERE dataset_version = version AND span <@ my_span AND epoch < my_epoch;
    RETURN true;
END $$;
