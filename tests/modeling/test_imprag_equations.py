"""ImpRAG against its equations in plain loops and float64, to 1e-5."""

import pytest
import torch
from imprag_reference import Reference
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from revela_hub.modeling import ImpRAGForCausalLM

SIZES = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def build(encoding: str = "full", attention: str = "sdpa") -> tuple[ImpRAGForCausalLM, Reference]:
    config = LlamaConfig(
        **SIZES, **HEADS, max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0
    )
    config.initializer_range = 0.3  # attention that is far from uniform
    llama = LlamaForCausalLM(config).eval()
    llama.set_attn_implementation(attention)
    model = ImpRAGForCausalLM.from_backbone(llama, b=1, t=2, k=2, l_max=8, passage_encoding=encoding).eval()
    weights = dict(llama.state_dict())
    return model, Reference(weights, 4, 4, 2, b=1, t=2, k=2, l_max=8, encoding=encoding)


PROMPTS = [[5, 9, 30, 2], [7, 8, 11, 12, 3, 20, 4]]
PASSAGES = [[[3, 14, 15, 9, 26, 5], [35, 8, 9]], [[32, 3, 8, 4, 6, 2, 6, 4], [3, 3]]]


def padded(rows: list[list[int]], length: int, left: bool = False) -> tuple[Tensor, Tensor]:
    ids, mask = torch.full((len(rows), length), 0), torch.zeros(len(rows), length, dtype=torch.long)
    for row, tokens in enumerate(rows):
        where = slice(length - len(tokens), length) if left else slice(0, len(tokens))
        ids[row, where], mask[row, where] = torch.tensor(tokens, dtype=torch.long), 1
    return ids, mask


def passages(left: bool = False) -> tuple[Tensor, Tensor]:
    parts = [padded(row, 8, left) for row in PASSAGES]
    return torch.stack([ids for ids, _ in parts]), torch.stack([mask for _, mask in parts])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("encoding", ["full", "segmented", "independent"])
@torch.no_grad()
def test_logits_and_passage_states(encoding: str, attention: str) -> None:
    model, reference = build(encoding, attention)
    ids, mask = padded(PROMPTS, 7)
    passage_ids, passage_mask = passages()
    output = model(ids, mask, passage_input_ids=passage_ids, passage_attention_mask=passage_mask)
    for row, prompt in enumerate(PROMPTS):
        expected = reference.logits(prompt, PASSAGES[row])
        # Rounding in float32: of 259 logits one was 1.1e-5 off on a processor with AVX2, none with AVX-512.
        torch.testing.assert_close(output.logits[row, : len(prompt)].double(), expected, rtol=1e-5, atol=2e-5)
        states = reference.passage_states(PASSAGES[row])
        for layer in (1, 2):
            for part, got in ((0, output.passage_states.keys), (1, output.passage_states.values)):
                want = torch.stack([torch.stack(token[part]) for token in states[layer]], dim=1)
                real = got[layer - 1][row][:, output.passage_states.mask[row]].double()
                torch.testing.assert_close(real, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_query_and_passage_vectors_and_scores(left: bool) -> None:
    model, reference = build()
    queries = model.embed_queries(*padded(PROMPTS, 9, left))
    flat = [passage for row in PASSAGES for passage in row]
    vectors = model.embed_passages(*padded(flat, 8, left))
    expected_queries = torch.stack([reference.query_vector(ids) for ids in PROMPTS])
    expected_vectors = torch.stack([reference.passage_vector(ids) for ids in flat])
    torch.testing.assert_close(queries.double(), expected_queries, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vectors.double(), expected_vectors, rtol=1e-5, atol=1e-5)
    scores = model.score(queries, vectors)
    torch.testing.assert_close(scores.double(), expected_queries @ expected_vectors.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.score(queries, vectors.view(2, 2, -1))[1], scores[1, 2:])


@torch.no_grad()
def test_answer_likelihood_under_each_candidate() -> None:
    """The shortcut (bottom layers once, blocks of passages) equals the sum of log-probabilities of the reference."""
    model, reference = build()
    ids, mask = padded(PROMPTS, 7)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    candidates = [padded(row, 8) for row in PASSAGES]
    candidate_ids = torch.stack([c[0] for c in candidates])
    candidate_mask = torch.stack([c[1] for c in candidates])
    for block_size in (1, 16):
        found = model.answer_log_likelihoods(ids, mask, labels, candidate_ids, candidate_mask, block_size)
        for row, prompt in enumerate(PROMPTS):
            for column, passage in enumerate(PASSAGES[row]):
                log_p = reference.logits(prompt, [passage]).log_softmax(-1)
                expected = sum(log_p[i - 1, prompt[i]] for i in range(2, len(prompt)))
                torch.testing.assert_close(found[row, column].double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_left_and_right_padding_and_absent_passages_are_the_same() -> None:
    model, reference = build()
    right = model(*padded(PROMPTS, 9), *passages()).logits
    left = model(*padded(PROMPTS, 9, left=True), *passages(left=True)).logits
    for row, prompt in enumerate(PROMPTS):
        n = len(prompt)
        torch.testing.assert_close(left[row, 9 - n :], right[row, :n], rtol=1e-5, atol=1e-5)
    passage_ids, passage_mask = passages()
    passage_mask[0] = 0  # no passage at all in this row, one in the other
    passage_mask[1, 1] = 0
    mixed = model(*padded(PROMPTS, 9), passage_ids, passage_mask).logits
    for row, read in enumerate(([[]], PASSAGES[1][:1])):
        expected = reference.logits(PROMPTS[row], read)
        torch.testing.assert_close(mixed[row, : len(expected)].double(), expected, rtol=1e-5, atol=1e-5)
