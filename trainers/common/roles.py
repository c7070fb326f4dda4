"""Which of a run's models an error is about, and whether a model can play its part."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, PreTrainedConfig

from revela_hub.errors import UserError, first_line


@contextmanager
def loading(part: str, name: str) -> Iterator[None]:
    """Says which model it was that cannot be loaded.

    Args:
        part: what the model is to the run, such as "retriever".
        name: its Hub id or folder.

    Raises:
        UserError: in place of what the loading raises.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"cannot load the {part} {name!r}: {first_line(error)}") from error


def refuse_fused(name: str) -> None:
    """Refuses what a pre-training leaves, encoder and decoder in one, where an encoder is wanted.

    Raises:
        UserError: it is such a checkpoint.
    """
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        return  # what is wrong with it is said where it is loaded
    kind = ", ".join(fields.get("architectures") or [])
    if "auto_map" in fields and "ForPreTraining" in kind:
        raise UserError(
            f"{name} is a {kind} checkpoint, encoder and decoder in one: give the encoder that was exported from it"
        )


def is_encoder(name: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a model reads both ways, as BERT does: transformers would load it as a causal model all the same."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
