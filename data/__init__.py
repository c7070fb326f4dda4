"""Raw text, pairs and labels to data sets; no method of training is known here.

    sources --read_documents--> Document --text--> chunks, groups, spans  (datasets.Dataset with documented columns)
    tasks in YAML --mixture--> Dataset[task, anchor, positive, negative_1 .. negative_N, prompts]
    tasks in words --synthesis--> pairs written by a language model

The public names stand in `__init__.pyi` and are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
