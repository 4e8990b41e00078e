"""What a run has kept is read as it was written, or refused: any bit of any kept file is flipped. Nothing is run."""

import ast
import hashlib
import json
import random
import warnings
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import CLIPConfig, CLIPModel

from drivelit.data.episodes import read_episodes, read_play_part, write_episodes, write_play_part
from drivelit.data.served import Journal
from drivelit.driveagent.motion import MotionHead, load_head, save_head
from drivelit.io.weights import MARK, WeightsError, damage, load_pretrained, seal
from drivelit.metrics.images import load_encoder
from drivelit.minddrive.experts import Experts, load_experts, save_experts
from drivelit.minddrive.online import ARRAYS, Played
from drivelit.minddrive.online import read_played as read_drives
from drivelit.minddrive.online import write_played as write_drives
from drivelit.policy.codec import load_codec, new_codec
from drivelit.policy.model import Policy, load_policy
from drivelit.rollout.core import Episode
from drivelit.runs.stages import read_scenes, save_scenes
from drivelit.scene.core import to_json
from drivelit.town.scenes import scenes
from drivelit.training.checkpoints import save_final
from drivelit.training.played import read_played, write_played

ROOT = Path(__file__).resolve().parents[1]
FLIPS = 60  # of each kind


class Lost(Exception):
    "A reader that gives nothing back: what was kept is made again."


def numbers(tensors):
    "Tensors by name as one text."
    rows = {
        k: [str(v.dtype), list(v.shape), hashlib.sha256(v.detach().numpy().tobytes()).hexdigest()]
        for k, v in tensors.items()
    }
    return json.dumps(rows, sort_keys=True)


def of_policy(policy):
    weights = numbers({k: v.float() for k, v in policy.model.state_dict().items()})
    alphas = [str(getattr(c, "lora_alpha", "")) for c in getattr(policy.model, "peft_config", {}).values()]
    text = policy.tokenizer("Turn left at +3.10 m/s, é")["input_ids"]
    return weights, alphas, policy.model.config.to_json_string(), text, policy.processor.image_size


def a_policy(here):
    final = save_final(load_policy("toy", size="tiny"), here)
    return final, lambda: of_policy(load_policy(final))


def adapters(here):
    base = load_policy("toy", size="tiny").save(here / "base")
    policy = load_policy(base)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    final = save_final(Policy(get_peft_model(policy.model, config), policy.processor), here)
    return final, lambda: of_policy(load_policy(final, base=base))


def a_codec(here):
    folder = new_codec(size=(48, 24), codes=16, channels=(8, 8), dim=2).save(here / "codec")

    def read(codec):
        return (numbers(codec.model.state_dict()), codec.size, codec.fold, dict(codec.model.config))

    return folder, lambda: [str(v) for v in read(load_codec(folder)) if v]


def an_encoder(here):
    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text, vision = small | dict(vocab_size=40), small | dict(image_size=28, patch_size=14)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(here / "final")
    return seal(here / "final"), lambda: numbers(load_encoder(here / "final").state_dict())


def experts(here):
    folder = seal(save_experts(Experts("toy", rank=2), here / "final"))
    return folder, lambda: numbers({k: v for k, v in load_experts(folder).named_parameters() if v.requires_grad})


def a_head(here):
    folder = save_head(MotionHead(), here / "head")
    return folder, lambda: (numbers(load_head(folder).state_dict()), load_head(folder).config)


SEALED = [a_policy, adapters, a_codec, an_encoder, experts, a_head]


def an_episode():
    draw = np.random.default_rng(0)
    view = Image.fromarray(draw.integers(0, 256, (6, 9, 3), np.uint8))
    talk = [dict(role="user", content=[dict(type="image", image=view), dict(type="text", text="?")])]
    said = dict(texts=["a"], rewards=[dict(reward=0.5, ttc=float("nan"))], infos=[dict(xy=np.ones((2, 2)), t=(1, "x"))])
    return Episode("s", talk, [5, 6], [-1, 0], [0.0, -1.5], [view], 1, **said)


def of_episode(e):
    views = [hashlib.sha256(np.asarray(i).tobytes()).hexdigest() for i in e.images if i is not None]
    return e.scene_id, e.ids, e.turn, e.logprobs, e.prompt_length, e.texts, repr(e.rewards), repr(e.infos), views


def a_rollout(here):
    write_played(here, "as asked", {3: an_episode()})

    def read():
        if not (found := read_played(here, "as asked")):
            raise Lost
        return {k: of_episode(e) for k, e in found.items()}

    return here / "3.npz", read


def a_part(here):
    write_play_part(here / "0.json.gz", dict(seed=1), [an_episode()])

    def read():
        found, why = read_play_part(here / "0.json.gz", dict(seed=1))
        if found is None:
            assert "0.json.gz" in why
            raise Lost
        return [of_episode(e) for e in found]

    return here / "0.json.gz", read


