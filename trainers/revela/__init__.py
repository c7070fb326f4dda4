"""Revela: arguments, collator, trainer, checkpoint."""
