"""Coordination: the shell around ``cluster.protocol``, on the node that coordinates."""
