"""Hard negatives from corpora of any size."""
