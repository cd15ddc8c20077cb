"""What a run leaves for people and tools: records, digests, comparisons, reports."""
