"""LongSpec: a draft of one block that reads the cache of its target."""
