"""Shell: models of what is around the protocol: agents, the coordinator, its records, and who leads."""
