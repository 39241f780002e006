-- Staging: the functions that operators and executors call, by the login of their ticket. They run as the owner of
-- staging tables, which has no other rights, and go by the session's login: a ticket is good for its own attempt's
-- tables.

-- The prefix of the names of the session's staging tables, up to the output's number.
CREATE OR REPLACE FUNCTION staging.own_prefix(output int, OUT prefix text) LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT format('staging_%s_%s_%s_', replace(t.task_id::text, '-', ''), output, t.epoch) INTO prefix
    FROM tracelake.ticket t WHERE t.login = session_user AND t.epoch IS NOT NULL;
    IF prefix IS NULL OR (output BETWEEN 0 AND 999) IS NOT TRUE THEN
        RAISE EXCEPTION '% has no ticket for staging output %', session_user, output
        USING ERRCODE = 'insufficient_privilege';
    END IF;
END $$;

-- Raises unless this is the name of one of the session's own staging tables.
CREATE OR REPLACE FUNCTION staging.own_table(name text, OUT output int) LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    output := nullif(split_part(name, '_', 3), '')::int;
    IF output IS NULL
       OR (left(name, -8) = staging.own_prefix(output) AND right(name, 8) ~ '^[0-9a-f]{8}$') IS NOT TRUE
    THEN
        RAISE EXCEPTION '% isn''t a staging table of this attempt', coalesce(quote_literal(name), 'null')
        USING ERRCODE = 'insufficient_privilege';
    END IF;
END $$;

-- An unused name. An attempt has up to 500 tables, and one transaction makes only a few: each takes room in the lock
-- table that all sessions share.
CREATE OR REPLACE FUNCTION staging.new_name(output int, OUT name text) LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    prefix text := staging.own_prefix(output);
    whose text := left(prefix, 40);
BEGIN
    IF (SELECT count(*) FROM pg_class WHERE relnamespace = 'staging'::regnamespace
        AND relname >= (whose || '_')::name AND relname < (whose || '`')::name) >= 500
    THEN
        RAISE EXCEPTION 'an attempt has at most 500 staging tables: use fewer, larger parts'
        USING ERRCODE = 'program_limit_exceeded';
    END IF;
    IF (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'AccessExclusiveLock') >= 100 THEN
        RAISE EXCEPTION 'these are too many staging tables for one transaction'
        USING ERRCODE = 'program_limit_exceeded';
    END IF;
    LOOP
        name := prefix || left(replace(gen_random_uuid()::text, '-', ''), 8);
        EXIT WHEN to_regclass(format('staging.%I', name)) IS NULL;
    END LOOP;
    IF length(name) > 63 THEN
        RAISE EXCEPTION '% is too long for a staging table: no epoch is that high', name
        USING ERRCODE = 'name_too_long';
    END IF;
END $$;

-- A table of these columns, [[name, type], …], for rows of an output; returns its name. Unlogged: staged rows needn't
-- survive a crash, and a table that a crash has emptied is refused by its row count.
CREATE OR REPLACE FUNCTION staging.open_table(output int, columns jsonb) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET default_tablespace = '' SET default_table_access_method = 'heap'
SET search_path = pg_catalog, pg_temp AS $$
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

-- A further table with the same columns, for a part of the rows.
CREATE OR REPLACE FUNCTION staging.open_like(example text) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET default_tablespace = '' SET default_table_access_method = 'heap'
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := staging.new_name(staging.own_table(example));
BEGIN
    EXECUTE format('CREATE UNLOGGED TABLE staging.%I (LIKE staging.%I)', name, example);
    EXECUTE format('GRANT INSERT ON staging.%I TO %I', name, session_user);
    RETURN name;
END $$;

-- Drops tables of the attempt whose rows won't be committed, without waiting for those that are still being loaded.
CREATE OR REPLACE FUNCTION staging.discard(names text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET lock_timeout = '100ms'
SET search_path = pg_catalog, pg_temp AS $$
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

-- Drops all tables of an output.
CREATE OR REPLACE FUNCTION staging.discard_output(output int) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    prefix text := staging.own_prefix(output);
BEGIN
    PERFORM staging.discard(ARRAY(
        SELECT relname::text FROM pg_class
        WHERE relnamespace = 'staging'::regnamespace AND relkind = 'r' AND starts_with(relname::text, prefix)));
END $$;
