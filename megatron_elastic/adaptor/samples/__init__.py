"""Samples: what training reads, as a function of its number alone, and the indices that say which text that is."""
