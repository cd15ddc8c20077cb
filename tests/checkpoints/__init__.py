"""Checkpoints: saved, loaded, exchanged."""
