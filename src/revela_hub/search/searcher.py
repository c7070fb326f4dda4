"""Search of files or of an index with a retriever, BM25, or both, as the command `search` and `Searcher` in Python do."""

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from revela_hub.data.sources.text_options import TextOptions
from revela_hub.errors import UserError
from revela_hub.files import local_path, scratch_folder
from revela_hub.options import option, required
from revela_hub.output import is_quiet, note
from revela_hub.ranges import PositiveInt
from revela_hub.search.models import fitted_settings, load_models
from revela_hub.search.options import Mode, RankOptions

if TYPE_CHECKING:
    from revela_hub.retrieval import Hit, Passages, Ranker


@dataclass(kw_only=True)
class SearchOptions(TextOptions, RankOptions):
    """What to search, and how."""

    option_group = "options"

    model: str = required("Sentence-transformers folder or Hub id, output folder of adapt, or bm25.")
    corpus: list[str] = option([], "Text to search: folders, files, glob patterns or data sets (hf:owner/name).")
    index: str | None = option(
        None, "Index that `revela-hub index` made (folder, or hf:owner/name[@revision]), instead of --corpus."
    )
    mode: Mode | None = option(
        None,
        "How to rank (default: hybrid; with --index dense, unless adapt has fitted the model; bm25 for bm25, sparse for a"
        " SparseEncoder).",
    )
    max_words: PositiveInt = option(120, "Maximum number of words per passage.")


class Searcher:
    """Search text files, or an index, as `revela-hub search` does.

    Vectors are cached: only new passages are encoded.

    Args:
        model: Sentence-transformers folder or Hub id, output folder of `revela-hub adapt`, or `"bm25"`.
        corpus: Text to search: a folder, file, glob pattern or data set (`hf:owner/name`), or several.
        options: Other options of `revela-hub search` by their names, such as `index="outputs/index"`, `mode="dense"`,
            `weights=[0.7, 0.3]` (of the retriever and of BM25) or `rerank="self"`. The output folder of adapt is searched with
            its fitted weights.

    Attributes:
        score_name: "relative score" (comparable within one search only), "cosine", or "score" (of BM25 or a reranker, for example).

    Raises:
        UserError: The model, the text or the index cannot be read, or the options do not go together.
        TypeError: There is no such option.

    Example::

        searcher = Searcher("outputs/adapted", "path/to/docs")
        for hit in searcher.search("how do I renew a contract?", top_k=3):
            print(hit.score, hit.cosine, hit.location, hit.text)
    """

    def __init__(self, model: str | Path, corpus: str | Path | Sequence[str | Path] = (), **options: Any) -> None:  # noqa: ANN401
        from revela_hub.retrieval.ranking import score_name

        given = [corpus] if isinstance(corpus, str | Path) else corpus
        sources: list[Any] = [str(source) if isinstance(source, Path) else source for source in given]
        search = SearchOptions(model=os.fspath(model), corpus=sources, **options)
        if bool(search.corpus) == bool(search.index):
            raise UserError("give the text to search: either corpus or index")
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(scratch_folder("search"))
            self._ranker, self.passages = _open(search, temporary)
            self.score_name = score_name(self._ranker)
            self._close = weakref.finalize(self, stack.pop_all().close)

    def close(self) -> None:
        """Delete the temporary files; done at the latest when Python ends."""
        self._close()

    def __enter__(self) -> "Searcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """The number of passages."""
        return len(self.passages)

    @overload
    def search(self, query: str, top_k: int = 5) -> "list[Hit]": ...
    @overload
    def search(self, query: list[str], top_k: int = 5) -> "list[list[Hit]]": ...
    def search(self, query: str | list[str], top_k: int = 5) -> "list[Hit] | list[list[Hit]]":
        """Return the best passages for a query, best first; for several queries, a list for each.

        A hit has `text`, `score`, `cosine`, `location` (`path/to/file.py:120-145`), `path`, `start_line` and `end_line`.
        Passages that no part of the ranking finds are left out, so there may be fewer than `top_k`.

        Raises:
            UserError: A query is empty, or `top_k` is below 1.
        """
        from revela_hub.retrieval.ranking import cosines

        queries = [query] if isinstance(query, str) else list(query)
        if not all(text.strip() for text in queries):
            raise UserError("the query is empty")
        if top_k < 1:
            raise UserError(f"top_k is {top_k}: give 1 or more")
        found = []
        if queries:
            hits = self._ranker.search(queries, top_k)
            found = self.passages.found(hits, cosines(self._ranker, queries, hits))
        return found[0] if isinstance(query, str) else found


def _open(options: SearchOptions, temporary: Path) -> "tuple[Ranker, Passages]":
    """Read the text, or open the index, and build the ranker; files that are not kept are written to a temporary folder."""
    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.report import ReadReport, counted
    from revela_hub.files import cache_folder, claim
    from revela_hub.retrieval import build_ranker, read_passages
    from revela_hub.retrieval.encoder import document_identity

    if not options.index:
        report = ReadReport()
        documents = read_documents(options.corpus, report=report, **options.text_options())
        show = not is_quiet()
        passages = read_passages(
            documents, temporary, max_words=options.max_words, report=report, show_progress_bar=show
        )
        report.chunks = len(passages)  # different ones
        note(report)
    mode = options.mode or _default_mode(options)
    options.check_modes(mode)
    settings, dense, sparse, reranker = load_models(options, options.model, mode)
    folder = local_path(options.cache_dir or cache_folder("passages"))
    stored: dict[str, Any] = {}
    if options.index:
        from revela_hub.hub_cards.hub_index import open_store

        identity = document_identity(options.model, options.max_length) if settings.identity else None
        store = open_store(options.index, dense, settings.identity or None, options.model, identity)
        passages, built = store.passages, store.metadata
        note(counted(len(passages), "passage"))
        settings = replace(settings, index=built.options, document_prompt=built.document_prompt)
        if options.cache_dir is None and os.access(store.derived, os.W_OK):
            folder = store.derived
        else:
            claim(folder)
        if "dense" in settings.used:
            stored = {"index": store.index}
    elif settings.used == ("bm25",):
        folder = temporary  # BM25 statistics are computed from the current files
    else:
        claim(folder)
    return build_ranker(passages, settings, folder, dense=dense, sparse=sparse, reranker=reranker, **stored), passages


def _default_mode(options: SearchOptions) -> str:
    from revela_hub.loading import model_kind
    from revela_hub.retrieval.encoder import model_in

    if options.model == "bm25":
        return "bm25"
    if model_kind(model_in(options.model)) == "SparseEncoder":
        return "sparse"
    # The index of BM25 over millions of passages may not fit in memory.
    return "hybrid" if options.corpus or fitted_settings(options.model) else "dense"
