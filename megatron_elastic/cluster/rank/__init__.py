"""Rank: how a rank's process comes into being, is told of what happens, and is seen to die."""
