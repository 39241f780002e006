-- What all replicas of an installation share, and none of them owns: see store/installation.py. In a schema of its own,
-- which no role but the owner may use; guests of this database have their grants elsewhere.
CREATE SCHEMA installation;
REVOKE ALL ON SCHEMA installation FROM PUBLIC;

-- `installation_id`, by which a home is known to belong here, and the passwords of the logins that processes share.
CREATE TABLE installation.secret (
    name        text PRIMARY KEY,
    value       text NOT NULL,
    changed_at  timestamptz NOT NULL DEFAULT statement_timestamp()
);

-- All of them are valid; the first one is handed to workers that are started beside a Dispatcher.
CREATE TABLE installation.worker_token (
    token       text PRIMARY KEY,
    position    bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    created_at  timestamptz NOT NULL DEFAULT statement_timestamp()
);

-- The keys that sign task tokens, each from a second on: the latest whose second has come is the one that signs.
CREATE TABLE installation.signing_key (
    signs_from  bigint PRIMARY KEY,
    pem         text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT statement_timestamp()
);
