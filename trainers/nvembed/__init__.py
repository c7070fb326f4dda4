"""NV-Embed: arguments, collator, loss, trainer, checkpoint."""
