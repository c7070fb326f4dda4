"""Check the tokenizer of a model: its vocabulary, special tokens, files and maximum length."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from .contents import auto_maps, read_json
from .files import Check
from .loading import LoadedModel, positions
from .progress import report_step
from .texts import CODE, FOREIGN, SENTENCE, SHORT, probe_texts

# Texts with upper case, accents, other scripts and spaces, to compare the files of a tokenizer.
_COMPARED = (SHORT, SENTENCE.upper(), FOREIGN, CODE, "Café  naïve, ÉCOLE ", "")


def token_checks(model: LoadedModel) -> Iterator[Check]:
    """Yield the checks of the tokenizer and of the maximum length."""
    tokenizer, rows = model.tokenizer, _embedding_rows(model.module)
    padding = "" if tokenizer.pad_token is not None else "; no padding token, so one text at a time"
    found = f"{len(tokenizer)} tokens, {rows or 'unknown'} rows in the embedding matrix{padding}"
    yield (tokens := Check.of("tokens", _token_faults(model, rows), found))
    if not model.kind or not tokens.ok:
        return
    yield (length := Check.of("length", _length_faults(model), f"{model.max_length} tokens"))
    if length.ok and any("lasttoken" in (getattr(part, "pooling_mode", None) or ()) for part in model.module.modules()):
        ending = tokenizer.convert_ids_to_tokens(_last_tokens(model, [SHORT])[0] or 0)
        yield Check.of("end of text", _ending_faults(model), f"every text ends with {ending!r}, also truncated ones")


def _token_faults(model: LoadedModel, rows: int) -> Iterator[str]:
    tokenizer = model.tokenizer
    ids = tokenizer(SENTENCE + SHORT, add_special_tokens=False)["input_ids"]
    if not ids:
        yield "a sentence has no tokens: check that tokenizer.json or the vocabulary is there"
    unknown = ids.count(tokenizer.unk_token_id) / len(ids) if tokenizer.unk_token_id is not None else 0.0
    if unknown > 0.5:
        yield f"{unknown:.0%} of the tokens in a sentence are unknown: check that the vocabulary is there and of this model"
    highest = max(tokenizer.get_vocab().values(), default=0)
    if rows and highest >= rows:
        yield f"the tokenizer has ids up to {highest}, but the embedding matrix has only {rows} rows"
    for one in tokenizers_of(model):
        yield from _contradictions(one, model)
    if tokenizer.pad_token is None and (model.kind or not model.causal):
        yield "the tokenizer has no padding token, so texts cannot be encoded in batches: set pad_token"


def _embedding_rows(module: Any) -> int:
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            try:
                return int(part.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
            except (AttributeError, NotImplementedError):
                continue
    return 0


# --- files that contradict each other


def tokenizers_of(model: LoadedModel) -> list[Any]:
    """Return the tokenizers of transformers in a model, one per route."""
    parts = [model.tokenizer, *(getattr(part, "tokenizer", None) for part in model.module.modules())]
    return list({id(part): part for part in parts if isinstance(part, PreTrainedTokenizerBase)}.values())


def _contradictions(tokenizer: Any, model: LoadedModel) -> Iterator[str]:
    """Yield where two files, or a file and the library, give different tokens for the same text."""
    folder = Path(tokenizer.name_or_path)
    config = read_json(folder / "tokenizer_config.json", {})
    if config and not any(where.endswith("tokenizer_config.json") for where, _ in auto_maps(folder)):
        name = config.get("tokenizer_class")
        if isinstance(name, str) and tokenizer_class_from_name(name) is None:
            found = f"tokenizer_config.json: transformers has no tokenizer class {name}"
            yield f"{found}: save the tokenizer again, or use PreTrainedTokenizerFast"
        if (folder / "tokenizer.json").is_file():
            yield from _other_tokens(tokenizer, folder)
        if config.get("do_lower_case") is False and _ids(tokenizer, SENTENCE) == _ids(tokenizer, SENTENCE.upper()):
            yield "do_lower_case is false in tokenizer_config.json, but tokenizer.json lower-cases texts: change one"
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    for token in sorted({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}):
        if token.isalpha() and not token.isupper():
            yield f"the word {token!r} is a special token, so texts lose it: remove it from the special tokens"
    ends = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("cls", "sep")}
    if None not in ends.values() and not model.causal:
        ids = _ids(tokenizer, SHORT)
        for name in (name for name, token in ends.items() if token not in ids):
            token = getattr(tokenizer, f"{name}_token")
            yield f"the tokenizer does not add its {name}_token {token!r}: add it to post_processor in tokenizer.json"


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _other_tokens(tokenizer: Any, folder: Path) -> Iterator[str]:
    """Yield whether transformers gives other tokens than tokenizer.json, which text-embeddings-inference reads."""
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.no_padding()
    stored.no_truncation()
    for text in _COMPARED:
        there, here = stored.encode(text).ids, _ids(tokenizer, text)
        if there != here:
            place = next((at for at, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), -1)
            ids = [each[place] if each else None for each in (there, here)]
            names = [None if at is None else f"{tokenizer.convert_ids_to_tokens(at)!r} ({at})" for at in ids]
            yield (
                f"tokenizer.json gives the token {names[0]} in {text[:30]!r}, but transformers gives {names[1]}:"
                " tokenizer_config.json contradicts it. Save the tokenizer again with save_pretrained"
            )


# --- length


def _length_faults(model: LoadedModel) -> Iterator[str]:
    if model.max_length >= 10**9:
        yield "no maximum length is saved: long texts will fail"
    room = positions(model.module)
    if room is not None and model.max_length > room:
        yield f"the maximum length is {model.max_length} tokens, but the model has {room} positions: longer texts fail"
    for name, prompt in model.prompts.items():
        tokens = len(model.tokenizer(prompt)["input_ids"])
        if tokens >= model.max_length:
            yield f"the prompt {name!r} has {tokens} tokens, which leaves no room for text in {model.max_length}"


def _last_tokens(model: LoadedModel, texts: list[str]) -> list[int | None]:
    rows = model.tokenizer([model.prompts.get("query", "") + text for text in texts], truncation=True)["input_ids"]
    return [row[-1] if row else None for row in rows]


def _ending_faults(model: LoadedModel) -> Iterator[str]:
    texts = probe_texts(model.max_length)
    ends = _last_tokens(model, texts)
    names = model.tokenizer.convert_ids_to_tokens([end or 0 for end in ends])
    if ends[0] not in model.tokenizer.all_special_ids:
        yield f"EOS is not added: the embedding is that of the last token, but {SHORT!r} ends with {names[0]!r}"
    for text, end, name in zip(texts, ends, names, strict=True):
        if end != ends[0]:
            found = f"{names[0]!r} is lost in truncated texts: {text[:30]!r} ends with {name!r}"
            yield f"{found} at {model.max_length} tokens"


def tokens_of_nothing(model: LoadedModel) -> bool:
    """Return whether an empty text without a prompt has tokens."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return True
    # Chat templates contain their special tokens.
    return bool(tokenizer(_in_template(tokenizer, ""), add_special_tokens=not tokenizer.chat_template)["input_ids"])


def tokens_around(model: LoadedModel, kind: str) -> int:
    """Return the number of tokens that the prompt and the chat template add to a text."""
    prompt = model.prompts.get(kind, "")
    return len(_ids(model.tokenizer, prompt)) + len(_ids(model.tokenizer, _in_template(model.tokenizer, prompt)))


def _in_template(tokenizer: Any, text: str) -> str:
    if not tokenizer.chat_template:
        return text
    report_step("applying the chat template")
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False))
    except Exception:  # reported when texts are encoded
        return text
