"""Training pairs written by a language model."""
