"""`revela-hub demo`: a page in the browser that compares a retriever with its base model, BM25 and their hybrid.

`collection` searches and returns plain data, `rendering` makes HTML of it, `page` is the only module that imports gradio, and
`space` writes the same page as a Space.
"""
