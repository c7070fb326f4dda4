"""ImpRAG (arXiv 2506.02279): a decoder that retrieves, reads and answers."""
