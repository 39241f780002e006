-- name: roles
-- Every role that didn't come with Postgres, what it is, and whose rights it has.
SELECT r.rolname::text,
       concat_ws(', ', CASE WHEN rolcanlogin THEN 'login' END, CASE WHEN rolsuper THEN 'superuser' END,
                 CASE WHEN rolcreaterole THEN 'createrole' END, CASE WHEN rolcreatedb THEN 'createdb' END,
                 CASE WHEN rolreplication THEN 'replication' END, CASE WHEN rolbypassrls THEN 'bypassrls' END),
       ARRAY(SELECT roleid::regrole::text FROM pg_auth_members WHERE member = r.oid)
FROM pg_roles AS r
WHERE rolname !~ '^pg_'

-- name: grants
-- Who may do what with what isn't theirs: in this database, and in Postgres's own schemas beyond what it came with.
WITH ours AS (
    SELECT oid, nspname::text AS name FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
), held (kind, object, owner, acl) AS (
    SELECT 'database', datname::text, datdba, coalesce(datacl, acldefault('d', datdba))
    FROM pg_database WHERE datname = current_database()
    UNION ALL
    SELECT 'schema', name, nspowner, coalesce(nspacl, acldefault('n', nspowner)) FROM pg_namespace JOIN ours USING (oid)
    UNION ALL
    SELECT CASE relkind WHEN 'S' THEN 'sequence' ELSE 'table' END, name || '.' || relname, relowner,
           coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner))
    FROM pg_class JOIN ours ON ours.oid = relnamespace WHERE relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
    UNION ALL
    SELECT 'column', name || '.' || relname || '.' || attname, relowner, attacl
    FROM pg_attribute JOIN pg_class AS c ON c.oid = attrelid JOIN ours ON ours.oid = relnamespace WHERE attacl IS NOT NULL
    UNION ALL
    SELECT 'function', name || '.' || proname, proowner, coalesce(proacl, acldefault('f', proowner))
    FROM pg_proc JOIN ours ON ours.oid = pronamespace
    UNION ALL
    SELECT 'language', lanname::text, lanowner, coalesce(lanacl, acldefault('l', lanowner))
    FROM pg_language WHERE lanpltrusted
    UNION ALL
    SELECT 'large object', oid::text, lomowner, coalesce(lomacl, acldefault('L', lomowner)) FROM pg_largeobject_metadata
    UNION ALL
    SELECT 'parameter', parname, 10, paracl FROM pg_parameter_acl
    UNION ALL
    SELECT 'server', srvname::text, srvowner, coalesce(srvacl, acldefault('S', srvowner)) FROM pg_foreign_server
    UNION ALL
    SELECT 'default', coalesce(defaclnamespace::regnamespace::text, '*') || ' ' || defaclobjtype::text, defaclrole, defaclacl
    FROM pg_default_acl
), system_held AS (
    SELECT 'table' AS kind, oid::regclass::text AS object, relowner AS owner, a.grantee, a.privilege_type
    FROM pg_class AS c, aclexplode(relacl) AS a WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
    EXCEPT
    SELECT 'table', objoid::regclass::text, relowner, a.grantee, a.privilege_type
    FROM pg_init_privs JOIN pg_class AS c ON c.oid = objoid, aclexplode(initprivs) AS a
    WHERE classoid = 'pg_class'::regclass AND objsubid = 0
)
SELECT kind, object, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END,
       array_agg(DISTINCT lower(privilege_type))
FROM (
    SELECT kind, object, owner, a.grantee, a.privilege_type FROM held, aclexplode(acl) AS a
    UNION ALL
    SELECT kind, object, owner, grantee, privilege_type FROM system_held
) AS every
WHERE grantee <> owner
GROUP BY 1, 2, 3
ORDER BY 1, 2, 3

-- name: owners
-- What belongs to a role that isn't the superuser.
SELECT kind, object, owner::regrole::text FROM (
    SELECT 'schema' AS kind, nspname::text AS object, nspowner AS owner FROM pg_namespace
    UNION ALL
    SELECT 'table', relnamespace::regnamespace::text || '.' || relname, relowner FROM pg_class
    WHERE relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
    UNION ALL
    SELECT 'function', pronamespace::regnamespace::text || '.' || proname, proowner FROM pg_proc
    UNION ALL
    SELECT 'large object', oid::text, lomowner FROM pg_largeobject_metadata
) AS every
WHERE owner NOT IN (SELECT oid FROM pg_roles WHERE rolsuper)
ORDER BY 1, 2
