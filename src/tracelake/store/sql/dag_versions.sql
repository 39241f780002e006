-- name: list_versions
-- A page of a DAG's versions, newest first.
SELECT v.version, v.version = d.active_version AS active, jsonb_array_length(v.spec->'jobs') AS jobs, v.created_at,
       v.created_by
FROM dag d JOIN dag_version v ON v.dag_name = d.name
WHERE d.org_id = $1 AND d.name = $2 AND v.version < $3 ORDER BY v.version DESC LIMIT $4

-- name: active_version
-- The version of a DAG that counts.
SELECT active_version FROM dag WHERE org_id = $1 AND name = $2

-- name: version
-- A file as it was deployed.
SELECT v.version, v.version = d.active_version AS active, jsonb_array_length(v.spec->'jobs') AS jobs, v.created_at,
       v.created_by, v.dag_name, v.yaml
FROM dag d JOIN dag_version v ON v.dag_name = d.name
WHERE d.org_id = $1 AND d.name = $2 AND v.version = $3
