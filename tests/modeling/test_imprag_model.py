"""ImpRAG as a user of transformers meets it: backbones, generation, checkpoints, retrieval, errors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import small_models
import torch
import transformers
from torch import Tensor

from revela_hub.modeling import ImpRAGConfig, ImpRAGForCausalLM, ImpRAGModel
from revela_hub.modeling.backbones import cache_of

DEEP = {"num_hidden_layers": 4, "max_position_embeddings": 128, "initializer_range": 0.2}


def decoder(family: str = "Llama", **settings: object) -> transformers.PreTrainedModel:
    return small_models.decoder(family, **(DEEP | settings)).eval()


def build(family: str = "Llama", settings: dict[str, object] | None = None, **config: object) -> ImpRAGForCausalLM:
    options = {"b": 1, "t": 2, "k": 2, "l_max": 8} | config
    return ImpRAGForCausalLM.from_backbone(decoder(family, **(settings or {})), **options).eval()


@pytest.mark.parametrize(("layers", "b", "t"), [(2, 0, 1), (4, 1, 2), (6, 2, 4), (28, 7, 19)])
def test_default_boundaries(layers: int, b: int, t: int) -> None:
    config = ImpRAGConfig(backbone=transformers.LlamaConfig(num_hidden_layers=layers))
    assert (config.b, config.t) == (b, t)


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, small_models.VOCABULARY, shape)


def passages(rows: int = 3) -> dict[str, Tensor]:
    ids, mask = tokens(rows, 2, 8), torch.ones(rows, 2, 8, dtype=torch.long)
    mask[0, 0, 5:] = 0
    mask[-1, 1, :3] = 0
    return {"passage_input_ids": ids, "passage_attention_mask": mask}


def prompts() -> dict[str, Tensor]:
    """Three prompts of different lengths, padded on the left as for generation."""
    ids, mask = tokens(3, 6), torch.ones(3, 6, dtype=torch.long)
    mask[1, :3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@torch.no_grad()
def test_vectors_are_the_states_that_the_rotary_embedding_starts_from() -> None:
    """In Qwen 3 those after the norms of queries and keys; the equations are tested with a Llama, which has none."""
    model = build("Qwen3")
    ids = tokens(2, 6)
    seen: dict[str, Tensor] = {}
    attention = model.get_decoder().layers[1].self_attn
    for name in ("q_norm", "k_norm"):
        getattr(attention, name).register_forward_hook(lambda _m, _a, out, name=name: seen.update({name: out}))
    query_vectors, passage_vectors = model.embed_queries(ids), model.embed_passages(ids)

    def last(state: Tensor, heads: int) -> Tensor:
        """(N, heads, D) from (N, L, heads * D), (N, L, heads, D) or (N, heads, L, D)."""
        if state.dim() == 4 and state.shape[1] == heads:
            return state[:, :, -1]
        return state[:, -1].reshape(2, heads, -1)

    queries = last(seen["q_norm"], 4)
    expected = torch.stack([queries[:, :2].mean(1), queries[:, 2:].mean(1)], dim=1).flatten(1)
    torch.testing.assert_close(query_vectors, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(passage_vectors, last(seen["k_norm"], 2).flatten(1), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_sliding_window_holds_in_the_prompt_and_passages_are_read_whole() -> None:
    sliding = {"sliding_window": 3, "layer_types": ["sliding_attention"] * 4}
    model = build("Gemma3Text", sliding, b=0, t=3)
    prompt, read = tokens(1, 6), passages(1)
    read["passage_attention_mask"][:] = 1
    before = model(prompt, **read).logits
    # Layer 0 alone decides how far a change travels: the last token is beyond the window of the first passage token.
    changed = {**read, "passage_input_ids": read["passage_input_ids"].clone()}
    changed["passage_input_ids"][0, 0, 0] += 1
    assert (model(prompt, **changed).logits[0, -1] - before[0, -1]).abs().max() > 1e-4
    step = model.generate(prompt, **read, max_new_tokens=8, do_sample=False, eos_token_id=None)
    whole = model(step[:, :-1], **read).logits.argmax(-1)
    assert torch.equal(step[:, 6:], whole[:, 5:])


@pytest.mark.parametrize(("family", "encoding"), [("Llama", "full"), ("Qwen3", "segmented"), ("Gemma2", "independent")])
@torch.no_grad()
def test_decoding_step_by_step_is_one_full_forward(family: str, encoding: str) -> None:
    model = build(family, passage_encoding=encoding)
    batch, read = prompts(), passages()
    ids = torch.cat([batch["input_ids"], tokens(3, 4)], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 4, dtype=torch.long)], dim=1)
    whole = model(ids, mask, **read).logits
    step = model(ids[:, :6], mask[:, :6], **read, use_cache=True)
    torch.testing.assert_close(step.logits[:, -1], whole[:, 5], rtol=1e-4, atol=1e-5)
    for at in range(6, 10):
        # transformers 5.24 renamed the argument and the output; both names are accepted.
        cache = {"cache" if at % 2 else "past_key_values": cache_of(step)}
        step = model(ids[:, at : at + 1], mask[:, : at + 1], passage_states=step.passage_states, **cache)
        torch.testing.assert_close(step.logits[:, 0], whole[:, at], rtol=1e-4, atol=1e-5)


def greedy_by_hand(model: ImpRAGForCausalLM, ids: Tensor, read: dict[str, Tensor], steps: int) -> list[int]:
    for _ in range(steps):
        token = model(ids, **read).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, token[:, None]], dim=1)
        if token == small_models.DECODER["eos_token_id"]:
            break
    return ids[0].tolist()


def one(read: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: value[row : row + 1] for name, value in read.items()}


@torch.no_grad()
def test_generate_of_a_batch_is_each_prompt_alone() -> None:
    model = build()
    batch, read = prompts(), passages()
    read["passage_attention_mask"][1] = 0  # one prompt without passages
    together = model.generate(**batch, **read, max_new_tokens=8, do_sample=False)
    for row in range(3):
        own = batch["input_ids"][row : row + 1, int((batch["attention_mask"][row] == 0).sum()) :]
        expected = greedy_by_hand(model, own, one(read, row), 8)
        got = together[row, 6 - own.shape[1] :].tolist()
        assert got[: len(expected)] == expected
        assert set(got[len(expected) :]) <= {0}
    without_cache = model.generate(**batch, **read, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(without_cache, together)


@torch.no_grad()
def test_passages_are_encoded_once_and_shared_by_beams() -> None:
    model = build()
    batch, read = prompts(), passages()
    calls: list[int] = []
    encode = model.encode_passages
    model.encode_passages = lambda *args: calls.append(1) or encode(*args)
    beams = model.generate(**batch, **read, max_new_tokens=6, num_beams=3, num_return_sequences=2, do_sample=False)
    assert len(calls) == 1
    assert beams.shape[0] == 6
    for row in range(3):  # each prompt's beams alone are the same
        own = {name: value[row : row + 1] for name, value in batch.items()}
        alone = model.generate(
            **own, **one(read, row), max_new_tokens=6, num_beams=3, num_return_sequences=2, do_sample=False
        )
        width = min(alone.shape[1], beams.shape[1])
        assert torch.equal(beams[2 * row : 2 * row + 2, :width], alone[:, :width])


class RowsIndex:
    """Answers as a FAISS index does: scores and rows."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors, self.calls = vectors, 0

    def search(self, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.calls += 1
        top = (vectors @ self.vectors.T).topk(min(k, len(self.vectors)))
        return top.values, top.indices


@torch.no_grad()
def test_generate_retrieves_once_from_any_index() -> None:
    model = build()
    collection, batch = tokens(20, 8), prompts()
    vectors = model.embed_passages(collection)
    index = RowsIndex(vectors)
    expected_rows = (model.embed_queries(**batch) @ vectors.T).topk(2).indices
    expected = model.generate(**batch, passage_input_ids=collection[expected_rows], max_new_tokens=5, do_sample=False)
    got = model.generate(**batch, index=index, passage_input_ids=collection, max_new_tokens=5, do_sample=False)
    assert torch.equal(got, expected)
    assert index.calls == 1
    found, mask = model.retrieve(**batch, index=index, k=1, passage_input_ids=collection)
    assert torch.equal(found, collection[expected_rows[:, :1]]) and mask.all()
    faiss = pytest.importorskip("faiss", reason="needs the extra search")
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors.numpy())
    got = model.generate(**batch, index=flat, passage_input_ids=collection, max_new_tokens=5, do_sample=False)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="the index holds fewer than k=21 passages"):
        model.retrieve(**batch, index=flat, k=21, passage_input_ids=collection)


