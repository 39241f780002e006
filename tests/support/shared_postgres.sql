-- name: lock
-- One process builds a template; the lock goes with the session, also when that crashes.
SELECT pg_advisory_lock(hashtextextended(%(template)s, 0));

-- name: find_template
-- Only a finished build is marked as a template.
SELECT 1 FROM pg_database WHERE datname = %(template)s AND datistemplate;

-- name: create
-- From template0, so that nothing put into an external server's template1 gets into the tests.
CREATE DATABASE {database} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';

-- name: mark_template
-- Says that the build has finished; connections are refused from here on, since one would block cloning.
ALTER DATABASE {template} WITH IS_TEMPLATE true ALLOW_CONNECTIONS false;

-- name: unmark_template
-- A template can't be dropped.
ALTER DATABASE {template} WITH IS_TEMPLATE false;

-- name: clone
-- The default strategy writes the copy into the log as well; the checkpoint that this one needs costs nothing on a
-- server that syncs nothing.
CREATE DATABASE {database} TEMPLATE {template} STRATEGY FILE_COPY;

-- name: drop
-- FORCE: a test that leaks a connection fails by itself, not every test after it.
DROP DATABASE IF EXISTS {database} WITH (FORCE);

-- name: list_run
-- Clones and templates of one run alike.
SELECT datname FROM pg_database WHERE starts_with(datname, %(prefix)s);
