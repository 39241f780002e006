-- name: role_exists
-- A role that an earlier install made keeps its name and gets the password given last.
SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1::text)

-- name: create_role
-- The statement, with name and verifier quoted by the server.
SELECT format('CREATE ROLE %I LOGIN PASSWORD %L', $1::text, $2::text)

-- name: change_role
-- The same for a role that is there.
SELECT format('ALTER ROLE %I LOGIN PASSWORD %L', $1::text, $2::text)

-- name: installer
-- Whether this role has the rights that an install needs.
SELECT rolname AS name, rolsuper OR rolcreaterole AS makes_roles, rolsuper AS is_superuser,
       current_setting('max_prepared_transactions')::int AS prepared
FROM pg_roles WHERE rolname = current_user

-- name: settings
-- A role's settings in this database and in all databases; the role can change them itself.
SELECT ARRAY(SELECT CASE WHEN s.setdatabase = 0 THEN 'everywhere ' ELSE '' END || c
             FROM pg_db_role_setting s JOIN pg_roles r ON r.oid = s.setrole, unnest(s.setconfig) c
             WHERE r.rolname = $1::text AND s.setdatabase IN
                   (0, (SELECT oid FROM pg_database WHERE datname = current_database())))

-- name: reset_settings
-- Reset all settings of a role.
SELECT format('ALTER ROLE %1$I RESET ALL; ALTER ROLE %1$I IN DATABASE %2$I RESET ALL', $1::text, current_database())

-- name: one_at_a_time
-- Rights change here and wherever a ticket is opened or closed.
SELECT tracelake.lock_tickets()

-- name: create_owner
-- The role that owns staging tables. It has no login.
SELECT format('CREATE ROLE %I NOLOGIN', $1::text)

-- name: change_owner
-- It used to be a login, which operators shared.
SELECT format('ALTER ROLE %I NOLOGIN PASSWORD NULL', $1::text)

-- name: end_sessions
-- Sessions from when the role still had a login.
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = $1::text

-- name: close_database
-- Without a grant no role can connect or create anything.
SELECT format('REVOKE ALL ON DATABASE %I FROM PUBLIC; REVOKE ALL ON SCHEMA public FROM PUBLIC', current_database())

-- name: reserve
-- $1 may use reserved connections (Postgres 16 and later), so that attempts can't keep it out.
SELECT CASE WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = 'pg_use_reserved_connections')
            THEN format('GRANT pg_use_reserved_connections TO %I', $1::text) ELSE 'SELECT' END

-- name: open_databases
-- Other databases of this server that PUBLIC may connect to, and so an attempt's login.
SELECT datname FROM pg_database
WHERE datallowconn AND datname <> current_database() AND has_database_privilege('public', oid, 'CONNECT')
ORDER BY datname

