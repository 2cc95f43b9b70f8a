"""Fixtures of test_all.py, for the tests in this folder, and the order of the slow tests."""

from test_all import data, quick_compiler, runs

__all__ = ["data", "quick_compiler", "runs"]

# Parts of names, the longest tests first: at the end, all processes would wait for a long one.
LONG = ("kernels_equal_float64", "documented_command", "for_an_h100", "resumes_on_any_number",
        "follows_k", "inductor", "interpreter", "kill_9")  # fmt: skip


def pytest_collection_modifyitems(items):
    place = lambda item: next((i for i, part in enumerate(LONG) if part in item.nodeid), len(LONG))
    items.sort(key=place)
