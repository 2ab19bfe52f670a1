-- What kind of documents does a shard hold?
-- One row for each shard: shard, corpus, origin, generator, prompt, license, access. `shard_index` has one for each job that used the shard.
CREATE VIEW shard_kinds AS
SELECT
    shard,
    any_value(corpus) AS corpus,
    any_value(origin) AS origin,
    any_value(generator) AS generator,
    any_value(prompt) AS prompt,
    any_value(license) AS license,
    any_value(access) AS access
FROM shard_index
GROUP BY shard;
