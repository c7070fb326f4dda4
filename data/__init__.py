"""Converting raw text, pairs and labels to data sets, independent of the training methods.

    sources --read_documents--> Document --text--> chunks, groups, spans  (datasets.Dataset with documented columns)
    tasks in YAML --mixture--> Dataset[task, anchor, positive, negative_1 .. negative_N, prompts]
    task descriptions --synthesis--> pairs written by a language model

The public names are listed in `__init__.pyi` and imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
