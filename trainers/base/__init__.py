"""Code shared by the methods."""