def drives(here):
    draw = np.random.default_rng(0)
    one = dict(images=draw.integers(0, 256, (2, 1, 4, 6, 3), np.uint8), texts=np.array(["go", "stop"]))
    one |= dict(speed=np.array([0, 1]), path=np.array([1, 0]), rewards=np.array([0.5, -1.0]))
    one |= {k: draw.standard_normal((2, 3)) for k in ("speed_logp", "path_logp")}
    write_drives(here / "a.npz", [Played(**one, reason="over", scene="s", steps=4)], dict(seed=1))

    def read():
        found, why = read_drives(here / "a.npz", dict(seed=1))
        if found is None:
            assert why
            raise Lost
        return [([getattr(d, k).tolist() for k in ARRAYS], d.reason, d.scene, d.steps, d.group) for d in found]

    return here / "a.npz", read


def a_journal(here):
    with Journal(here / "journal.jsonl") as journal:
        for i in range(3):
            journal.answer(f"k{i}", dict(text=f"Yes, {i} m/s"))
        journal.answer("last", 1)

    def read():
        with Journal(here / "journal.jsonl") as journal:
            if "last" not in journal:  # half a last line: it is asked again
                assert len(journal) == 3
                raise Lost
            return {k: journal.get(k) for k in ("k0", "k1", "k2", "last")}

    return here / "journal.jsonl", read


def a_town(here):
    save_scenes(scenes(2, seed=3), here / "train.npz")
    return here / "train.npz", lambda: [json.dumps(to_json(s)) for s in read_scenes(here / "train.npz")]


def flipped(path, count, seed=0):
    "Counts of the kept file with one bit flipped, each time another; afterwards it is as it was."
    whole, draw = path.read_bytes(), random.Random(seed)
    try:
        for _ in range(count):
            at, data = draw.randrange(len(whole)), bytearray(whole)
            data[at] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            yield at
    finally:
        path.write_bytes(whole)


def outcome(read, expected):
    "Whether what is read is refused; if it is not, it must be what was written."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = read()
        except (Lost, ValueError):
            return "refused"
    assert found == expected
    return "equal"


