-- Operators own nothing here and share no login. Each attempt has a ticket: a login of its own, which may call the
-- functions in `staging`, insert into the tables that these have made for it and read what it was let read. What a
-- commit reads was made by the platform, column by column, and is looked at once more before it is read.

-- Whatever operators have made under the login that they used to share: tables, and whatever else they thought of.
-- That role stays, without a login, as the owner of staging tables. Rows that were staged are staged again.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'tracelake_staging') THEN
        DROP OWNED BY tracelake_staging;
    END IF;
END $$;

-- The attempts that may use this database now. A ticket that nobody renews is over.
CREATE TABLE tracelake.ticket (
    login       text PRIMARY KEY,
    task_id     uuid NOT NULL,
    attempt     bigint NOT NULL,
    epoch       bigint,
    reads       uuid[] NOT NULL,
    opened_at   timestamptz NOT NULL DEFAULT now(),
    alive_until timestamptz NOT NULL DEFAULT now() + interval '10 minutes'
);
CREATE INDEX ticket_task ON tracelake.ticket (task_id);

-- A row per dataset version, to be locked: unlike an advisory lock, nobody can hold it who has no right to it.
CREATE TABLE tracelake.version_lock (dataset_version uuid PRIMARY KEY);

CREATE OR REPLACE FUNCTION tracelake.lock_version(version uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM tracelake.version_lock WHERE dataset_version = version FOR UPDATE;
    IF NOT FOUND THEN
        INSERT INTO tracelake.version_lock VALUES (version) ON CONFLICT DO NOTHING;
        PERFORM FROM tracelake.version_lock WHERE dataset_version = version FOR UPDATE;
    END IF;
END $$;

-- One change to logins at a time: Postgres doesn't wait where two of them change the rights on one thing, it fails.
CREATE FUNCTION tracelake.lock_tickets() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tracelake.lock_version('00000000-0000-0000-0000-000000000000');
END $$;

-- These two are called often, and a session keeps the plans of this language.
CREATE OR REPLACE FUNCTION tracelake.fence_holds(version uuid, my_epoch bigint, my_span int8range, my_inputs jsonb)
RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN NOT EXISTS (
        SELECT FROM tracelake.fence f
        WHERE f.dataset_version = version AND f.span && my_span
          AND (f.epoch > my_epoch
               OR EXISTS (SELECT FROM jsonb_each_text(f.inputs) theirs
                          WHERE (my_inputs ->> theirs.key)::bigint < theirs.value::bigint))
    );
END $$;

CREATE OR REPLACE FUNCTION tracelake.has_column(relation regclass, name text) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM pg_attribute
                   WHERE attrelid = relation AND attname = name AND attnum > 0 AND NOT attisdropped);
END $$;

-- The four things that only the owner of this database can do for the writer: each takes the name of a ticket's login
-- and of nobody else's.
CREATE FUNCTION tracelake.check_login(login text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF login IS NULL OR length(login) <> 36 OR login !~ '^tracelake_t_[0-9a-f]+$' THEN
        RAISE EXCEPTION '% isn''t the login of a ticket', coalesce(quote_literal(login), 'null')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- It can log in to this database, and that is all. Half of the connections at most: no attempt keeps the others out.
-- What it sets for itself in a session it may set as it likes; files for sorting are limited by the superuser.
CREATE FUNCTION tracelake.make_login(login text, verifier text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    PERFORM tracelake.check_login(login);
    IF verifier IS NULL OR verifier !~ '^SCRAM-SHA-256\$[0-9]+:[A-Za-z0-9+/=]+\$[A-Za-z0-9+/=]+:[A-Za-z0-9+/=]+$' THEN
        RAISE EXCEPTION 'a login needs a SCRAM verifier' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format(
        'CREATE ROLE %I LOGIN NOINHERIT NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS
             CONNECTION LIMIT %s PASSWORD %L VALID UNTIL %L',
        login, coalesce(current_setting('tracelake.attempt_connections', true), '16')::int, verifier,
        now() + interval '2 hours');
    IF NOT pg_has_role(current_user, login, 'USAGE') THEN
        EXECUTE format('GRANT %I TO CURRENT_USER', login);
    END IF;
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), login);
    EXECUTE format('ALTER ROLE %I SET idle_in_transaction_session_timeout = ''10min''', login);
    IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        EXECUTE format('ALTER ROLE %I SET temp_file_limit = ''10GB''', login);
    END IF;
