"""Token sets behind a URL: shards are prefetched into a size-limited cache that the workers of a machine share."""
