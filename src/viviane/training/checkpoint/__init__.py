"""Checkpoints: their format, writing, loading, resharding, and the folder that keeps those of a run."""
