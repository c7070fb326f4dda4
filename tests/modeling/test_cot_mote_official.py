"""CoT-MAE's published implementation, as it was run under transformers 4.30: its losses and [CLS] states of one batch.

The weights are those of `weight` for each of its names, the batch is the one below; both heads of either release.
"""

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from revela_hub.modeling.modeling_cot_mote import CoTMoTEForPreTraining

NOT = -100
BERT = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 12, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TEXT = {
    "input_ids": [[2, 7, 4, 9, 12, 3], [2, 4, 8, 3, 0, 0], [2, 15, 16, 4, 3, 0]],
    "attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]],
    "labels": [[NOT, NOT, 21, NOT, NOT, NOT], [NOT, 6, NOT, NOT, NOT, NOT], [NOT, NOT, NOT, 30, NOT, NOT]],
}
SPAN_MASK = [[1] * 7, [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]
SPAN = {
    "ae": {
        "decoder_input_ids": [[2, 11, 4, 6, 13, 14, 3], [2, 4, 3, 0, 0, 0, 0], [2, 8, 9, 4, 4, 3, 0]],
        "decoder_labels": [[NOT, NOT, 5, *[NOT] * 4], [NOT, 10, *[NOT] * 5], [NOT, NOT, NOT, 22, 23, NOT, NOT]],
    },
    "ar": {"decoder_input_ids": [[2, 11, 5, 6, 13, 14, 3], [2, 10, 3, 0, 0, 0, 0], [2, 8, 9, 22, 23, 3, 0]]},
}
# The first three numbers of each text's [CLS] state: the names of the second release differ, and so do its weights here.
CLS_AE = [[1.9058726, -0.6718297, 0.2125989], [1.8968406, -0.7185823, 0.3986733], [1.6125213, -0.4386775, 0.2750469]]
CLS_AR = [[1.0072962, 1.6165087, 1.7610917], [0.9940377, 1.9534675, 1.2851299], [1.4464758, 1.3405963, 0.0170002]]


def weight(name: str, like: Tensor) -> Tensor:
    """Normal, around 1 for the scales of norms."""
    drawn = 0.4 * torch.randn(like.shape, generator=torch.Generator().manual_seed(sum(name.encode())))
    return drawn + 1.0 if like.dim() == 1 and name.endswith("weight") else drawn


@pytest.mark.parametrize(
    ("decoder", "layers", "window", "encoder_loss", "head_loss", "cls"),
    [
        ("ae", 1, None, 4.127711772918701, 4.964156627655029, CLS_AE),
        ("ae", 2, None, 4.127711772918701, 5.766731262207031, CLS_AE),
        ("ar", 1, 3, 3.5150763988494873, 5.451554298400879, CLS_AR),
        ("ar", 2, None, 3.5150763988494873, 4.88951301574707, CLS_AR),
    ],
)
def test_losses_and_states_are_the_published_implementations(
    decoder: str, layers: int, window: int | None, encoder_loss: float, head_loss: float, cls: list[list[float]]
) -> None:
    model = CoTMoTEForPreTraining.from_backbone(
        BertForMaskedLM(BertConfig(**BERT)),
        variant="siamese",
        bottlenecks=["dense"],
        decoder=decoder,
        decoder_layers=layers,
        attention_window=window,
    ).eval()
    weights = {}
    for name, parameter in model.named_parameters():
        own = name.replace("ae_decoder", "c_head").replace("ar_decoder", "d_head")
        own = own.removeprefix("lm.") if decoder == "ae" else own
        weights[name] = weight(own, parameter)
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    batch = TEXT | SPAN[decoder] | {"decoder_attention_mask": SPAN_MASK}
    output = model(**{name: torch.tensor(rows) for name, rows in batch.items()})
    assert output.encoder_loss.item() == pytest.approx(encoder_loss, abs=1e-5)
    assert output.decoder_loss.item() == pytest.approx(head_loss, abs=1e-5)
    torch.testing.assert_close(output.pooler_output[:, :3], torch.tensor(cls), rtol=0, atol=1e-5)
