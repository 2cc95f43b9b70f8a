"""Fixtures of test_all.py, for the tests in this folder."""

from test_all import data, over_ranks, quick_compiler, runs, texts

__all__ = ["data", "over_ranks", "quick_compiler", "runs", "texts"]


def pytest_collection_modifyitems(items):
    """The longest test first: at the end, one process would wait for it."""
    items.sort(key=lambda item: item.name != "test_every_documented_command_runs_at_toy_size")
