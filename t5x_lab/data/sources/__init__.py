"""Text sources: `text_files` reads files of many formats, `sharding` divides files among data shards."""
