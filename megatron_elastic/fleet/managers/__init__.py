"""Managers: who has the devices of a cluster, starts processes on them and ends these."""
