"""Many jobs, one pool of devices: speed tables, a controller that shares devices out, and a simulation on traces."""
