-- Which labels do the documents of a shard have?
-- One row for each shard: shard, labels (JSON: a list of {"license", "access"}; several where the store holds the same text under several).
CREATE VIEW shard_labels AS
SELECT shard, to_json(list_sort(list(DISTINCT {'license': license, 'access': access})))::VARCHAR AS labels
FROM shard_index
GROUP BY shard;
