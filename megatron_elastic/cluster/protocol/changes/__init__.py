"""Changes: layouts that are wanted while all is well, by people, newcomers or measurements."""
