"""A shard that is lost, cut off, damaged or of another preparation is named, and it alone is made again."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drivelit.data.shards import ShardError, Shards, write_shards
from drivelit.scene.core import to_json
from drivelit.town.scenes import scenes

SCENES = scenes(27, seed=7)  # once round all families
BLOCKS = [SCENES[k : k + 6] for k in range(0, 27, 6)]
OPTIONS = dict(about=dict(source="toy, by hand"), references=True)


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    "A folder of five whole shards."
    folder = tmp_path_factory.mktemp("shards") / "town"
    write_shards(BLOCKS, folder, **OPTIONS)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    "A folder of another preparation."
    folder = tmp_path_factory.mktemp("shards") / "other"
    write_shards(BLOCKS[::-1], folder, dict(source="another"), references=True)
    return folder


@pytest.fixture
def copied(town, tmp_path):
    "A copy of the folder, whose second shard is damaged."
    return Path(shutil.copytree(town, tmp_path / "copy"))


def flip(path, offset):
    "Change one bit of a shard."
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def flip_in_a_page(path, **_):
    page = pq.read_metadata(path).row_group(0).column(2)
    flip(path, page.data_page_offset + page.total_compressed_size // 2)


DAMAGES = {
    "lost": (lambda p, **_: p.unlink(), "is missing; run the same preparation again"),
    "a bit of a page": (flip_in_a_page, "row group 0 is damaged"),
    "the length of the footer": (lambda p, **_: flip(p, -8), "00001.parquet: "),
    "cut off": (lambda p, **_: p.write_bytes(p.read_bytes()[:-100]), "no complete Parquet file"),
    "of another preparation": (
        lambda p, other, **_: p.write_bytes((other / p.name).read_bytes()),
        "its 'run' is not what index.json says",
    ),
    "of another place": (
        lambda p, town, **_: p.write_bytes((town / "00002.parquet").read_bytes()),
        "its 'file' is not what index.json says",
    ),
    "of another writer": (
        lambda p, **_: pq.write_table(pa.table(dict(a=[1])), p),
        "its footer is not what `write_shard` writes",
    ),
}


@pytest.mark.parametrize("change, words", DAMAGES.values(), ids=DAMAGES)
def test_a_shard_that_is_damaged(town, other, copied, change, words):
    change(copied / "00001.parquet", town=town, other=other)
    shards, remade = Shards(copied), []
    assert shards[0].id == SCENES[0].id  # the others can be read
    for use in (lambda: shards[6], shards.check):
        with pytest.raises(ShardError) as e:
            use()
        assert words in str(e.value), str(e.value)
    assert "00001.parquet: " in str(e.value), str(e.value)
    (copied / "00001.parquet").unlink(missing_ok=True)

    def block(k):
        return lambda on_error: remade.append(k) or iter(BLOCKS[k])

    write_shards([block(k) for k in range(5)], copied, **OPTIONS)
    assert (remade, Shards(copied).check()) == ([1], 27)  # it alone was made again


def test_any_bit_of_a_shard(town, copied):
    "Each of 60 single bits drawn at random is either found and named, or nothing that is read has changed."
    path, expected, refused = copied / "00001.parquet", [to_json(s) for s in SCENES[6:12]], 0
    whole = path.read_bytes()
    for offset in np.random.default_rng(0).integers(0, len(whole), 60):
        flip(path, offset)
        try:
            assert [to_json(s) for s in Shards(copied)[6:12]] == expected, offset
        except ShardError as e:
            assert "00001.parquet: " in str(e)
            refused += 1
        path.write_bytes(whole)
    assert refused > 50
