"""Fixtures of test_all.py, for the tests in this folder."""

from test_all import data, over_ranks, runs, texts

__all__ = ["data", "over_ranks", "runs", "texts"]