END $$;

-- A ticket that is used for longer than a login is valid.
CREATE FUNCTION tracelake.extend_login(login text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET lock_timeout = '200ms' AS $$
BEGIN
    PERFORM tracelake.check_login(login);
    EXECUTE format('ALTER ROLE %I VALID UNTIL %L', login, now() + interval '2 hours');
EXCEPTION WHEN lock_not_available THEN
    NULL;  -- It is changing itself, and keeps nobody waiting by that. There are more looks before it ends.
END $$;

-- Its sessions end, its rights and all that it may have come to own are gone. Answers whether the login is: what it
-- holds in another database of this server keeps it, or a commit that is just letting it read; it is of no use then.
-- A session may hold its own role's row (it can always change its password), and another may log in as soon as one is
-- ended. So nobody gets in by it from this commit on, whatever else succeeds, and the next look finds it alone.
CREATE FUNCTION tracelake.drop_login(login text) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET lock_timeout = '1s' AS $$
BEGIN
    PERFORM tracelake.check_login(login);
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = login) THEN
        RETURN true;
    END IF;
    EXECUTE format('REVOKE CONNECT ON DATABASE %I FROM %I', current_database(), login);
    PERFORM pg_terminate_backend(pid, 500) FROM pg_stat_activity WHERE usename = login;
    BEGIN
        EXECUTE format('ALTER ROLE %I NOLOGIN PASSWORD NULL', login);
        PERFORM pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = login;
        EXECUTE format('DROP OWNED BY %I CASCADE', login);
    EXCEPTION WHEN lock_not_available THEN
        RETURN false;
    END;
    BEGIN
        EXECUTE format('DROP ROLE %I', login);
        RETURN true;
    EXCEPTION WHEN dependent_objects_still_exist OR object_in_use OR lock_not_available THEN
        RETURN false;
    END;
END $$;

