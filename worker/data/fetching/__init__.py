"""Token sets behind a URL: shards are fetched ahead of need into a bounded directory that workers share."""
