"""ImpRAG at inference time: vectors of prompts and passages, stored passage states, and answers over an index."""
