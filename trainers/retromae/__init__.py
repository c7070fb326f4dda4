"""RetroMAE: arguments, collator, trainer, checkpoint."""
