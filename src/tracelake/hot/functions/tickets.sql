-- Tickets: each attempt has a login of its own, which may call the functions in `staging`, insert into the tables
-- that these have made for it, and read the datasets that its ticket names.

-- One change to logins at a time: where two sessions change the rights on one object Postgres doesn't wait, it fails.
CREATE OR REPLACE FUNCTION tracelake.lock_tickets() RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM tracelake.lock_version('00000000-0000-0000-0000-000000000000');
END $$;

-- The functions that act as the owner of this database take the name of a ticket's login and of no other role.
CREATE OR REPLACE FUNCTION tracelake.check_login(login text) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF login IS NULL OR length(login) <> 36 OR login !~ '^tracelake_t_[0-9a-f]+$' THEN
        RAISE EXCEPTION '% isn''t the login of a ticket', coalesce(quote_literal(login), 'null')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- A role that can log in to this database and do nothing else. Its connections are limited, so that no attempt keeps the
-- others out. A session may change its own settings; temporary files are limited by the superuser.
CREATE OR REPLACE FUNCTION tracelake.make_login(login text, verifier text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
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

-- For a ticket that is in use for longer than a login is valid.
CREATE OR REPLACE FUNCTION tracelake.extend_login(login text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET lock_timeout = '200ms'
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM tracelake.check_login(login);
    EXECUTE format('ALTER ROLE %I VALID UNTIL %L', login, now() + interval '2 hours');
EXCEPTION WHEN lock_not_available THEN
    NULL;  -- The role is locked by its own session; the next renewal retries.
END $$;

-- Ends the login's sessions, drops its rights and all that it may own. Returns whether the role is gone: objects in
-- another database of this server keep it, or a commit that is just granting it SELECT; it is of no use then. A
-- session may hold its own role's row (it can always change its password), and another may log in as soon as one is
-- ended. So the right to connect goes first, whatever else succeeds, and the next sweep finds the role alone.
CREATE OR REPLACE FUNCTION tracelake.drop_login(login text) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET lock_timeout = '1s'
SET search_path = pg_catalog, pg_temp AS $$
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

-- Versions without a table are locked first, so that none is made between the look at it and the ticket's insert.
CREATE OR REPLACE FUNCTION tracelake.open_ticket(
    new_login text, verifier text, task uuid, my_attempt bigint, my_epoch bigint, readable uuid[]
) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
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

-- Leaves nothing but staging tables, which are swept once no session loads them any more.
CREATE OR REPLACE FUNCTION tracelake.close_ticket(old_login text) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM tracelake.lock_tickets();
    IF tracelake.drop_login(old_login) THEN
        DELETE FROM tracelake.ticket WHERE login = old_login;
    ELSE
        UPDATE tracelake.ticket SET alive_until = now() + interval '1 minute' WHERE login = old_login;
    END IF;
END $$;

-- Returns those of the logins that are gone: swept while they weren't renewed.
CREATE OR REPLACE FUNCTION tracelake.renew_tickets(logins text[]) RETURNS text[] LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE tracelake.ticket SET alive_until = now() + interval '10 minutes' WHERE login = ANY (logins);
    PERFORM tracelake.extend_login(t.login)
    FROM tracelake.ticket t JOIN pg_roles r ON r.rolname = t.login
    WHERE t.login = ANY (logins) AND r.rolvaliduntil < now() + interval '1 hour';
    RETURN ARRAY(SELECT l FROM unnest(logins) l WHERE NOT EXISTS (SELECT FROM tracelake.ticket t WHERE t.login = l));
END $$;

-- Closes tickets of wrappers that are gone, and drops logins without a ticket (after a restore), a few per call.
CREATE OR REPLACE FUNCTION tracelake.sweep_tickets() RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
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

-- Every login can change its own role and revoke its own rights, and Postgres makes other sessions that change the
-- same catalogue row wait for the end of that transaction; opening or closing a ticket changes the database's row. So
-- a second session of the writer frees one that waits: it ends the guests' sessions that it waits for, directly or
-- through others. Not where it waits for a table, which is work. Returns how many were ended.
CREATE OR REPLACE FUNCTION tracelake.end_blockers(waiting int) RETURNS int LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
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
