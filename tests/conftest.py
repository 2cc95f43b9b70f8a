"""Fixtures of test_all.py, for the tests in this folder."""

from test_all import data, over_ranks, quick_compiler, runs, texts

__all__ = ["data", "over_ranks", "quick_compiler", "runs", "texts"]
