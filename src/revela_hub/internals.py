"""Private names of libraries, all in this file.

Written for transformers 5.17 to 5.24, sentence-transformers 6, datasets 5.2 and huggingface_hub 1 and 2.
`tests/test_private_names.py` fails if another file uses one, except in `modeling/`, whose files also run without this package.
"""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.modules import Transformer
    from transformers import PreTrainedModel

# `open_run` reports changed settings. transformers' own warning is wrong for fractions such as eval_steps=0.25.
logging.getLogger("transformers.trainer_utils").addFilter(
    lambda record: "arguments do not match the ones in the `trainer_state.json`" not in record.getMessage()
)


def transformer_around(model: "PreTrainedModel", tokenizer_folder: str) -> "Transformer":
    """Return sentence-transformers' module around an existing model; its constructor only takes names and folders."""
    from sentence_transformers.sentence_transformer.modules import Transformer

    class Live(Transformer):
        def _load_config(self, *args: Any, **kwargs: Any) -> Any:
            return model.config, False

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return model

    transformer: Transformer = Live(tokenizer_folder)
    # sentence-transformers saves a module under the name of its class, which has to be the stock one.
    transformer.__class__ = Transformer
    return transformer


def fingerprint(dataset: "Dataset") -> str:
    """Return the hash by which `datasets` identifies rows in its cache."""
    return str(dataset._fingerprint)
