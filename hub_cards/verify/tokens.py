"""What a model's tokenizer makes of texts: tokens that the model knows, of the whole text, as all its files say.

Part of `verify.py`'s clean process: standard library and siblings only, until the libraries are imported in the functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .contents import auto_maps, read_json
from .files import Check
from .loading import Loaded, positions
from .progress import doing
from .texts import CODE, FOREIGN, SENTENCE, SHORT, probe_texts

# On these the files of a tokenizer are compared: upper case, accents, other scripts, spaces.
_COMPARED = (SHORT, SENTENCE.upper(), FOREIGN, CODE, "Café  naïve, ÉCOLE ", "")


def token_checks(model: Loaded) -> Iterator[Check]:
    """Yields the checks of the tokenizer and of the length of texts."""
    fault, note = _token_fault(model)
    yield Check("tokens", not fault, fault or note)
    if not model.kind or fault:
        return
    fault = _length_fault(model)
    yield Check("length", not fault, fault or f"{model.max_length} tokens")
    if not fault and _pools_last_token(model.module):
        yield _ending_check(model)


def _token_fault(model: Loaded) -> tuple[str, str]:
    """What is wrong with the tokenizer for this model, or what was found."""
    tokenizer = model.tokenizer
    ids = tokenizer(SENTENCE + SHORT, add_special_tokens=False)["input_ids"]
    if not ids:
        return "a sentence has no tokens: is tokenizer.json, or the vocabulary, missing?", ""
    unknown = ids.count(tokenizer.unk_token_id) / len(ids) if tokenizer.unk_token_id is not None else 0.0
    if unknown > 0.5:
        return f"{unknown:.0%} of a sentence's tokens are unknown: is the vocabulary missing, or another model's?", ""
    highest = max(tokenizer.get_vocab().values(), default=0)
    rows = _embedding_rows(model.module)
    if rows and highest >= rows:
        return (
            f"the tokenizer has ids up to {highest}, the model's table of embeddings {rows} rows: they do not fit",
            "",
        )
    if fault := next((found for one in tokenizers_of(model) for found in _contradictions(one, model)), ""):
        return fault, ""
    if tokenizer.pad_token is None and (model.kind or not model.causal):
        return "the tokenizer has no padding token, so texts cannot be encoded in batches: set pad_token", ""
    padding = "" if tokenizer.pad_token is not None else "; no padding token, so one text at a time"
    return "", f"{len(tokenizer)} in the vocabulary, {rows or 'unknown'} rows of embeddings{padding}"


def _embedding_rows(module: Any) -> int:
    from transformers import PreTrainedModel

    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            try:
                return int(part.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
            except (AttributeError, NotImplementedError):
                continue
    return 0


# --- files that contradict each other


def tokenizers_of(model: Loaded) -> list[Any]:
    """Those of transformers, one for each route."""
    from transformers import PreTrainedTokenizerBase

    parts = [model.tokenizer, *(getattr(part, "tokenizer", None) for part in model.module.modules())]
    return list({id(part): part for part in parts if isinstance(part, PreTrainedTokenizerBase)}.values())


def _contradictions(tokenizer: Any, model: Loaded) -> Iterator[str]:
    """Says where two files, or a file and the library, mean different tokens by the same text."""
    folder = Path(tokenizer.name_or_path)
    config = read_json(folder / "tokenizer_config.json")
    own_code = any(where.endswith("tokenizer_config.json") for where, _ in auto_maps(folder))
    if isinstance(config, dict) and not own_code:
        yield from _unknown_class(config.get("tokenizer_class"))
        if (folder / "tokenizer.json").is_file():
            yield from _other_tokens(tokenizer, folder)
        if config.get("do_lower_case") is False and _ids(tokenizer, SENTENCE) == _ids(tokenizer, SENTENCE.upper()):
            yield "tokenizer_config.json says do_lower_case false, but tokenizer.json makes text lower-case: change one"
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    for token in sorted({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}):
        if token.isalpha() and not token.isupper():
            yield f"the word {token!r} is a special token, so it is cut out of texts: remove it from the special tokens"
    ends = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("cls", "sep")}
    if None not in ends.values() and not model.causal:
        found = _ids(tokenizer, SHORT)
        for name, token in ends.items():
            if token not in found:
                token = getattr(tokenizer, f"{name}_token")
                yield f"the tokenizer does not add its {name}_token {token!r}: add it in tokenizer.json's post_processor"


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _unknown_class(name: Any) -> Iterator[str]:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if isinstance(name, str) and tokenizer_class_from_name(name) is None:
        yield (
            f"tokenizer_config.json names the tokenizer class {name}, which transformers does not have: save the tokenizer"
            " again, or name PreTrainedTokenizerFast"
        )


def _other_tokens(tokenizer: Any, folder: Path) -> Iterator[str]:
    """Whether readers of tokenizer.json alone, as text-embeddings-inference, get the tokens that transformers gives."""
    from tokenizers import Tokenizer

    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.no_padding()
    stored.no_truncation()
    for text in _COMPARED:
        there, here = stored.encode(text), _ids(tokenizer, text)
        if there.ids != here:
            place = next((at for at, (a, b) in enumerate(zip(there.ids, here, strict=False)) if a != b), -1)
            one, other = (ids[place] if ids else None for ids in (there.ids, here))
            names = [None if at is None else f"{tokenizer.convert_ids_to_tokens(at)!r} ({at})" for at in (one, other)]
            yield (
                f"tokenizer.json gives {names[0]} for a token of {text[:30]!r}, where transformers gives {names[1]}:"
                " tokenizer_config.json contradicts it. Save the tokenizer again with save_pretrained"
            )
            return


# --- length


def _length_fault(model: Loaded) -> str:
    if model.max_length >= 10**9:
        return "no maximum length is saved: long texts will fail"
    room = positions(model.module)
    if room is not None and model.max_length > room:
        return f"{model.max_length} tokens are kept, but the model has {room} positions: longer texts fail"
    for name, prompt in model.prompts.items():
        tokens = len(model.tokenizer(prompt)["input_ids"])
        if tokens >= model.max_length:
            return f"the prompt {name!r} has {tokens} tokens, which leaves no room for text in {model.max_length}"
    return ""


def _ending_check(model: Loaded) -> Check:
    tokenizer = model.tokenizer
    texts = [model.prompts.get("query", "") + text for text in probe_texts(model.max_length)]
    rows = tokenizer(texts, truncation=True)["input_ids"]
    ends = [row[-1] if row else None for row in rows]
    names = tokenizer.convert_ids_to_tokens([end if end is not None else 0 for end in ends])
    if ends[0] not in tokenizer.all_special_ids:
        found = f"the vector is read off the last token, but {SHORT!r} ends with {names[0]!r}: EOS is not added"
        return Check("end of text", False, found)
    for text, row, end, name in zip(texts, rows, ends, names, strict=True):
        if end != ends[0]:
            found = f"{names[0]!r} is lost where a text is cut to {len(row)} tokens: {text[:30]!r} ends with {name!r}"
            return Check("end of text", False, found)
    return Check("end of text", True, f"every text ends with {names[0]!r}, cut or not")


def tokens_of_nothing(model: Loaded) -> bool:
    """Whether an empty text without a prompt has a token that its vector can be read off."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return True
    # Behind a chat template no special tokens are added: it has those that it wants.
    return bool(tokenizer(_in_template(tokenizer, ""), add_special_tokens=not tokenizer.chat_template)["input_ids"])


def tokens_around(model: Loaded, kind: str) -> int:
    """The number of tokens that prompt and chat template put around a text."""
    prompt = model.prompts.get(kind, "")
    return len(_ids(model.tokenizer, prompt)) + len(_ids(model.tokenizer, _in_template(model.tokenizer, prompt)))


def _in_template(tokenizer: Any, text: str) -> str:
    """The text as the chat template renders it, if there is one."""
    if not tokenizer.chat_template:
        return text
    doing("applying the chat template")
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False))
    except Exception:  # it takes other turns: encoding will tell
        return text


def _pools_last_token(model: Any) -> bool:
    return any("lasttoken" in (getattr(module, "pooling_mode", None) or ()) for module in model.modules())
