"""Hard-negative mining from corpora of any size."""
