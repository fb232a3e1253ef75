"""What each ZeRO stage shards, and when it communicates."""
