"""A folder of weights that lacks something, has too much, or differs from its mark is one sentence that names it: a
model of Qwen2.5-VL that was downloaded, a policy and adapters of the kit."""

import json
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from drivelit.io.weights import MARK, WeightsError, load_tensors, seal
from drivelit.policy.layouts import check_whole
from drivelit.policy.model import Policy, load_policy
from drivelit.testing.qwen import make_qwen

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def tmp_path(tmp_path_factory):
    "A folder whose name says nothing of the case, as the errors name their files."
    return tmp_path_factory.mktemp("files")


def refused(words, read, *args, error=WeightsError):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error) as e:
            read(*args)
    for w in [words] if isinstance(words, str) else words:
        assert w in str(e.value), str(e.value)


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    return make_qwen(tmp_path_factory.mktemp("qwen") / "flat", "3b", "flat")


def add_a_token(file):
    content = json.loads(file.read_text())
    content["added_tokens"] += [dict(id=200_000, content="<more>")]
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "words, change",
    [
        (
            "tokenizer.json or vocab.json is missing",
            lambda f: [(f / n).unlink() for n in ("tokenizer.json", "vocab.json")],
        ),
        ("no settings of pictures", lambda f: (f / "preprocessor_config.json").unlink()),
        (f"{SHARD}: is missing, and model.safetensors.index.json names it", lambda f: (f / SHARD).unlink()),
        (f"{SHARD}: cannot be read", lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-200])),
        (
            "vocab_size = 7, and embed_tokens.weight has 151936",
            lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("151936", "7")),
        ),
        ("config.json: not readable as JSON", lambda f: (f / "config.json").write_text("{")),
        (
            "the tokenizer has 200001 tokens, and embed_tokens.weight 151936 rows",
            lambda f: add_a_token(f / "tokenizer.json"),
        ),
        ("tokenizer.json: holds no vocabulary", lambda f: (f / "tokenizer.json").write_text("{}")),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_download_that_is_not_whole(flat, tmp_path, words, change):
    folder = shutil.copytree(flat, tmp_path / "qwen")
    change(folder)
    refused(words, check_whole, folder)


def test_another_kind_of_model(tmp_path):
    sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8)
    Qwen2ForCausalLM(
        Qwen2Config(**sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    ).save_pretrained(tmp_path)
    refused("model_type = 'qwen2', expected 'qwen2_5_vl'", check_whole, tmp_path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    "A folder with a policy in `saved` and its adapters in `lora`, which name it as their base."
    here = tmp_path_factory.mktemp("policy")
    policy = load_policy(load_policy("toy").save(here / "saved"))
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapters = Policy(get_peft_model(policy.model, config), policy.processor)
    adapters.model.peft_config["default"].base_model_name_or_path = str(here / "saved")
    adapters.save(here / "lora")
    return here


@pytest.fixture
def folders(stored, tmp_path):
    "A copy of them that may be changed, without marks."
    here = shutil.copytree(stored, tmp_path / "policy")
    file = here / "lora/adapter_config.json"
    file.write_text(file.read_text().replace(str(stored), str(here)))
    for folder in (here / "saved", here / "lora"):
        (folder / MARK).unlink(missing_ok=True)
    return here


@pytest.mark.parametrize(
    "folder, part", [("saved", "layers.1.mlp.up_proj"), ("lora", "layers.1.self_attn.q_proj.lora_B")]
)
@pytest.mark.parametrize(
    "words, change",
    [
        ("1 missing", lambda k, v: {}),
        ("1 unexpected: x", lambda k, v: {"x." + k: v}),
        ("is", lambda k, v: {k: v[:-1].contiguous()}),
        ("1 not finite", lambda k, v: {k: v.index_fill(0, torch.tensor([0]), torch.inf)}),
    ],
    ids=["missing", "unexpected", "of another shape", "not finite"],
)
def test_a_tensor_that_is_changed(folders, folder, part, words, change):
    (path,) = (folders / folder).glob("*.safetensors")
    tensors = load_tensors(path)
    name = next(k for k in tensors if part in k)
    tensors |= change(name, tensors.pop(name))
    save_file(tensors, path, dict(format="pt"))
    refused((part, words), load_policy, folders / folder, error=ValueError)


def test_the_folders_are_read_as_they_are(folders):
    for folder in ("saved", "lora"):
        load_policy(folders / folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_policy_that_differs_from_its_mark(folders, name):
    "Of its adapters, too, whose base it is."
    file = seal(folders / "saved") / name
    file.write_bytes(file.read_bytes().replace(b"1", b"2", 1))
    for folder in ("saved", "lora"):
        refused(f"{name} has other bytes than were written", load_policy, folders / folder, error=ValueError)


def test_files_of_weights_that_are_something_else(folders):
    weights = folders / "lora/adapter_model.safetensors"
    save_file({}, weights)
    refused("missing: base_model", load_policy, folders / "lora", error=ValueError)
    weights.write_bytes(b"0" * 500)
    refused("adapter_model.safetensors: cannot be read", load_policy, folders / "lora", error=ValueError)
    weights.rename(folders / "lora/adapter_model.bin")
    refused("a pickle (adapter_model.bin), which may run code", load_policy, folders / "lora", error=ValueError)
    (folders / "saved/model.safetensors").rename(folders / "saved/pytorch_model.bin")
    refused("a pickle (pytorch_model.bin), which may run code", load_policy, folders / "saved", error=ValueError)
