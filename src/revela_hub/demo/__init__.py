"""`revela-hub demo`: a page in the browser that compares a retriever with its base model, BM25 and their hybrid.

`search`, `texts`, `report`, `code` and `rendering` compute plain data and HTML; `page` is the only module that imports gradio; `space`
writes the same page as a Space.
"""