-- A login reads a dataset version: now, if there is a table, and otherwise when the first commit makes it. One that
-- has just been dropped reads nothing any more.
CREATE FUNCTION tracelake.let_read(login text, version uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    target regclass := to_regclass(format('data.%I', tracelake.table_of(version)));
BEGIN
    IF target IS NOT NULL THEN
        EXECUTE format('GRANT SELECT ON %s TO %I', target, login);
    END IF;
EXCEPTION WHEN undefined_object THEN
    NULL;
END $$;

-- Versions without a table are locked first, so that none is made between a look at it and the ticket's being there.
CREATE FUNCTION tracelake.open_ticket(
    new_login text, verifier text, task uuid, my_attempt bigint, my_epoch bigint, readable uuid[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    version uuid;
    over text;
BEGIN
    FOR version IN SELECT DISTINCT v FROM unnest(readable) v
                   WHERE to_regclass(format('data.%I', tracelake.table_of(v))) IS NULL ORDER BY v
    LOOP
        PERFORM tracelake.lock_version(version);
    END LOOP;
    PERFORM tracelake.lock_tickets();
    IF EXISTS (SELECT FROM tracelake.ticket WHERE task_id = task AND attempt > my_attempt) THEN
        RAISE EXCEPTION 'a newer attempt of the task has begun' USING ERRCODE = 'TL001';
    END IF;
    -- Earlier attempts of the task are superseded.
    FOR over IN SELECT login FROM tracelake.ticket WHERE task_id = task AND attempt < my_attempt LOOP
        PERFORM tracelake.close_ticket(over);
    END LOOP;
    PERFORM tracelake.make_login(new_login, verifier);
    INSERT INTO tracelake.ticket (login, task_id, attempt, epoch, reads)
    VALUES (new_login, task, my_attempt, my_epoch, readable);
    FOR version IN SELECT DISTINCT v FROM unnest(readable) v LOOP
        PERFORM tracelake.let_read(new_login, version);
    END LOOP;
END $$;

-- Nothing is left of it but tables, which are swept once nobody loads them any more.
CREATE FUNCTION tracelake.close_ticket(old_login text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tracelake.lock_tickets();
    IF tracelake.drop_login(old_login) THEN
        DELETE FROM tracelake.ticket WHERE login = old_login;
    ELSE
        UPDATE tracelake.ticket SET alive_until = now() + interval '1 minute' WHERE login = old_login;
    END IF;
END $$;

-- Somebody still works with these. Answers which of them are gone: swept while nobody could renew them.
CREATE FUNCTION tracelake.renew_tickets(logins text[]) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    UPDATE tracelake.ticket SET alive_until = now() + interval '10 minutes' WHERE login = ANY (logins);
    PERFORM tracelake.extend_login(t.login)
    FROM tracelake.ticket t JOIN pg_roles r ON r.rolname = t.login
    WHERE t.login = ANY (logins) AND r.rolvaliduntil < now() + interval '1 hour';
    RETURN ARRAY(SELECT l FROM unnest(logins) l WHERE NOT EXISTS (SELECT FROM tracelake.ticket t WHERE t.login = l));
END $$;

-- Of wrappers that are gone, and logins whose ticket is (after a restore): a few at a time, whoever comes.
CREATE FUNCTION tracelake.sweep_tickets() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    over text;
BEGIN
    PERFORM tracelake.lock_tickets();
    FOR over IN
        (SELECT login FROM tracelake.ticket WHERE alive_until < now() ORDER BY alive_until LIMIT 20)
        UNION ALL
        (SELECT r.rolname::text
         FROM pg_database d CROSS JOIN aclexplode(d.datacl) a JOIN pg_roles r ON r.oid = a.grantee
         WHERE d.datname = current_database() AND starts_with(r.rolname::text, 'tracelake_t_')
           AND NOT EXISTS (SELECT FROM tracelake.ticket t WHERE t.login = r.rolname::text) LIMIT 20)
    LOOP
        PERFORM tracelake.close_ticket(over);
    END LOOP;
END $$;

-- What operators and executors call, by the login of their ticket. They run as the owner of staging tables, who can do
-- nothing but that, and go by who has logged in: a ticket is good for its own attempt's tables.

-- What the names of the session's staging tables begin with, up to the output's number.
CREATE FUNCTION staging.own_prefix(output int, OUT prefix text) LANGUAGE plpgsql STABLE SECURITY DEFINER AS $$
BEGIN
    SELECT format('staging_%s_%s_%s_', replace(t.task_id::text, '-', ''), output, t.epoch) INTO prefix
    FROM tracelake.ticket t WHERE t.login = session_user AND t.epoch IS NOT NULL;
    IF prefix IS NULL OR output NOT BETWEEN 0 AND 999 THEN
        RAISE EXCEPTION '% has no ticket for staging output %', session_user, output
        USING ERRCODE = 'insufficient_privilege';
    END IF;
END $$;

-- The session's own staging table of this name, or an error.
CREATE FUNCTION staging.own_table(name text, OUT output int) LANGUAGE plpgsql STABLE SECURITY DEFINER AS $$
BEGIN
    output := nullif(split_part(name, '_', 3), '')::int;
    IF output IS NULL OR left(name, -8) <> staging.own_prefix(output) OR right(name, 8) !~ '^[0-9a-f]+$' THEN
        RAISE EXCEPTION '% isn''t a staging table of this attempt', coalesce(quote_literal(name), 'null')
        USING ERRCODE = 'insufficient_privilege';
    END IF;
END $$;

-- A name that nobody has. An attempt has up to 500 tables, and a transaction makes only a few: each takes room in what
-- all sessions share.
CREATE FUNCTION staging.new_name(output int, OUT name text) LANGUAGE plpgsql SECURITY DEFINER AS $$
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

-- A table of these columns, [[name, type], …], for rows of an output; answers its name. Unlogged: what is staged
-- needn't survive a crash, and what a crash has emptied is refused by its count.
CREATE FUNCTION staging.open_table(output int, columns jsonb) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET default_tablespace = '' SET default_table_access_method = 'heap' AS $$
DECLARE
    name text := staging.new_name(output);
    declared text;
    wrong text;
BEGIN
    IF jsonb_typeof(columns) <> 'array' OR jsonb_array_length(columns) NOT BETWEEN 1 AND 1600 THEN
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

-- A further one with the same columns, for a part of the rows.
CREATE FUNCTION staging.open_like(example text) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET default_tablespace = '' SET default_table_access_method = 'heap' AS $$
DECLARE
    name text := staging.new_name(staging.own_table(example));
BEGIN
    EXECUTE format('CREATE UNLOGGED TABLE staging.%I (LIKE staging.%I)', name, example);
    EXECUTE format('GRANT INSERT ON staging.%I TO %I', name, session_user);
    RETURN name;
END $$;

-- Tables of the attempt whose rows aren't going to be committed. What somebody is still loading isn't waited for.
CREATE FUNCTION staging.discard(names text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET lock_timeout = '100ms' AS $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY names LOOP
        PERFORM staging.own_table(name);
        BEGIN
            EXECUTE format('DROP TABLE IF EXISTS staging.%I', name);
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
END $$;

-- All of an output's.
CREATE FUNCTION staging.discard_output(output int) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    prefix text := staging.own_prefix(output);
BEGIN
    PERFORM staging.discard(ARRAY(
        SELECT relname::text FROM pg_class
        WHERE relnamespace = 'staging'::regnamespace AND relkind = 'r' AND starts_with(relname::text, prefix)));
END $$;

-- Is this a table as `staging.open_table` makes them, and nothing but that? Nobody else can make one here; that a commit
-- runs no code but its own doesn't rest on this alone.
CREATE FUNCTION tracelake.check_plain(staged regclass) RETURNS void LANGUAGE plpgsql STABLE AS $$
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

-- As before, and only plain tables. Whoever is in the middle of a load is waited for a little, since others wait for
-- this one's lock.
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
    IF found <> expected THEN
        RAISE EXCEPTION '% rows were staged in %, and % are there', expected, staged, found USING ERRCODE = 'TL003';
    END IF;
    IF outside > 0 AND NOT appends THEN
        RAISE EXCEPTION '% staged rows lie outside of blocks % to %', outside, first_block, last_block
        USING ERRCODE = 'TL002';
    END IF;
END $$;

-- As before; whoever has a ticket for the version reads what is made.
CREATE OR REPLACE FUNCTION tracelake.ensure_table(version uuid, staged regclass, key_columns text[], layout jsonb)
RETURNS regclass LANGUAGE plpgsql AS $$
DECLARE
    name text := tracelake.table_of(version);
    target regclass := to_regclass(format('data.%I', name));
    differing text;
BEGIN
    IF target IS NULL THEN
        target := tracelake.create_table(name, staged, key_columns, layout);
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

-- As before, of tables that are the attempt's own by their names.
CREATE OR REPLACE FUNCTION tracelake.commit_output(
    version uuid, task uuid, my_epoch bigint, my_inputs jsonb, first_block bigint, last_block bigint,
    staging_tables text[], staged_rows bigint[], kept boolean, appends boolean, key_columns text[], layout jsonb
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    my_span int8range := int8range(first_block, last_block, '[]');
    whose text[] := ARRAY['staging', replace(task::text, '-', ''), my_epoch::text];
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
        IF cardinality(name) <> 5 OR ARRAY[name[1], name[2], name[4]] <> whose THEN
            RAISE EXCEPTION '% isn''t a staging table of this attempt', staging_tables[place] USING ERRCODE = 'TL002';
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

-- As before; whoever has a ticket for the version reads what is made.
ALTER FUNCTION tracelake.create_buffer(uuid, jsonb, text[]) RENAME TO create_buffer_table;
CREATE FUNCTION tracelake.create_buffer(version uuid, columns jsonb, key_columns text[])
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tracelake.create_buffer_table(version, columns, key_columns);
    PERFORM tracelake.let_read(t.login, version) FROM tracelake.ticket t WHERE version = ANY (t.reads);
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
