"""Device: collectives between devices, by their own libraries."""
