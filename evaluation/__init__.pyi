from .docstrings import DocstringTask as DocstringTask
from .docstrings import docstring_task as docstring_task
from .mteb_tasks import evaluate_mteb as evaluate_mteb
from .retrieval import RetrievalScores as RetrievalScores
from .retrieval import evaluate_bm25 as evaluate_bm25
from .retrieval import evaluate_retrieval as evaluate_retrieval
from .retrieval import score_run as score_run
