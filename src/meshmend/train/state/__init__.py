"""The state of a job: digests, shards, checkpoints, exports."""
