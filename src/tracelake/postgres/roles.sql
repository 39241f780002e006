-- name: role
-- The role before it is changed; a row only if it exists. Default privileges don't count as property: every role may
-- set them, and they have no effect for a role that can't create anything.
SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls AS privileged,
       EXISTS (SELECT FROM pg_auth_members WHERE member = r.oid) AS member,
       EXISTS (SELECT FROM pg_shdepend WHERE refclassid = 'pg_authid'::regclass AND refobjid = r.oid
                                         AND deptype = 'o' AND classid <> 'pg_default_acl'::regclass) AS owner
FROM pg_roles AS r
WHERE rolname = $1::text

-- name: create_role
-- The statement, with name and verifier quoted by the server. $3 sessions at once, unless the database says otherwise.
SELECT format('CREATE ROLE %I LOGIN NOINHERIT CONNECTION LIMIT %s PASSWORD %L', $1::text,
              coalesce(nullif(current_setting('tracelake.guest_connections', true), '')::int, $3::int), $2::text)

-- name: change_role
-- The same for a role that an earlier install made: its password is the one given last.
SELECT format('ALTER ROLE %I LOGIN NOINHERIT CONNECTION LIMIT %s PASSWORD %L', $1::text,
              coalesce(nullif(current_setting('tracelake.guest_connections', true), '')::int, $3::int), $2::text)

-- name: act_as
-- Only a role that may act as $1 can end its sessions and grant rights on its objects; a superuser always may.
SELECT CASE WHEN pg_has_role(current_user, $1::text, 'USAGE') THEN 'SELECT'
            ELSE format('GRANT %I TO CURRENT_USER', $1::text) END

-- name: wait_at_most
-- Sessions of guests are ended long before. This is for sessions that can't be ended.
SET LOCAL lock_timeout = '8s'

-- name: end_blockers
-- Ends the guests' sessions ($2, and attempts') that the session $1 waits for, directly or through others that wait.
-- Only where it waits for the end of a transaction, which a guest can put off. A wait for a table is a wait for work.
WITH RECURSIVE chain(pid, place) AS (
    SELECT $1::int, 0
    UNION
    SELECT b, place + 1 FROM chain, unnest(pg_blocking_pids(chain.pid)) AS b
    WHERE place < 20 AND EXISTS (SELECT FROM pg_locks l WHERE l.pid = chain.pid AND NOT l.granted
                                 AND l.locktype IN ('transactionid', 'tuple', 'object'))
)
SELECT a.usename, a.pid, pg_terminate_backend(a.pid)
FROM pg_stat_activity a
WHERE a.pid IN (SELECT pid FROM chain WHERE place > 0) AND a.usename <> current_user
  AND (a.usename = ANY ($2::text[]) OR a.usename ~ '^tracelake_t_[0-9a-f]{24}$')

-- name: database
-- By name.
SELECT current_database()

-- name: is_superuser
-- Only a superuser may revoke the rights that Postgres grants to PUBLIC.
SELECT rolsuper FROM pg_roles WHERE rolname = current_user

-- name: strip_public
-- Functions, large objects, advisory locks and messages into the log: Postgres lets every role use them in every
-- database. Only a superuser can revoke that.
DO $$
DECLARE
    each regprocedure;
BEGIN
    REVOKE USAGE ON LANGUAGE plpgsql, sql FROM PUBLIC;
    FOR each IN SELECT p.oid::regprocedure FROM pg_proc p
                WHERE p.pronamespace = 'pg_catalog'::regnamespace
                  AND p.proname ~ '^(lo_.*|loread|lowrite|pg_(try_)?advisory_.*|pg_notify|pg_logical_emit_message)$'
                  AND has_function_privilege('public', p.oid, 'EXECUTE')
    LOOP
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', each);
    END LOOP;
END $$

-- name: left_to_public
-- Those of these rights that PUBLIC still has, in words.
SELECT 'the language ' || lanname AS what FROM pg_language
WHERE lanpltrusted AND has_language_privilege('public', oid, 'USAGE')
UNION
SELECT CASE WHEN proname ~ 'advisory' THEN 'advisory locks' WHEN proname ~ '^lo' THEN 'large objects'
            ELSE proname::text END
FROM pg_proc
WHERE pronamespace = 'pg_catalog'::regnamespace
  AND proname ~ '^(lo_.*|loread|lowrite|pg_(try_)?advisory_.*|pg_notify|pg_logical_emit_message)$'
  AND has_function_privilege('public', oid, 'EXECUTE')
ORDER BY what
