"""Checkpoints: what a file holds, writing, loading and resharding them, and the folder that keeps them."""
