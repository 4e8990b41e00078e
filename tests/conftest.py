"""The files that take longest begin first; with `--dist loadfile --no-loadscope-reorder` none of them ends alone."""

import gc

LONGEST = ("test_cluster", "test_carla", "test_memory")  # 380 s and twice 120 s of 1045 s


gc.disable()  # what the files import is not looked through, a quarter of the time that it takes


def pytest_collection_modifyitems(items):
    rank = {name: k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish():
    "What was imported is not looked through again: a trainer asks the collector for it, a third of a small run's time."
    gc.collect()
    gc.freeze()
    gc.enable()
