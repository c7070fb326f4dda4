"""Random models of a few thousand weights, by the name of their family."""

import transformers

VOCABULARY, POSITIONS = 61, 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
SMALL = {"hidden_size": 16, "intermediate_size": 24}  # for references in plain loops
DECODER = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1}
DECODERS = {
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {"head_dim": 8, "query_pre_attn_scalar": 8},
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": POSITIONS}
ENCODERS = {
    "Bert": SIZES | NO_DROPOUT,
    "Roberta": SIZES | NO_DROPOUT | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "DistilBert": {
        "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
        "max_position_embeddings": POSITIONS, "dropout": 0.0, "attention_dropout": 0.0,
    },
    "ModernBert": SIZES | {
        "max_position_embeddings": POSITIONS, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
    },
}  # fmt: skip


def decoder(family: str = "Llama", **settings: object) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**(DECODER | DECODERS.get(family, {}) | settings))
    return transformers.AutoModelForCausalLM.from_config(config)


def masked_lm(family: str = "Bert", **settings: object) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**(ENCODERS[family] | settings))
    return transformers.AutoModelForMaskedLM.from_config(config)


def bert() -> transformers.PreTrainedModel:
    config = transformers.BertConfig(**(ENCODERS["Bert"] | {"max_position_embeddings": 64}))
    return transformers.AutoModel.from_config(config)
