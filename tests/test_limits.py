"""A policy's folder that asks for too much, or for what never ends, is one sentence that names its file; what policies
of this kit and of others ask for passes."""

import json

import pytest

from drivelit.policy.limits import check_limits

SMALL = dict(vocab_size=100, hidden_size=16, num_hidden_layers=2, intermediate_size=32)
DOUBLE = dict(type="Replace", pattern=dict(String="a"), content="aa")
NORMALIZER = dict(type="Sequence", normalizers=[dict(type="NFC"), DOUBLE])
REGEX = r".*language_model.*\.(q|k|v|o)_proj"
PICTURES = dict(min_pixels=3136, max_pixels=12_845_056)
VIDEO = dict(size=dict(shortest_edge=128, longest_edge=786_432))


@pytest.fixture
def folder(tmp_path_factory):
    "A folder of weights of 10,000 bytes, whose name says nothing of the case."
    path = tmp_path_factory.mktemp("files")
    (path / "model.safetensors").write_bytes(bytes(10_000))
    return path


def lay(folder, files):
    "JSON files of a folder, by their names; a text is written as it is."
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    "files",
    [
        dict(config=SMALL),
        dict(config=dict(text_config=SMALL, vision_config=dict(depth=32))),
        dict(tokenizer=dict(normalizer=NORMALIZER), processor_config=dict(image_size=[168, 84])),
        dict(preprocessor_config=PICTURES, adapter_config=dict(r=8, target_modules=REGEX)),
        dict(video_preprocessor_config=VIDEO),
    ],
    ids=lambda files: " and ".join(files),
)
def test_what_is_usual_passes(folder, files):
    lay(folder, files)
    check_limits(folder)


@pytest.mark.parametrize(
    "files, words",
    [
        (dict(config=dict(SMALL, vocab_size=10**9)), "config.json: text_config.vocab_size is 1000000000"),
        (dict(config=dict(text_config=dict(num_hidden_layers=200_000))), "num_hidden_layers is 200000"),
        (dict(config=dict(vision_config=dict(depth=True))), "vision_config.depth is True"),
        (dict(config=dict(SMALL, hidden_size=30_000)), "numbers at least, and the weights beside it have 10,000 bytes"),
        (dict(config=dict(quantization_config=dict(quant_method="gptq"))), "quantised by 'gptq'"),
        (dict(config="[1]"), "config.json: a JSON object is expected, not a list"),
        (dict(config="{"), "config.json: not readable as JSON (Expecting"),
        (dict(config="[" * 100_000), "config.json: not readable as JSON (maximum recursion"),
        (dict(tokenizer=dict(normalizer=dict(normalizers=[DOUBLE] * 34))), "make a text 17,179,869,184 times as long"),
        (dict(tokenizer=dict(normalizer=dict(type="Prepend", prepend="a" * 100))), "make a text 101 times"),
        (dict(processor_config=dict(image_size=[28 * 40_000, 28])), "a side of image_size is 1120000"),
        (dict(processor_config=dict(image_size=["x", -28])), "a side of image_size is x"),
        (dict(processor_config=dict(image_size=168)), "should be [width, height]"),
        (dict(preprocessor_config=dict(max_pixels=10**12)), "max_pixels is 1000000000000"),
        (
            dict(tokenizer_config=dict(chat_template="{{ 9 ** 9 }}")),
            "tokenizer_config.json: a chat template that may not end",
        ),
        (dict(tokenizer_config=dict(chat_template=[dict(name="a", template="{{ 'a' * 9 }}")])), "a product or a power"),
        (dict(adapter_config=dict(target_modules="((([a-z._0-9])+)+)+X")), "target_modules has a repetition inside"),
        (dict(adapter_config=dict(target_modules="(a*b)*?")), "target_modules has a repetition inside"),
        (dict(adapter_config=dict(target_modules="(")), "target_modules is no regular expression"),
        (dict(adapter_config=dict(r=2 * 10**9)), "adapter_config.json: r is 2000000000"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_hangs_or_ends_a_process_is_refused(folder, files, words):
    lay(folder, files)
    with pytest.raises(ValueError) as e:
        check_limits(folder)
    assert words in str(e.value), str(e.value)


def test_adapters_that_are_each_others_base(tmp_path):
    pair = [tmp_path / "one", tmp_path / "two"]
    for folder, base in zip(pair, reversed(pair), strict=True):
        folder.mkdir()
        lay(folder, dict(adapter_config=dict(base_model_name_or_path=str(base))))
    with pytest.raises(ValueError, match="which needs them"):
        check_limits(pair[0])
