"""Documents to training rows: chunks, groups of chunks, spans, masks, and which texts repeat each other."""
