"""CoT-MoTE against its equations in plain loops, values and gradients, in float32 and float64."""

import pytest
import torch
from cot_mote_reference import Reference, ReferenceCoTMoTE, sparse_by_loop
from small_models import SMALL, masked_lm
from torch import Tensor

from revela_hub.modeling.modeling_cot_mote import CoTMoTEForPreTraining

VOCABULARY, CLS, SEP, MASK, IGNORED = 31, 2, 3, 4, -100
LENGTHS, SPANS = (7, 5, 3, 2), (6, 8, 3, 2)  # special tokens counted; the last text and the last span are empty
EXPERTS = ["query", "passage", "passage", "query"]
DECODERS = [("ae", 1, None), ("ae", 2, None), ("ar", 1, 3), ("ar", 2, None), ("ar", 1, 1)]


def build(decoder: str, layers: int, window: int | None, variant: str = "experts") -> CoTMoTEForPreTraining:
    bert = masked_lm(**SMALL, vocab_size=VOCABULARY, max_position_embeddings=12, initializer_range=0.4)
    model = CoTMoTEForPreTraining.from_backbone(
        bert, variant=variant, decoder=decoder, decoder_layers=layers, attention_window=window
    )
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():  # zeros and ones would hide what goes wrong with them, and experts must differ
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def rows(lengths: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, VOCABULARY, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    positions, last = torch.arange(ids.shape[1]), torch.tensor(lengths)[:, None] - 1
    ids[:, 0] = CLS
    ids[positions == last] = SEP
    mask = positions <= last
    return ids.masked_fill(~mask, 0), mask.long()


def batch(decoder: str) -> dict[str, Tensor]:
    ids, mask = rows(LENGTHS, 1)
    labels = torch.full_like(ids, IGNORED)
    labels[:3, 1] = ids[:3, 1]
    labels[0, 4] = ids[0, 4]
    span, span_mask = rows(SPANS, 2)
    inputs = {
        "input_ids": ids.masked_fill(labels != IGNORED, MASK),
        "attention_mask": mask,
        "labels": labels,
        "decoder_input_ids": span,
        "decoder_attention_mask": span_mask,
    }
    if decoder == "ae":
        inputs["decoder_labels"] = torch.full_like(span, IGNORED)
        inputs["decoder_labels"][:2, 2:4] = span[:2, 2:4]
        inputs["decoder_input_ids"] = span.masked_fill(inputs["decoder_labels"] != IGNORED, MASK)
    return inputs


def reference(model: CoTMoTEForPreTraining, inputs: dict[str, Tensor], experts: list[str]) -> tuple[Reference, dict]:
    """The reference's results, and its weights, from which gradients can be taken; those shared are one tensor."""
    own = {id(p): p.detach().double().requires_grad_() for p in model.parameters()}
    weights = {name: own[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    config = model.config
    written_out = ReferenceCoTMoTE(weights, heads=4, layers=2, eps=config.encoder.layer_norm_eps)
    result = written_out(
        inputs,
        experts,
        decoder=config.decoder,
        decoder_layers=config.decoder_layers,
        window=config.attention_window,
    )
    return result, weights


def close(got: Tensor, wanted: Tensor, tolerance: float, name: str) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize(("decoder", "layers", "window"), DECODERS)
def test_losses_states_and_vectors_are_those_of_the_equations(decoder: str, layers: int, window: int | None) -> None:
    """A batch with both kinds of text, an empty text and an empty span: float32 to 1e-4, float64 to rounding."""
    model, inputs = build(decoder, layers, window), batch(decoder)
    expected, _ = reference(model, inputs, EXPERTS)
    for tolerance in (1e-4, 1e-10):
        output = model(**inputs, expert=EXPERTS)
        for name in ("encoder_loss", "dense_decoder_loss", "sparse_decoder_loss", "pooler_output", "sparse"):
            close(output[name], getattr(expected, name), tolerance, name)
        close(output.last_hidden_state, torch.stack(expected.last_hidden_state), tolerance, "last_hidden_state")
        close(output.decoder_loss, expected.dense_decoder_loss + expected.sparse_decoder_loss, 2 * tolerance, "sum")
        torch.testing.assert_close(output.loss, output.encoder_loss + output.decoder_loss)
        model.double()
    assert abs(expected.dense_decoder_loss - expected.sparse_decoder_loss) > 1e-2, "nothing to tell the two apart"


@pytest.mark.parametrize(("decoder", "layers", "window"), [("ae", 2, None), ("ar", 1, 3)])
@pytest.mark.parametrize("variant", ["siamese", "experts"])
def test_gradients_of_all_weights_are_those_of_the_equations(
    decoder: str, layers: int, window: int | None, variant: str
) -> None:
    """Of what the routes share, too, and of the embeddings, which vectors, decoder and head all use."""
    model, inputs = build(decoder, layers, window, variant).double(), batch(decoder)
    expected, weights = reference(model, inputs, EXPERTS)
    (expected.encoder_loss + expected.dense_decoder_loss + expected.sparse_decoder_loss).backward()
    model(**inputs, expert=EXPERTS).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        wanted = weights[name].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_one_bottleneck_alone_gives_its_part_of_the_loss() -> None:
    both, inputs = build("ar", 1, 3), batch("ar")
    whole = both(**inputs, expert=EXPERTS)
    for bottleneck in ("dense", "sparse"):
        both.config.bottlenecks = [bottleneck]
        output = both(**inputs, expert=EXPERTS)
        torch.testing.assert_close(output.decoder_loss, whole[f"{bottleneck}_decoder_loss"])
        torch.testing.assert_close(output.encoder_loss, whole.encoder_loss)


def test_sparse_vectors_are_those_of_the_loop_and_leave_the_ends_of_the_text_and_padding_out() -> None:
    lengths = torch.tensor([7, 7, 5, 2])[:, None]  # the last text is [CLS] [SEP]: no term
    mask, own = (torch.arange(7) < lengths).long(), (torch.arange(7) < lengths - 1).long()
    logits = torch.randn(4, 7, 50) * 3
    logits[:, 0] += 100
    logits[own == 0] += 100
    expected = [sparse_by_loop(list(row.double()), m.tolist()) for row, m in zip(logits, own, strict=True)]
    expected = torch.stack(expected)
    found = build("ar", 1, None).encoder._sparse(logits, torch.full_like(mask, 9), mask)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    assert not expected[3].any() and expected.max() < 5


def test_only_the_texts_own_tokens_have_a_part_in_the_sparse_vector() -> None:
    """Whatever [CLS] and [SEP] score, wherever they stand."""
    model = build("ar", 1, None).encoder.double()
    ids, mask = rows(LENGTHS, 1)
    ids[0, 3], ids[1, 2] = SEP, CLS  # written out in the text
    for written, numbers in ((False, ()), (True, (CLS, SEP))):
        model.config.special_token_ids = numbers
        out = model(ids, mask, expert="query")
        expected = []
        for row, states in enumerate(out.last_hidden_state):
            last = int(mask[row].sum()) - 1
            own = [
                int(0 < place < last and not (written and token in (CLS, SEP)))
                for place, token in enumerate(ids[row].tolist())
            ]
            scores = [model.query_lm.cls(state[None, None])[0, 0] for state in states]
            expected.append(sparse_by_loop(scores, own))
        torch.testing.assert_close(out.sparse, torch.stack(expected), rtol=0, atol=1e-12)
        assert not out.sparse[3].any(), "an empty text has no term"


def test_the_bottleneck_is_the_models_own_sparse_vector() -> None:
    model, inputs = build("ar", 1, None), batch("ar")
    for numbers in ((), (CLS, SEP)):
        model.config.special_token_ids = numbers
        alone = model.encoder(inputs["input_ids"], inputs["attention_mask"], expert=EXPERTS)
        torch.testing.assert_close(model(**inputs, expert=EXPERTS).sparse, alone.sparse, rtol=0, atol=1e-6)
