"""Running: a fleet of real jobs."""
