-- name: add_org
-- The installation's one organisation, made at first start; later replicas find it.
INSERT INTO org (org_id, name) VALUES ($1, $2) ON CONFLICT (only_one) DO NOTHING

-- name: find_org
-- The one organisation.
SELECT org_id FROM org

-- name: add_user
-- A person or a script, known by name; the same name is the same user.
INSERT INTO app_user (user_id, org_id, name) VALUES ($1, $2, $3) ON CONFLICT (org_id, name) DO NOTHING

-- name: find_user
-- A user by name.
SELECT user_id FROM app_user WHERE org_id = $1 AND name = $2

-- name: add_token
-- Only the hash is kept. Adding the same token again changes nothing, not even that it was revoked.
INSERT INTO user_token (token_hash, user_id, label) VALUES ($1, $2, $3) ON CONFLICT (token_hash) DO NOTHING

-- name: find_token
-- The user of a token; a revoked one has none.
SELECT u.user_id, u.org_id, u.name FROM user_token t JOIN app_user u USING (user_id)
WHERE t.token_hash = $1 AND t.revoked_at IS NULL

-- name: revoke_token
-- From now on the token is not valid.
UPDATE user_token SET revoked_at = tl_now() WHERE token_hash = $1 AND revoked_at IS NULL RETURNING token_hash