-- name: grants
-- $1 owns staging tables, and the functions that make them; $2 commits them, and may do with them what $1 may. A
-- worker that stands still in the middle of a commit keeps its successor's fence waiting: not for long. A sink, which
-- is $2 as well, stages in tables of its own session.
SELECT format(
    'REVOKE ALL ON DATABASE %3$I FROM %1$I;
     ALTER ROLE %1$I IN DATABASE %3$I RESET ALL;
     GRANT CONNECT, TEMPORARY ON DATABASE %3$I TO %2$I;
     GRANT USAGE, CREATE ON SCHEMA staging TO %1$I;
     GRANT USAGE ON SCHEMA tracelake TO %1$I;
     GRANT SELECT ON tracelake.ticket TO %1$I;
     GRANT %1$I TO %2$I;
     GRANT USAGE ON SCHEMA tracelake TO %2$I;
     GRANT USAGE, CREATE ON SCHEMA data TO %2$I;
     GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA tracelake TO %2$I;
     GRANT USAGE ON ALL SEQUENCES IN SCHEMA tracelake TO %2$I;
     ALTER ROLE %2$I IN DATABASE %3$I SET idle_in_transaction_session_timeout = ''10s''',
    $1::text, $2::text, current_database()
)

-- name: open_staging
-- PUBLIC may use the names in these two schemas, and call the functions that check the ticket. They run as $1.
SELECT 'GRANT USAGE ON SCHEMA staging, data TO PUBLIC;
        REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA staging FROM PUBLIC;
        GRANT EXECUTE ON FUNCTION staging.open_table(int, jsonb), staging.open_like(text),
                                  staging.discard(text[]), staging.discard_output(int) TO PUBLIC; '
       || string_agg(format('ALTER FUNCTION %s OWNER TO %I', p.oid::regprocedure, $1::text), '; ')
FROM pg_proc p WHERE p.pronamespace = 'staging'::regnamespace

-- name: grant_reading
-- $1 reads what is committed, tables that $2 will make included; it can't write, nor wait for ever.
SELECT format(
    'GRANT CONNECT ON DATABASE %3$I TO %1$I;
     GRANT USAGE ON SCHEMA data TO %1$I;
     GRANT SELECT ON ALL TABLES IN SCHEMA data TO %1$I;
     ALTER DEFAULT PRIVILEGES FOR ROLE %2$I IN SCHEMA data GRANT SELECT ON TABLES TO %1$I;
     ALTER ROLE %1$I IN DATABASE %3$I SET search_path = data;
     ALTER ROLE %1$I IN DATABASE %3$I SET default_transaction_read_only = on;
     ALTER ROLE %1$I IN DATABASE %3$I SET statement_timeout = ''5min'';
     ALTER ROLE %1$I IN DATABASE %3$I SET idle_in_transaction_session_timeout = ''5min''',
    $1::text, $2::text, current_database()
)

-- name: lacks_writing
-- Whether $2 lacks anything of what `grants` gives it; $1 is whose tables it may empty.
SELECT NOT (has_database_privilege($2::text, current_database(), 'CONNECT')
            AND has_database_privilege($2::text, current_database(), 'TEMPORARY')
            AND has_schema_privilege($2::text, 'tracelake', 'USAGE') AND has_schema_privilege($2::text, 'data', 'CREATE')
            AND pg_has_role($2::text, $1::text, 'USAGE'))
    OR EXISTS (SELECT FROM pg_class c CROSS JOIN unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) privilege
               WHERE c.relnamespace = 'tracelake'::regnamespace AND c.relkind = 'r'
                 AND NOT has_table_privilege($2::text, c.oid, privilege))

-- name: lacks_reading
-- Whether $1 lacks anything of what `grant_reading` gives it: a role can drop the default privileges that it was given,
-- and $2, whose tables they are for, can revoke them.
SELECT NOT (has_database_privilege($1::text, current_database(), 'CONNECT')
            AND has_schema_privilege($1::text, 'data', 'USAGE'))
    OR EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = 'data'::regnamespace AND c.relkind IN ('r', 'p')
                 AND NOT has_table_privilege($1::text, c.oid, 'SELECT'))
    OR NOT EXISTS (SELECT FROM pg_default_acl d CROSS JOIN aclexplode(d.defaclacl) a
                   WHERE d.defaclrole = $2::text::regrole AND d.defaclnamespace = 'data'::regnamespace
                     AND d.defaclobjtype = 'r' AND a.grantee = $1::text::regrole AND a.privilege_type = 'SELECT')

-- name: revoke_functions
-- Postgres lets PUBLIC execute every new function.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA tracelake FROM PUBLIC

-- name: grant_functions
-- The writer calls them.
SELECT format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tracelake TO %I', $1::text)

-- name: keep_login
-- The password of role $1: $2, unless there is one already.
INSERT INTO installation.login AS kept (role, password) VALUES ($1, $2)
ON CONFLICT (role) DO UPDATE SET password = kept.password
RETURNING password

-- name: replace_login
-- The password of role $1 is $2 from now on.
INSERT INTO installation.login (role, password) VALUES ($1, $2)
ON CONFLICT (role) DO UPDATE SET password = excluded.password, changed_at = statement_timestamp()
RETURNING password
