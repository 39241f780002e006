-- What a guest may do to itself keeps nobody else from anything: neither a transaction that it leaves open, nor rights
-- that it gives up. And a null is no answer to a question of whose something is.

-- Every login can change its own role and revoke its own rights, and Postgres makes whoever changes the same row of a
-- catalogue wait for the end of that transaction: of the database's row, whoever opens or closes a ticket. So a session
-- of the writer's that waits is freed by another one: guests' sessions that it waits for, directly or through others,
-- are ended. Not where it waits for a table, which is work. Answers how many were.
CREATE FUNCTION tracelake.end_blockers(waiting int) RETURNS int LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    ended int;
BEGIN
    IF (SELECT a.usename = session_user FROM pg_stat_activity a WHERE a.pid = waiting) IS NOT TRUE THEN
        RAISE EXCEPTION '% isn''t a session of %', coalesce(waiting::text, 'null'), session_user
        USING ERRCODE = 'insufficient_privilege';
    END IF;
    WITH RECURSIVE chain(pid, place) AS (
        SELECT waiting, 0
        UNION
        SELECT b, place + 1 FROM chain, unnest(pg_blocking_pids(chain.pid)) AS b
        WHERE place < 20 AND EXISTS (SELECT FROM pg_locks l WHERE l.pid = chain.pid AND NOT l.granted
                                     AND l.locktype IN ('transactionid', 'tuple', 'object'))
    )
    SELECT count(pg_terminate_backend(a.pid)) INTO ended
    FROM pg_stat_activity a
    WHERE a.pid IN (SELECT pid FROM chain WHERE place > 0)
      AND (a.usename = 'tracelake_reader' OR a.usename ~ '^tracelake_t_[0-9a-f]{24}$');
    RETURN ended;
END $$;

-- Whoever reads everything reads what is made. Default privileges say so too, and the reader can drop those.
CREATE FUNCTION tracelake.let_everything_read(target regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('GRANT SELECT ON %s TO tracelake_reader', target);
EXCEPTION WHEN undefined_object THEN
    NULL;  -- It hasn't been made yet; the install that makes it lets it read all that there is.
END $$;

-- As before; the reader reads what is made.
CREATE OR REPLACE FUNCTION tracelake.ensure_table(version uuid, staged regclass, key_columns text[], layout jsonb)
RETURNS regclass LANGUAGE plpgsql AS $$
DECLARE
    name text := tracelake.table_of(version);
    target regclass := to_regclass(format('data.%I', name));
    differing text;
BEGIN
    IF target IS NULL THEN
        target := tracelake.create_table(name, staged, key_columns, layout);
        PERFORM tracelake.let_everything_read(target);
        PERFORM tracelake.let_read(t.login, version) FROM tracelake.ticket t WHERE version = ANY (t.reads);
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

CREATE OR REPLACE FUNCTION tracelake.create_buffer(version uuid, columns jsonb, key_columns text[])
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tracelake.create_buffer_table(version, columns, key_columns);
    PERFORM tracelake.let_everything_read(to_regclass(format('data.%I', tracelake.table_of(version))));
    PERFORM tracelake.let_read(t.login, version) FROM tracelake.ticket t WHERE version = ANY (t.reads);
END $$;

CREATE OR REPLACE FUNCTION tracelake.ensure_partitions(target regclass, staged regclass, first_block bigint, last_block bigint)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    size bigint := tracelake.partition_blocks(target);
    base text := (SELECT relname FROM pg_class WHERE oid = target);
    starts bigint[];
    start bigint;
    part text;
BEGIN
    IF size IS NULL OR first_block IS NULL THEN
        RETURN;
    END IF;
    IF first_block / size = last_block / size THEN
        starts := ARRAY[first_block / size * size];
    ELSE
        EXECUTE format('SELECT array_agg(DISTINCT s) FROM (SELECT DISTINCT block_number / %1$s * %1$s AS s FROM %2$s) d',
                       size, staged) INTO starts;
    END IF;
    starts := ARRAY(SELECT s FROM unnest(starts) s
                    WHERE to_regclass(format('data.%I', base || '_p' || s)) IS NULL ORDER BY s);
    IF cardinality(starts) > 256 THEN
        RAISE EXCEPTION 'the rows of one commit would make % partitions of % blocks: use larger ones',
                        cardinality(starts), size USING ERRCODE = 'TL002';
    END IF;
    FOREACH start IN ARRAY starts LOOP
        part := format('data.%I', base || '_p' || start);
        EXECUTE format('CREATE TABLE %s (LIKE %s)', part, target);
        EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)',
                       target, part, start, start + size);
        PERFORM tracelake.let_everything_read(to_regclass(part));
    END LOOP;
