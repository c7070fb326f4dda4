"""What two trainers share, once."""
