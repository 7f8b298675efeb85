"""Credit-assignment methods, one file per paper."""