@pytest.mark.parametrize("kind", SEALED, ids=lambda k: k.__name__)
def test_any_bit_of_a_sealed_folder(kind, tmp_path):
    "Every byte of every file that the mark names is guarded; of the mark itself what says the same is read."
    folder, read = kind(tmp_path)
    expected = read()
    names = sorted(json.loads((folder / MARK).read_text()))
    assert any(n.endswith(".safetensors") for n in names) and any(n.endswith(".json") for n in names)
    for name in names:
        for at in flipped(folder / name, FLIPS // len(names) + 1):
            assert outcome(read, expected) == "refused", (name, at)
    for _ in flipped(folder / MARK, 5):
        outcome(read, expected)
    assert outcome(read, expected) == "equal"


@pytest.mark.parametrize("kind", SEALED, ids=lambda k: k.__name__)
def test_any_bit_of_a_header_without_a_mark(kind, tmp_path):
    "Names, shapes and types of tensors: what is misnamed is refused by its name, and never drawn at random."
    folder, read = kind(tmp_path)
    (folder / MARK).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a `final` without a mark is told
        expected = read()
    path = sorted(folder.glob("*.safetensors"))[0]
    whole, draw, seen = path.read_bytes(), random.Random(1), []
    for _ in range(FLIPS // 2):
        at, data = draw.randrange(8 + int.from_bytes(whole[:8], "little")), bytearray(whole)
        data[at] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        seen.append(outcome(read, expected))
    assert seen.count("refused") > len(seen) / 2


def bits(path, count, end=None):
    "Offsets of the file's bytes, before its `end`, of which one bit is flipped; afterwards it is as it was."
    written, draw = path.read_bytes(), random.Random(0)
    try:
        for _ in range(count):
            offset, data = draw.randrange(0, end or len(written)), bytearray(written)
            data[offset] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            yield offset
    finally:
        path.write_bytes(written)


def test_any_bit_of_a_model_of_diffusers(tmp_path):
    """Without a mark, what loads after a flip in the header is what was written, or it is refused by name; a flip in
    the body is another number, which only the mark shows."""
    levels = dict(block_out_channels=(8, 8), norm_num_groups=4, num_vq_embeddings=16, latent_channels=2)
    blocks = dict(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    codec = diffusers.VQModel(**levels, **blocks)
    codec.save_pretrained(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")

    def read():
        try:
            return load_pretrained(diffusers.VQModel, tmp_path).state_dict()
        except WeightsError as e:
            assert str(tmp_path) in str(e)

    def refusals(offsets):
        count = 0
        for offset in offsets:
            state = read()
            count += state is None
            assert state is None or all(torch.equal(v, state[k]) for k, v in codec.state_dict().items()), offset
        return count

    assert refusals(bits(path, 150, 8 + int.from_bytes(path.read_bytes()[:8], "little"))) > 100
    seal(tmp_path)
    assert refusals(bits(path, 150)) == 150
    assert refusals(bits(tmp_path / "config.json", 20)) == 20
    for _ in bits(tmp_path / MARK, 20):
        assert read() is None or damage(tmp_path) == ""  # a letter of a hash in capitals would still be refused
    assert read() is not None


@pytest.mark.parametrize("kind", [a_rollout, a_part, drives, a_journal, a_town], ids=lambda k: k.__name__)
def test_any_bit_of_what_a_run_has_kept(kind, tmp_path):
    path, read = kind(tmp_path)
    expected = read()
    seen = [outcome(read, expected) for _ in flipped(path, 5 * FLIPS)]
    assert seen.count("refused") > len(seen) / 2
    assert outcome(read, expected) == "equal"


def louder(arrays):
    text = arrays["text"].tobytes()
    assert b"0.30000000000000004" in text
    return dict(text=np.frombuffer(text.replace(b"0.30000000000000004", b"0.90000000000000004"), np.uint8))


def negative(arrays):
    return {"picture-0": 255 - arrays["picture-0"]}


@pytest.mark.parametrize(
    "change, words",
    [
        (louder, "its text has another SHA-256"),
        (negative, "has other pixels"),
        (lambda _: dict(text=np.array([{}], object)), "damaged and not used"),
    ],
    ids=["a reward", "a picture", "an object"],
)
def test_a_whole_archive_by_another_hand(tmp_path, change, words):
    "numpy writes its checksums anew: only the digests show that the content is another one."
    episode = an_episode()
    episode.rewards = [dict(reward=0.1 + 0.2, ttc=float("nan"))]
    write_episodes(tmp_path / "3.npz", "as asked", {3: episode})
    with np.load(tmp_path / "3.npz") as kept:
        arrays = dict(kept)
    np.savez(tmp_path / "4.npz", **arrays | change(arrays))
    episodes, message = read_episodes(tmp_path / "4.npz", "as asked")
    assert episodes is None and words in message and "4.npz" in message, message


def calls(source):
    "Every call of a file as (text of what is called, node)."
    return [(ast.unparse(n.func), n) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]


def runs_code(source):
    "The calls of a file that may run what lies in another file."
    for name, node in calls(source):
        given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        if name == "torch.load" and given.get("weights_only") is not True:
            yield name
        if name == "np.load" and given.get("allow_pickle", False) is not False:  # numpy's default is False
            yield name
        if name.split(".")[0] in ("pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"):
            if name.split(".")[-1] in ("load", "loads", "open", "Unpickler"):
                yield name


def loads_loosely(source):
    "The calls of a file that leave the weights of a model to `from_pretrained`, which draws what is missing."
    for name, _ in calls(source):
        kind, dot, last = name.rpartition(".")
        if (
            dot
            and last == "from_pretrained"
            and not kind.endswith(("Tokenizer", "TokenizerFast", "Config", "Processor"))
        ):
            if "Processor" not in kind:
                yield kind


PACKAGE = sorted((ROOT / "drivelit").rglob("*.py"))


def test_nothing_that_is_read_is_run():
    "Between processes of one trainer, episodes are pickled: `throughput.get` reads what its own children have written."
    found = {f"{p.relative_to(ROOT)}: {name}" for p in PACKAGE for name in runs_code(p.read_text())}
    assert found == {"drivelit/training/throughput.py: pickle.loads"}
    bad = "torch.load(p)\nnp.load(p, allow_pickle=x)\npickle.load(f)\ndill.loads(b)\ntorch.load(p, weights_only=x)"
    assert len(list(runs_code(bad))) == 5
    assert list(runs_code("torch.load(p, weights_only=True)\nnp.load(p, allow_pickle=False)")) == []


def test_weights_come_through_the_strict_loader():
    "But for PEFT, whose tensors are compared afterwards, and a checkpoint, which was compared with its mark before."
    found = {f"{p.relative_to(ROOT)}: {kind}" for p in PACKAGE for kind in loads_loosely(p.read_text())}
    assert found == {
        "drivelit/policy/model.py: PeftModel",
        "drivelit/io/weights.py: kind",
        "drivelit/training/sft.py: type(model)",
    }
    assert list(loads_loosely("CLIPModel.from_pretrained(f)\nAutoConfig.from_pretrained(f)")) == ["CLIPModel"]
