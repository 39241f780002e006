-- name: lock
-- Replicas that start together, or apply an edit at once, take turns.
LOCK TABLE installation.secret IN SHARE ROW EXCLUSIVE MODE

-- name: secrets
-- All secrets by name.
SELECT name, value FROM installation.secret

-- name: add_secret
-- Made once, by the first replica; the others read it.
INSERT INTO installation.secret (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING

-- name: change_secret
-- Only on a person's request; the Dispatchers notice.
UPDATE installation.secret SET value = $2, changed_at = statement_timestamp() WHERE name = $1

-- name: worker_tokens
-- Worker tokens in the order in which they were added.
SELECT token FROM installation.worker_token ORDER BY position

-- name: add_worker_token
-- Valid at every replica from its next pass on.
INSERT INTO installation.worker_token (token) VALUES ($1) ON CONFLICT (token) DO NOTHING

-- name: remove_worker_token
-- Invalid at every replica from its next pass on.
DELETE FROM installation.worker_token WHERE token = $1

-- name: signing_keys
-- Signing keys, oldest first.
SELECT signs_from, pem FROM installation.signing_key ORDER BY signs_from

-- name: add_signing_key
-- Of two keys made for the same second, the first one stays.
INSERT INTO installation.signing_key (signs_from, pem) VALUES ($1, $2) ON CONFLICT (signs_from) DO NOTHING

-- name: remove_signing_key
-- A key that is no longer needed, or no longer trusted.
DELETE FROM installation.signing_key WHERE signs_from = $1

-- name: knows_token
-- Whether this installation has ever accepted the token, revoked ones included.
SELECT 1 FROM user_token WHERE token_hash = $1

-- name: is_installed
-- Whether there is an installation to join: its table exists from the first Dispatcher's start on.
SELECT to_regclass('installation.secret') IS NOT NULL

-- name: advance_epochs
-- Beyond every epoch that was ever drawn, including those after the backup.
SELECT setval('epoch_seq', nextval('epoch_seq') + $1::bigint)