@torch.no_grad()
@pytest.mark.parametrize("encoding", ["full", "segmented", "independent"])
def test_padding_that_no_found_passage_needs_is_cut(encoding: str) -> None:
    model = build(passage_encoding=encoding)
    passages = tokens(2, 2, 5)
    padded = torch.cat([passages, torch.zeros_like(passages)], dim=-1)
    mask = torch.cat([torch.ones_like(passages), torch.zeros_like(passages)], dim=-1)
    expected, got = model.encode_passages(passages), model.encode_passages(padded, mask)
    assert expected is not None and got is not None and torch.equal(got.mask, expected.mask)
    assert all(map(torch.equal, (*got.keys, *got.values), (*expected.keys, *expected.values)))


@pytest.mark.parametrize("encoding", ["full", "independent"])
def test_gradients_flow_through_reading_and_retrieval_with_checkpointing(encoding: str) -> None:
    model = build(passage_encoding=encoding)
    batch, read = prompts(), passages()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch |= {"query_input_ids": tokens(3, 5), "candidate_input_ids": tokens(4, 8)}
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        output = model(**batch, **read)
        (output.loss + model.score(output.query_vectors, output.passage_vectors).logsumexp(-1).mean()).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert set(gradients[0]) == {n for n, _ in model.named_parameters()}
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_from_backbone_loads_folders_and_keeps_official_names(llama_folder: Path, tmp_path: Path) -> None:
    lm = transformers.AutoModelForCausalLM.from_pretrained(llama_folder)
    model = ImpRAGForCausalLM.from_backbone(str(llama_folder), b=0, t=1)
    assert {f"backbone.{name}" for name in lm.state_dict()} == set(model.state_dict())
    model.save_pretrained(tmp_path / "imprag")
    hidden = ImpRAGModel.from_pretrained(tmp_path / "imprag").eval()
    ids, read = torch.randint(2, 60, (1, 5)), {"passage_input_ids": torch.randint(2, 60, (1, 2, 8))}
    expected = model.eval()(ids, **read).logits
    torch.testing.assert_close(lm.lm_head(hidden(ids, **read).last_hidden_state), expected)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "b above t": (lambda: build(b=3, t=2), "b=3.*t=2"),
    "t beyond": (lambda: build(t=4), "t=4"),
    "encoding": (lambda: ImpRAGConfig(passage_encoding="none"), "passage_encoding"),
    "long passage": (lambda: build()(tokens(1, 4), passage_input_ids=tokens(1, 2, 9)), "l_max=8"),
    "many passages": (lambda: build()(tokens(1, 4), passage_input_ids=tokens(1, 3, 8)), "k=2"),
    "long prompt": (lambda: build()(tokens(1, 120), passage_input_ids=tokens(1, 2, 8)), "does not fit"),
    "shared": (lambda: build()(tokens(3, 4), passage_input_ids=tokens(2, 2, 8)), "3 prompts cannot share"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_would_be_silently_wrong_is_rejected(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call()
