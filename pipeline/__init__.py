"""The data mix layer: sources, document identity, influence, tiers, the shard pool."""
