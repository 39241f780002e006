-- Commits: staged rows replace a range of blocks, or are appended, if the attempt's fence still holds.

-- Refuses anything but a table as `staging.open_table` makes them. No other role can make one there; this is a second
-- line of defence, so that a commit runs no code but its own.
CREATE OR REPLACE FUNCTION tracelake.check_plain(staged regclass) RETURNS void LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_class c
        WHERE c.oid = staged AND c.relnamespace = 'staging'::regnamespace
          AND c.relowner = 'tracelake_staging'::regrole AND c.relkind = 'r' AND c.relpersistence = 'u'
          AND NOT (c.relhasindex OR c.relhasrules OR c.relhastriggers OR c.relhassubclass OR c.relispartition
                   OR c.relrowsecurity OR c.relforcerowsecurity)
          AND c.relchecks = 0 AND c.reloftype = 0
          AND NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid)
          AND NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid)
          AND NOT EXISTS (
              SELECT FROM pg_attribute a
              WHERE a.attrelid = c.oid AND a.attnum > 0
                AND (a.atthasdef OR a.attgenerated <> '' OR a.attidentity <> '' OR a.atttypid <> ALL (
                     '{bool,int2,int4,int8,float4,float8,numeric,date,timestamp,timestamptz,text,bytea,jsonb,uuid}'
                     ::regtype[])))
    ) THEN
        RAISE EXCEPTION '% isn''t a staging table as the platform makes them', staged USING ERRCODE = 'TL002';
    END IF;
END $$;

-- Refuses staged rows that aren't as many as were loaded, or that lie outside of the blocks; returns their lowest and
-- highest block. Waits only a little for a load that is under way, since others wait for this session's lock.
CREATE OR REPLACE FUNCTION tracelake.check_staged(
    staged regclass, expected bigint, first_block bigint, last_block bigint, appends boolean,
    OUT lowest bigint, OUT highest bigint
) LANGUAGE plpgsql SET lock_timeout = '5s'
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found bigint;
    outside bigint := 0;
BEGIN
    -- LOCK TABLE runs no user code, and nothing about the table changes from here on.
    EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', staged);
    PERFORM tracelake.check_plain(staged);
    IF tracelake.has_column(staged, 'block_number') THEN
        EXECUTE format('SELECT count(*), count(*) FILTER (WHERE block_number IS NULL OR block_number NOT BETWEEN $1 AND $2),
                               min(block_number), max(block_number) FROM ONLY %s', staged)
        INTO found, outside, lowest, highest USING first_block, last_block;
    ELSIF appends THEN
        EXECUTE format('SELECT count(*) FROM ONLY %s', staged) INTO found;
    ELSE
        RAISE EXCEPTION 'rows of an output that is replaced by range need a column block_number'
        USING ERRCODE = 'TL002';
    END IF;
    IF found IS DISTINCT FROM expected THEN
        RAISE EXCEPTION '% rows were staged in %, and % are there', expected, staged, found USING ERRCODE = 'TL003';
    END IF;
    IF outside > 0 AND NOT appends THEN
        RAISE EXCEPTION '% staged rows lie outside of blocks % to %', outside, first_block, last_block
        USING ERRCODE = 'TL002';
    END IF;
END $$;

-- The commit of one output, from staging tables that are its own by their names. Returns how many rows were inserted.
CREATE OR REPLACE FUNCTION tracelake.commit_output(
    version uuid, task uuid, my_epoch bigint, my_inputs jsonb, first_block bigint, last_block bigint,
    staging_tables text[], staged_rows bigint[], kept boolean, appends boolean, key_columns text[], layout jsonb,
    output int
) RETURNS bigint LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    my_span int8range := int8range(first_block, last_block, '[]');
    whose text[] := ARRAY['staging', replace(task::text, '-', ''), output::text, my_epoch::text];
    name text[];
    target regclass := to_regclass(format('data.%I', tracelake.table_of(version)));
    staged regclass;
    blocks record;
    columns text;
    inserted bigint;
    total bigint := 0;
BEGIN
    PERFORM tracelake.lock_version(version);
    IF NOT tracelake.fence_holds(version, my_epoch, my_span, my_inputs) OR NOT EXISTS (
        SELECT FROM tracelake.fence
        WHERE dataset_version = version AND task_id = task AND epoch = my_epoch AND span @> my_span
    ) THEN
        RAISE EXCEPTION 'a newer attempt has begun on these blocks' USING ERRCODE = 'TL001';
    END IF;
    IF target IS NOT NULL AND NOT appends THEN
        EXECUTE format('DELETE FROM %s WHERE block_number BETWEEN $1 AND $2', target) USING first_block, last_block;
    END IF;
    FOR place IN 1 .. cardinality(staging_tables) LOOP
        name := string_to_array(staging_tables[place], '_');
        IF (cardinality(name) = 5 AND name[1:4] = whose) IS NOT TRUE THEN
            RAISE EXCEPTION '% isn''t a staging table of output % of this attempt', staging_tables[place], output
            USING ERRCODE = 'TL002';
        END IF;
        staged := to_regclass(format('staging.%I', staging_tables[place]));
        IF staged IS NULL THEN
            RAISE EXCEPTION 'the staging table % is gone', staging_tables[place] USING ERRCODE = 'TL003';
        END IF;
        blocks := tracelake.check_staged(staged, staged_rows[place], first_block, last_block, appends);
        target := tracelake.ensure_table(version, staged, key_columns, layout);
        IF staged_rows[place] > 0 THEN
            PERFORM tracelake.ensure_partitions(target, staged, blocks.lowest, blocks.highest);
            SELECT string_agg(format('%I', attname), ', ') INTO columns
            FROM pg_attribute WHERE attrelid = staged AND attnum > 0 AND NOT attisdropped;
            EXECUTE format('INSERT INTO %1$s (%2$s) SELECT %2$s FROM ONLY %3$s', target, columns, staged)
                    || CASE WHEN appends THEN ' ON CONFLICT DO NOTHING' ELSE '' END;
            GET DIAGNOSTICS inserted = ROW_COUNT;
            total := total + inserted;
        END IF;
        IF kept THEN
            EXECUTE format('DELETE FROM ONLY %s', staged);
        ELSE
            EXECUTE format('DROP TABLE %s', staged);
        END IF;
    END LOOP;
    RETURN total;
END $$;
