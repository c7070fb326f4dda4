from .searcher import Searcher as Searcher
