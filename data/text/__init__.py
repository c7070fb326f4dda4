"""Converting documents to training rows: chunks, groups of chunks, spans, masks; and detecting duplicates."""