END $$;

-- As before; a number that is missing is none.
CREATE OR REPLACE FUNCTION staging.own_prefix(output int, OUT prefix text) LANGUAGE plpgsql STABLE SECURITY DEFINER AS $$
BEGIN
    SELECT format('staging_%s_%s_%s_', replace(t.task_id::text, '-', ''), output, t.epoch) INTO prefix
    FROM tracelake.ticket t WHERE t.login = session_user AND t.epoch IS NOT NULL;
    IF prefix IS NULL OR (output BETWEEN 0 AND 999) IS NOT TRUE THEN
        RAISE EXCEPTION '% has no ticket for staging output %', session_user, output
        USING ERRCODE = 'insufficient_privilege';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION staging.own_table(name text, OUT output int) LANGUAGE plpgsql STABLE SECURITY DEFINER AS $$
BEGIN
    output := nullif(split_part(name, '_', 3), '')::int;
    IF output IS NULL
       OR (left(name, -8) = staging.own_prefix(output) AND right(name, 8) ~ '^[0-9a-f]{8}$') IS NOT TRUE
    THEN
        RAISE EXCEPTION '% isn''t a staging table of this attempt', coalesce(quote_literal(name), 'null')
        USING ERRCODE = 'insufficient_privilege';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION staging.open_table(output int, columns jsonb) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET default_tablespace = '' SET default_table_access_method = 'heap' AS $$
DECLARE
    name text := staging.new_name(output);
    declared text;
    wrong text;
BEGIN
    IF jsonb_typeof(columns) IS DISTINCT FROM 'array' OR jsonb_array_length(columns) NOT BETWEEN 1 AND 1600 THEN
        RAISE EXCEPTION 'a staging table has 1 to 1600 columns, as [[name, type], …]'
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT string_agg(c::text, ', ') FILTER (
               WHERE jsonb_typeof(c) <> 'array' OR jsonb_typeof(c -> 0) IS DISTINCT FROM 'string'
               OR jsonb_typeof(c -> 1) IS DISTINCT FROM 'string'
               OR (c ->> 1) !~ '^(boolean|smallint|integer|bigint|real|double precision|numeric(\([0-9]{1,3},[0-9]{1,3}\))?|date|timestamp|timestamptz|text|bytea|jsonb|uuid)$'),
           string_agg(format('%I %s', c ->> 0, c ->> 1), ', ' ORDER BY place)
    INTO wrong, declared
    FROM jsonb_array_elements(columns) WITH ORDINALITY AS u(c, place);
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'no column of a staging table: %', wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format('CREATE UNLOGGED TABLE staging.%I (%s)', name, declared);
    EXECUTE format('GRANT INSERT ON staging.%I TO %I', name, session_user);
    RETURN name;
END $$;

CREATE OR REPLACE FUNCTION staging.discard(names text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET lock_timeout = '100ms' AS $$
DECLARE
    name text;
BEGIN
    IF names IS NULL THEN
        RAISE EXCEPTION 'these are no names of staging tables' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOREACH name IN ARRAY names LOOP
        PERFORM staging.own_table(name);
        BEGIN
            EXECUTE format('DROP TABLE IF EXISTS staging.%I', name);
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
END $$;

-- As before; a count that is missing is no count.
CREATE OR REPLACE FUNCTION tracelake.check_staged(
    staged regclass, expected bigint, first_block bigint, last_block bigint, appends boolean,
    OUT lowest bigint, OUT highest bigint
) LANGUAGE plpgsql SET lock_timeout = '5s' AS $$
DECLARE
    found bigint;
    outside bigint := 0;
BEGIN
    -- A lock runs nobody's code, and nothing about the table changes from here on.
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

-- As before, of tables that are the output's own by their names.
DROP FUNCTION tracelake.commit_output(uuid, uuid, bigint, jsonb, bigint, bigint, text[], bigint[], boolean, boolean, text[],
                                      jsonb);
CREATE FUNCTION tracelake.commit_output(
    version uuid, task uuid, my_epoch bigint, my_inputs jsonb, first_block bigint, last_block bigint,
    staging_tables text[], staged_rows bigint[], kept boolean, appends boolean, key_columns text[], layout jsonb,
    output int
) RETURNS bigint LANGUAGE plpgsql AS $$
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

-- No function finds its names where its caller says, nor in what a session has made for itself.
DO $$
DECLARE
    each regprocedure;
BEGIN
    FOR each IN SELECT p.oid::regprocedure FROM pg_proc p
                WHERE p.pronamespace IN ('tracelake'::regnamespace, 'staging'::regnamespace)
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', each);
    END LOOP;
END $$;
