-- name: broken_links
-- Stored blocks that aren't the child of the one before them.
SELECT block_number FROM (
    SELECT block_number, parent_hash,
           lag(block_number) OVER below AS number_before, lag(block_hash) OVER below AS hash_before
    FROM {blocks} WINDOW below AS (ORDER BY block_number)
) linked
WHERE number_before IS NOT NULL AND (number_before, hash_before) <> (block_number - 1, parent_hash)
ORDER BY block_number LIMIT 5;

-- name: strays
-- Blocks of which there are rows though the block itself isn't stored.
SELECT DISTINCT r.block_number FROM {rows} r
WHERE NOT EXISTS (SELECT FROM {blocks} b WHERE b.block_number = r.block_number AND b.block_hash = r.block_hash)
ORDER BY r.block_number LIMIT 5;
