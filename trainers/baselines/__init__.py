"""What ImpRAG is measured against: retrieval-augmented readers whose passages are pasted into the prompt."""
