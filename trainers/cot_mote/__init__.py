"""CoT-MoTE: arguments, collator, trainers, loss, checkpoint."""
