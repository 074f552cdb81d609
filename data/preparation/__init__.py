"""How data is prepared: digests of raw files, texts encoded in shards by processes, large arrays."""
