"""Numbers that do not depend on placement: keyed random draws, exact sums, reductions in canonical order."""
