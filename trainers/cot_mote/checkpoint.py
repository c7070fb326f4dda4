"""What a CoT-MoTE run starts from and leaves behind: the model, with its decoder or without, and the tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.text.masking import Vocabulary
from revela_hub.errors import UserError, loading
from revela_hub.modeling.configuration_cot_mote import CoTMoTEConfig
from revela_hub.modeling.modeling_cot_mote import CoTMoTEForPreTraining, CoTMoTEModel
from revela_hub.pickles import refuse_pickles
from revela_hub.trainers.common.inputs import ModelLike, name_of, tokenizer_of, unwrapped
from revela_hub.trainers.common.weights import load_whole

PRE_TRAINING = CoTMoTEForPreTraining.__name__


@dataclass
class CoTMoTECheckpoint:
    """A model and the tokenizer that goes with it; `model` has the decoder, `encoder` is the part that is published."""

    model: CoTMoTEForPreTraining | CoTMoTEModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def encoder(self) -> CoTMoTEModel:
        """The model without a decoder, the same weights."""
        return self.model.encoder if isinstance(self.model, CoTMoTEForPreTraining) else self.model


def load_cot_mote_start(
    start: ModelLike,
    *,
    pre_training: bool,
    tokenizer: PreTrainedTokenizerBase | None = None,
    query_encoder: str | None = None,
    fresh_head: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    **config: Any,
) -> CoTMoTECheckpoint:
    """Loads what to train: an encoder, whose feed-forward both experts start from, or a CoT-MoTE, which keeps its own.

    Args:
        start: Hub id or folder: of an encoder, or what an earlier run wrote; or a loaded encoder with its masked-LM head.
        pre_training: whether the decoder is needed. A model without one cannot be pre-trained on.
        tokenizer: by default the one that is where the encoder is.
        query_encoder: another encoder to start the queries' from, with `variant="separate"`.
        fresh_head: whether an encoder without the weights of its masked-LM head will do.
        trust_remote_code: for models whose code lies in their repository.
        attn_implementation: of the encoder; None for transformers' choice.
        **config: fields of `CoTMoTEConfig`; those that are None are left to its defaults, or to the trained model.

    Raises:
        UserError: if it cannot be loaded, is no encoder with a masked-LM head, has no mask token, or is a CoT-MoTE of
            other settings than `config` asks for.
    """
    config = {field: value for field, value in config.items() if value is not None}
    given, name = unwrapped(start), name_of(start)
    with loading(f"cannot load the encoder {name!r}", name):
        fields, _ = ({}, {}) if isinstance(given, PreTrainedModel) else PreTrainedConfig.get_config_dict(given)
        if fields.get("model_type") == CoTMoTEConfig.model_type:
            model = _trained(name, fields, pre_training, config)
            # With the configuration at hand, transformers does not ask whether it may run the folder's code to read it.
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(name, config=model.config)
        else:
            for encoder in (given, query_encoder):
                if isinstance(encoder, str):
                    refuse_pickles(encoder)
            kind = CoTMoTEForPreTraining if pre_training else CoTMoTEModel
            model = kind.from_backbone(
                given,
                query_backbone=query_encoder,
                fresh_head=fresh_head,
                trust_remote_code=trust_remote_code,
                attn_implementation=attn_implementation,
                **config,
            )
        tokenizer = tokenizer_of(start, tokenizer, trust_remote_code=trust_remote_code)
        if fields.get("model_type") != CoTMoTEConfig.model_type:
            model.config.special_token_ids = list(dict.fromkeys(tokenizer("")["input_ids"]))
        if query_encoder is not None:
            other = AutoTokenizer.from_pretrained(query_encoder, trust_remote_code=trust_remote_code)
            if other.get_vocab() != tokenizer.get_vocab():
                raise UserError(
                    f"the vocabularies of {query_encoder} and {name} differ: their sparse vectors could not be compared"
                )
    Vocabulary.of(tokenizer)  # says what is missing before any text is read
    if len(tokenizer) > (vocabulary := model.config.get_text_config().vocab_size):
        raise UserError(f"the tokenizer of {name} has {len(tokenizer)} tokens, more than the model's {vocabulary}")
    return CoTMoTECheckpoint(model, tokenizer)


def _trained(
    name: str, fields: dict[str, Any], pre_training: bool, config: dict[str, Any]
) -> CoTMoTEForPreTraining | CoTMoTEModel:
    """The CoT-MoTE of a folder that an earlier run wrote, if it is what is asked for."""
    for field, value in config.items():
        if (kept := fields.get(field, value)) != value and (pre_training or field == "variant"):
            raise UserError(f"{name} was trained with {field}={kept}: go on with that, or start from its encoder")
    if PRE_TRAINING in (fields.get("architectures") or []):
        model = load_whole(CoTMoTEForPreTraining, name, dtype=torch.float32)
        return model if pre_training else model.encoder
    if pre_training:
        raise UserError(
            f"{name} has no decoder to pre-train on with: start from what the pre-training left, or an encoder"
        )
    return load_whole(CoTMoTEModel, name, dtype=torch.float32)


def load_cot_mote_checkpoint(folder: str | Path) -> CoTMoTECheckpoint:
    """Loads a folder that one of the trainers saved, in float32 and in eval mode.

    Raises:
        UserError: if the folder is no CoT-MoTE checkpoint, or is damaged.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a checkpoint: it holds no config.json")
    with loading(f"cannot load {folder}", folder):
        fields, _ = PreTrainedConfig.get_config_dict(folder)
        if fields.get("model_type") != CoTMoTEConfig.model_type:
            raise UserError(f"{folder / 'config.json'} is not of a CoT-MoTE checkpoint")
        kind: Any = CoTMoTEForPreTraining if PRE_TRAINING in (fields.get("architectures") or []) else CoTMoTEModel
        model = load_whole(kind, folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, config=model.config)
    return CoTMoTECheckpoint(model.eval(), tokenizer)
