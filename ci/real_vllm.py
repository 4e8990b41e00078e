"""The checks of ci/vllm.sh: a real vLLM against the policy in this process.

python ci/real_vllm.py WORK [--record]   WORK: an empty folder; --record: write the answers that the stub must give
"""

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

from drivelit.io.files import OWNER, make_folder, owner_of, write_text
from drivelit.policy.engines import Conversation, EngineError, TransformersEngine
from drivelit.policy.image_tokens import DreamConstraint, add_image_tokens
from drivelit.policy.model import Policy, load_policy, new_policy, toy_config, train_tokenizer
from drivelit.policy.vllm import VLLMEngine, one_pad_each, picture_url, release, scored
from drivelit.testing.vllm import GlooGroup, given_weights, meeting, plain_answer, transfer_asks
from drivelit.training.turn_grpo import served

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "nbs" / "80_testing" / "golden" / "vllm.json"
TRANSFER = GOLDEN.with_name("vllm_transfer.json")
EXACT = 1e-5  # |difference| of log-probabilities in fp32; measured: below 2e-6
LONGEST = 1000  # tokens of a conversation
BAD = []


def report(good, what, figure=""):
    print(f"{'ok ' if good else 'BAD'} {what:78} {figure}", flush=True)
    if not good:
        BAD.append(what)


# -- a server ----------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Served:
    "A server of a folder, or one that a command line starts."

    def __init__(self, work, name, command, port, **settings):
        self.log, self.command, self.settings = work / f"server-{name}.log", command, settings
        self.url, self.port = f"http://127.0.0.1:{port}", str(port)

    def __enter__(self):
        begin, env = time.monotonic(), os.environ | {k: str(v) for k, v in self.settings.items()}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                self.command, shell=True, cwd=ROOT, env=env, stdout=log, stderr=log, executable="/bin/bash"
            )
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() - begin > 900:
                self.stop()
                sys.exit(f"{self.log.read_text()[-4000:]}\n{self.command}: the server did not start")
            time.sleep(1)
        print(f"    server up after {time.monotonic() - begin:.0f} s: {self.command[-110:]}", flush=True)
        return self

    def __exit__(self, *_):
        self.stop()

    def healthy(self):
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:
            return False

    def stop(self):
        if self.process.poll() is None:
            os.kill(self.script(), signal.SIGTERM)
        self.process.wait(timeout=120)

    def script(self):
        "The process of ci/serve_vllm.sh: bash may have replaced itself by it."
        mine = (p for p, _, words in processes() if "serve_vllm.sh" in words and self.port in words.split())
        return next(mine, self.process.pid)

    def group(self):
        "pid -> words of the processes of this server; the machine may have others."
        rows = processes()
        first = next((p for p, _, words in rows if "bin/vllm serve" in words and self.port in words.split()), None)
        return {p: words for p, group, words in rows if first and group == first}


def processes():
    "(pid, group, words) of what runs on this machine."
    lines = subprocess.run(["ps", "-eo", "pid=,pgid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in lines.splitlines()]
    return [(int(p), int(g), words[0]) for p, g, *words in rows if words]


def alive(pids):
    return [
        p for p in pids if Path(f"/proc/{p}").exists() and "Z" not in Path(f"/proc/{p}/stat").read_text().split()[2]
    ]


def serve(work, name, folder, flags="", **settings):
    port = free_port()
    settings = dict(MAX_MODEL_LEN=LONGEST, IMAGES=12) | settings
    return Served(work, name, f"bash ci/serve_vllm.sh {folder} {port} {flags}", port, **settings)


# -- policies and talks ------------------------------------------------------------------------------------------------


def untied():
    "A policy with an output head of its own."
    tokenizer = train_tokenizer()
    torch.manual_seed(0)
    whole = Qwen2_5_VLForConditionalGeneration(toy_config(tokenizer, "tiny", tie_word_embeddings=False))
    return Policy(whole, new_policy(tokenizer, "tiny").processor)


def tied():
    "The policy of the recorded answers: tied weights, eight codes."
    return add_image_tokens(load_policy("toy", size="tiny"), 8)


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(256, size=(84, 168, 3)).astype(np.uint8))


def question(seed, text="What is the speed of the vehicle?"):
    return dict(role="user", content=[dict(type="image", image=picture(seed)), dict(type="text", text=text)])


def few(count=4, opening=""):
    return [Conversation([question(k, "Yes or No")], opening=opening) for k in range(count)]


def move(policy, seed):
    "As a very large update would."
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.3 * p.std().nan_to_num() * torch.randn(p.shape, generator=rng).to(p.device))


def talks(policy, engine):
    "Four talks of four turns, a picture in each turn: drawn, and the most likely words."
    here, talk, apart, equal, prompts = TransformersEngine(policy), few(), [], [], 0
    for turn in range(4):
        for temperature in (0.0, 1.0):
            said = engine.generate(talk, 24, temperature=temperature, seed=turn)
            prompts += len(said)  # an answer whose prompt was read otherwise is refused
            for c, s in zip(talk, said, strict=True):
                apart.append((scored(policy, c, s, engine.never) - torch.tensor(s.logprobs)).abs())
            if temperature == 0:
                ours = here.generate(talk, 24, temperature=0)
                equal += [o.ids == s.ids for o, s in zip(ours, said, strict=True)]
        more = [policy.encode_more([question(100 + 10 * turn + k)], closed=s.stop == "eos") for k, s in enumerate(said)]
        rows = zip(talk, said, more, strict=True)
        talk = [Conversation(None, c.ids + s.ids + m.input_ids, c.images + m.images) for c, s, m in rows]
    apart = torch.cat(apart)
    report(
        apart.max() < EXACT, "log-probabilities, four talks of four turns with pictures", f"{apart.max():.1e} at most"
    )
    report(np.mean(equal) == 1, "the most likely words are those of this process", f"{np.mean(equal):.0%} of rows")
    report(True, "prompts read as they stand in the episode", f"{prompts}, {len(apart)} tokens")


def close(engine, what, conversations=None, most=16):
    mean, worst = engine.apart(conversations or few(), most, seed=7)
    report(worst < EXACT, what, f"mean {mean:.1e}, at most {worst:.1e}")


def refused(what, do, *words):
    "Whether something is refused with a sentence that holds the words."
    try:
        do()
    except (EngineError, ValueError) as e:
        report(all(w in str(e) for w in words), what, str(e)[:150])
    else:
        report(False, what, "was taken")


# -- the checks --------------------------------------------------------------------------------------------------------


def check_publish(policy, engine, what):
    for step in (1, 2):
        move(policy, step)
        begin = time.monotonic()
        engine.publish(f"step-{step}")
        close(engine, f"publish {step}, {what}, in {time.monotonic() - begin:.1f} s")


def check_rule(folder, url, work):
    policy = load_policy(folder, dtype="float32")
    constraint = DreamConstraint(policy, 6, 8)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[constraint.start] *= 6  # the tag becomes likely
    engine = VLLMEngine(policy, [url], work / "rule", constraint=constraint, dtype="float32")
    engine.publish("rule")
    for opening in ("<dream>", "", "no <dream><|3|>", "<dream><|1|><|1|><|1|><|1|><|1|><|1|></dream>"):
        said = engine.generate(few(6, opening), 24, seed=1, on_error="return")
        wrong = [s for s in said if isinstance(s, EngineError)]
        report(not wrong, f"under the constraint, after {opening!r}", f"{len(wrong)} of 6 refused")
        close(engine, f"log-probabilities under the constraint, after {opening!r}", few(6, opening), 24)


def check_long(policy, engine):
    "Many long prompts with seeds at once, more tokens than a step of the server takes, are all answered."
    words = "Yes or No. "

    def size(n):
        return len(policy.encode([dict(role="user", content=words * n)]).input_ids)

    many = next(n for n in range(10, 1000) if size(n + 5) > LONGEST - 60)
    for seed in (None, 5):
        asked = [Conversation([dict(role="user", content=f"{k} {seed} {words * many}")]) for k in range(24)]
        said = engine.generate(asked, 8, seed=seed, on_error="return")
        lost = [s for s in said if isinstance(s, EngineError)]
        what = f"24 prompts of {len(asked[0].ids)} tokens at once, {'with seeds' if seed else 'without a seed'}"
        report(not lost, what, str(lost[0])[:150] if lost else "all answered")


def run_of(work, name):
    "A folder that belongs to a run of its own."
    write_text(make_folder(work / name) / OWNER, name)
    return work / name / "served"


def check_owner(folder, url, work):
    "Two runs that publish to one server at the same moment: one gets a sentence, and nobody the other's weights."
    for k in range(3):
        runs = []
        for seed in (1, 2):
            policy = load_policy(folder, dtype="float32")
            move(policy, 10 * k + seed)
            runs.append(VLLMEngine(policy, [url], run_of(work, f"run-{k}-{seed}"), dtype="float32", retries=0))
        said = [None, None]

        def publish(n, runs=runs, said=said):
            try:
                runs[n].publish("rollout")
            except EngineError as e:
                said[n] = str(e)

        threads = [threading.Thread(target=publish, args=(n,)) for n in (0, 1)]
        [t.start() for t in threads], [t.join() for t in threads]
        lost = [s for s in said if s]
        told = "belongs to another run" in lost[0] or "by two at once" in lost[0] if lost else False
        report(len(lost) == 1 and told, f"two runs publish to one server, {k + 1}", (lost or ["both did"])[0][:150])
        if len(lost) == 1:
            winner = runs[said.index(None)]
            close(winner, "  and it has the weights of the one whose version it says")
            late = runs[1 - said.index(None)]
            refused("  a run that comes later is refused", lambda late=late: late.publish("x"), "another run")
            release([url], winner.owner)


def check_base(folder, url, work):
    "Adapters of two runs, one after the other, on a server that has the base of the first: the second gives its own."
    for seed in (1, 2, 2):
        policy = load_policy(folder, dtype="float32")
        move(policy, seed)
        engine = served(url, policy, None, run_of(work, f"base-of-{seed}"), False, True)
        owner = engine.owner
        policy.model = get_peft_model(policy.model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
        engine.publish("rollout-0")
        close(engine, f"adapters on a base of their own, seed {seed}")
        release([url], owner)


def check_stops(policy, engine):
    "An answer ends behind a text, such as that of a tool call, with the token in which the text ends."
    here, same = TransformersEngine(policy), []
    for k, (talk, said) in enumerate(zip(few(), here.generate(few(), 24, temperature=0), strict=True)):
        inner = said.text[k + 2 :][:9]  # nine letters: they begin and end inside tokens
        talk = replace(talk, stops=(inner,))
        (ours,), (theirs,) = (e.generate([talk], 24, temperature=0) for e in (here, engine))
        apart = (scored(policy, talk, theirs, engine.never) - torch.tensor(theirs.logprobs)).abs().max()
        same.append((ours.ids, ours.text, ours.stop) == (theirs.ids, theirs.text, theirs.stop) and apart < EXACT)
        same[-1] &= theirs.stop == "stop" and theirs.text.endswith(inner) and len(theirs.ids) < len(said.ids)
    report(np.mean(same) == 1, "answers that a text ends are those of this process", f"{sum(same)} of {len(same)}")


def check_adapters(folder, url, work):
    base = VLLMEngine(load_policy(folder, dtype="float32"), [url], work / "base", dtype="float32")
    base.publish("base")
    for name, targets in dict(
        few=["q_proj", "v_proj"], language=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj", all="all-linear"
    ).items():
        tuned = load_policy(folder, dtype="float32")
        how = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        tuned.model = get_peft_model(tuned.model, how)
        engine = VLLMEngine(tuned, [url], work / f"adapters-{name}", dtype="float32")
        if name == "all":
            refused("adapters on the vision part are refused", lambda e=engine: e.publish("x"), "vision part")
            continue
        for step in (1, 2):
            engine.publish(f"step-{step}")
        close(engine, f"adapters on {name}")


def check_vocabulary(folder, url, work):
    def start(p):
        return lambda: VLLMEngine(p, [url], work / "other", dtype="float32", retries=0)

    fewer, more = load_policy("toy", size="tiny"), add_image_tokens(load_policy(folder), 12)
    words = load_policy("toy", size="tiny", text=("A line that nobody else has.\n",))
    for what, policy in {"fewer tokens": fewer, "more tokens": more, "other tokens": words}.items():
        refused(f"a policy with {what} is refused before anything is sent", start(policy), url, "folder of this policy")
        with mock.patch("drivelit.policy.vllm.other_shape", lambda *_: ""):  # as if its folder could not be seen
            refused(f"the same by its words alone, {what}", start(policy), url)


def check_failures(folder, url, work):
    "The last check of a server: it does not live on."
    policy = load_policy(folder, dtype="float32")
    engine = VLLMEngine(policy, [url], work / "failing", dtype="float32", retries=0)
    write = engine._write

    def spoilt(change):
        def do(folder, weights):
            write(folder, weights)
            (file,) = folder.glob("*.safetensors")
            change(file)

        engine._write = do
        refused(f"weights that are {change.__doc__} are not taken", lambda: engine.publish("bad"), "stays paused")
        refused("  and nothing is asked then", lambda: engine.generate(few(1), 4), "the last publish failed")
        engine._write = write

    def gone(file):
        "missing"
        file.unlink()

    def cut(file):
        "cut off"
        file.write_bytes(file.read_bytes()[:100_000])

    for change in (gone, cut):
        spoilt(change)
        engine.publish("good")
        close(engine, "  and the next ones heal it")


def check_kill(server, policy, work, which):
    "kill -9 of one of vLLM's processes while it answers: the client is told, and no other process stays behind."
    engine = VLLMEngine(policy, [server.url], work / f"kill-{which}", timeout=90, retries=2)
    engine.version = engine._version_of(server.url)
    engine.never.append(engine.eos)  # answers go on until the process dies
    group = server.group()
    victim = next(p for p, words in group.items() if which in words)
    threading.Timer(2.5, os.kill, (victim, signal.SIGKILL)).start()
    begin = time.monotonic()
    lost = 0  # a fast machine is done with a round before the process dies: then comes another
    while not lost and time.monotonic() - begin < 60:
        said = engine.generate(few(8), LONGEST - 50, on_error="return")
        lost = sum(isinstance(s, EngineError) for s in said)
    took = time.monotonic() - begin
    report(
        lost > 0 and took < 60, f"kill -9 of {which}: all requests end", f"{lost} of 8 with an error in {took:.0f} s"
    )
    while alive(group) and time.monotonic() - begin < took + 30:
        time.sleep(0.2)
    left = time.monotonic() - begin - took
    report(not alive(group), f"kill -9 of {which}: no process stays", f"{len(group)} gone after {left:.1f} s")


def ask(url, one, model):
    "Status and answer of a recorded request, told without what changes from run to run."
    body = None if one["body"] is None else json.dumps(one["body"]).replace("MODEL", model).encode()
    request = urllib.request.Request(url + one["path"], body, method=one["method"])
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        status, text = e.code, e.read().decode()
    # vLLM hides what looks like a file in its messages, with the full stop behind it: some names of folders do
    return status, plain_answer(text.replace(model, "MODEL").replace("<path>", "MODEL."))


def asks_of(policy):
    "The requests whose answers are recorded, in an order in which none disturbs the next."
    shown = [Image.new("RGB", (168, 84), colour) for colour in ((220, 40, 40), (40, 40, 220))]
    parts = [dict(type="image_url", url=picture_url(p), uuid=u) for p, u in zip(shown, ("red", "blue"), strict=True)]
    content = [dict(type="image", image=shown[0]), dict(type="text", text="Yes or No")]
    short = one_pad_each(policy.encode([dict(role="user", content=content)]).input_ids, policy.image_token_id)
    rows, eos = policy.model.config.get_text_config().vocab_size, policy.tokenizer.eos_token_id
    how = dict(max_tokens=4, temperature=0.0, top_p=1.0, logprobs=0, stop_token_ids=[eos], detokenize=False)
    plain = dict(model="MODEL", token_ids=[5, 6, 7], sampling_params=how, return_token_ids=True, cache_salt="a")
    seen = plain | dict(token_ids=short, content_parts=parts[:1])

    def with_(**more):
        return plain | dict(sampling_params=how | more)

    constraint = DreamConstraint(policy, 6, 8).told(policy.tokenizer("<dream>", add_special_tokens=False)["input_ids"])
    word = policy.tokenizer("assistant\n", add_special_tokens=False)["input_ids"]  # this policy goes on saying it
    behind = dict(stop=["tant\nassis"], include_stop_str_in_output=True, max_tokens=8)  # it ends inside a token
    generate = {
        "words": plain,
        "words that a text ends": with_(**behind, detokenize=True) | dict(token_ids=[5, 6, *word]),
        "a text without words to look in": with_(**behind),
        "a picture": seen,
        "a picture by its name": seen | dict(content_parts=[dict(type="image_url", uuid="red")]),
        "a picture that was never sent": seen | dict(content_parts=[dict(type="image_url", uuid="nobody")]),
        "a picture as the chat protocol has it": seen
        | dict(content_parts=[dict(type="image_url", image_url=dict(url=parts[0]["url"]), uuid="x")]),
        "two pictures for one placeholder": seen | dict(content_parts=parts),
        "another model": plain | dict(model="nobody"),
        "a slash in the salt": plain | dict(cache_salt="a/b"),
        "a long salt": plain | dict(cache_salt="a" * 129),
        "a token outside the vocabulary": plain | dict(token_ids=[5, rows]),
        "no token": plain | dict(token_ids=[]),
        "a prompt too long": plain | dict(token_ids=[5] * (LONGEST + 1)),
        "an answer that would be too long": plain
        | dict(token_ids=[5] * (LONGEST - 2), sampling_params=how | dict(max_tokens=10)),
        "a word made impossible": with_(logit_bias={"87": -100.0}),
        "a bias outside the vocabulary": with_(logit_bias={str(rows): -100.0}),
        "an unknown setting": with_(nonsense=1),
        "a negative temperature": with_(temperature=-1.0),
        "no constraint": with_(extra_args=dict(dream_rule="?")),
        "a constraint": with_(extra_args=dict(dream_rule=constraint), max_tokens=9),
    }

    def post(name, path, body=None):
        return dict(name=name, method="POST", path=path, body=body)

    def get(name, path):
        return dict(name=name, method="GET", path=path, body=None)

    def reload(where):
        return dict(method="reload_weights", kwargs=dict(weights_path=where))

    return [
        get("health", "/health"),
        get("models", "/v1/models"),
        get("version of the server", "/version"),
        get("version of the weights", "/weight_info"),
        get("whether it is paused", "/is_paused"),
        get("an unknown route", "/nothing"),
        post("a token behind the vocabulary", "/detokenize", dict(model="MODEL", tokens=[len(policy.tokenizer)])),
        post("tokens of a text", "/tokenize", dict(model="MODEL", prompt="Yes<|im_end|>", add_special_tokens=False)),
        *(post(name, "/inference/v1/generate", body) for name, body in generate.items()),
        post("an adapter that is not there", "/v1/load_lora_adapter", dict(lora_name="x", lora_path="/nowhere")),
        post("an adapter that was not loaded", "/v1/unload_lora_adapter", dict(lora_name="x")),
        post("an unknown method", "/collective_rpc", dict(method="nonsense")),
        post("pause", "/pause?mode=wait"),
        get("that it is paused", "/is_paused"),
        post("weights that are not there", "/collective_rpc", reload("/nowhere")),
        post("weights of its own folder", "/collective_rpc", reload("MODEL")),
        post("empty the cache", "/reset_prefix_cache"),
        post("name the weights", "/update_weight_version", dict(new_version="v1")),
        post("go on", "/resume"),
        get("the new version", "/weight_info"),
        post("words of named weights", "/inference/v1/generate", plain),
        post("a picture after new weights", "/inference/v1/generate", generate["a picture by its name"]),
        post("name them as before", "/update_weight_version", dict(new_version="default")),
    ]


def check_golden(url, folder, record):
    "The answers and refusals that the stub is tested with are those of this server."
    found = []
    for one in asks_of(load_policy(folder)):
        status, answer = ask(url, one, str(folder))
        found.append(one | dict(status=status, answer=answer))
    version = json.loads(urllib.request.urlopen(f"{url}/version", timeout=30).read())["version"]
    if record:
        lines = ",\n".join(json.dumps(one) for one in found)
        GOLDEN.write_text(f'{{"server": "vLLM {version}", "asks": [\n{lines}\n]}}\n')
        print(f"    {GOLDEN}: {GOLDEN.stat().st_size:,} bytes")
    told = {a["name"]: a for a in json.loads(GOLDEN.read_text())["asks"]}
    for one in found:
        like = same(told.get(one["name"]), one)
        figure = f"HTTP {one['status']}" if like else json.dumps(one["answer"])[:400]
        report(like, f"as recorded: {one['name']}", figure)


def check_transfer(folder, url, without, work, record):
    "Weights over a group of processes, gloo in NCCL's place at both ends: the recorded conversation, then the engine."
    policy = load_policy(folder, dtype="float32")
    weights, group = given_weights(policy), GlooGroup()
    words = next(one for one in asks_of(policy) if one["name"] == "words")
    start = dict(name="start without a transfer", method="POST", path="/start_weight_update", body=None)

    def answered(url, one):
        return one | dict(zip(("status", "answer"), ask(url, one, str(folder)), strict=True))

    found = [one | meeting(lambda one: answered(url, one), one, group, weights) for one in transfer_asks(weights)]
    found = [f | dict(body=one["body"]) for f, one in zip(found, transfer_asks(weights), strict=True)]
    told = dict(asks=found, said=answered(url, words), without=answered(without, start))
    group.close()
    if record:
        TRANSFER.write_text(json.dumps(told) + "\n")
    golden = json.loads(TRANSFER.read_text())

    def every(record):
        return [*record["asks"], record["said"], record["without"]]

    for a, b in zip(every(golden), every(told), strict=True):
        report(same(a, b), f"as recorded: {b['name']}", f"HTTP {b['status']}" if same(a, b) else json.dumps(b)[:400])
    with mock.patch("drivelit.policy.vllm.NCCLGroup", GlooGroup):
        engine = VLLMEngine(policy, [url], work / "sent", dtype="float32", by="nccl", retries=0)
        check_publish(policy, engine, "over a group of processes")
        with mock.patch.object(engine, "_load", lambda url, name, left: broken(engine, url, left)):
            refused(
                "tensors of which one has no shape are refused", lambda: engine.publish("bad"), "HTTP 500", "shapes"
            )
        check_publish(policy, engine, "over a group again, after a failure")
        engine._post(url, "/start_weight_update")
        check_publish(policy, engine, "over a group again, after an update that was cut off")
        release([url], engine.owner)
        engine = VLLMEngine(policy, [without], work / "files", dtype="float32", by="nccl", retries=0)
        refused("a server that takes files alone is told", lambda: engine.publish("x"), "PUBLISH=nccl")


def check_nccl(work):
    "NCCL itself: the trainer on the first GPU, a server on the second. It has not run anywhere yet."
    folder = tied().save(work / "nccl", "ci/real_vllm.py")
    policy = load_policy(folder, dtype="float32")
    policy.model.to("cuda:0")
    with serve(work, "nccl", folder, PUBLISH="nccl", CUDA_VISIBLE_DEVICES="1", DTYPE="float32") as server:
        engine = VLLMEngine(policy, [server.url], work / "sent-nccl", dtype="float32", by="nccl")
        for step in (1, 2):
            move(policy, step)
            engine.publish(f"step-{step}")
            mean, worst = engine.apart(few(), 16, seed=7)
            report(mean < 1e-3, f"publish {step} over NCCL", f"mean {mean:.1e}, at most {worst:.1e}")


def broken(engine, url, seconds):
    "As `_load`, with an update that the server must refuse."
    engine._post(url, "/start_weight_update", None, seconds)
    engine._post(
        url, "/update_weights", dict(update_info=dict(names=["x"], dtype_names=["float32"], shapes=[])), seconds
    )


def same(a, b):
    "Whether two recorded answers say the same; log-probabilities may differ in the last places."
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return abs(a - b) < 1e-4 if isinstance(a, float) and isinstance(b, float) else a == b


# Whose policies servers play, and what their smoke profiles need for it. MindDrive's path comes from hidden states,
# which vLLM does not give back.
SYSTEMS = dict(mtdrive=[], driveagent=[], autodrive_p3=["frames_as=images"], minddriver=[])


def check_run(system, work):
    "A run whose servers play, by the commands that its plan prints."
    port, out = free_port(), work / system
    url = f"http://127.0.0.1:{port}"
    plan = [
        sys.executable,
        "-m",
        "drivelit",
        "plan",
        f"{system}.smoke",
        "--out",
        str(out),
        "--set",
        f"rollout_servers={url}",
    ]
    plan += [word for key in SYSTEMS[system] for word in ("--set", key)]
    page = subprocess.run(plan, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    begin, server, run = (re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", x) for x in commands(page))
    subprocess.run(begin, shell=True, check=True, cwd=ROOT, capture_output=True)
    with Served(work, system, server, port), open(work / f"run-{system}.log", "w") as log:
        start = time.monotonic()
        code = subprocess.run(run, shell=True, check=False, cwd=ROOT, stdout=log, stderr=log).returncode
    heard = Path(work / f"server-{system}.log").read_text()
    answers, updates = heard.count('/inference/v1/generate HTTP/1.1" 200'), heard.count('/collective_rpc HTTP/1.1" 200')
    stages = len(list(out.glob("**/done.json"))) - 1
    figure = f"{stages} stages, {answers} answers, {updates} publishes, {time.monotonic() - start:.0f} s"
    report(code == 0, f"{system}.smoke with rollout_servers =", figure)
    if code:
        print(Path(work / f"run-{system}.log").read_text()[-3000:])
    gaps = [json.loads(line) for f in out.glob("**/metrics.jsonl") for line in f.read_text().splitlines()]
    name = "sampling/sampling_logp_difference/max"
    worst = max((g[name] for g in gaps if name in g), default=None)
    report(worst is not None and worst < 1e-4, f"  logged difference of log-probabilities, {system}", f"{worst}")


def commands(page):
    "The lines that a plan prints to start servers and run, in order."
    return [line.partition("$ ")[2] for line in page.splitlines() if line.startswith("  $ ")][:3]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", default=f"server,transfer,untied,{','.join(SYSTEMS)}", help="with commas")
    given = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `with`, which ends the server
    work, only = given.work.resolve(), given.only.split(",")
    owner_of(work)  # all that follows is one run
    if "server" in only:
        folder = tied().save(work / "tied", "ci/real_vllm.py")
        with serve(work, "tied", folder, LORA_RANK=8) as server:
            check_golden(server.url, folder, given.record)
            policy = load_policy(folder, dtype="float32")
            engine = VLLMEngine(policy, [server.url], work / "weights", dtype="float32")
            engine.publish("start")
            talks(policy, engine)
            check_publish(policy, engine, "tied weights")
            check_stops(policy, engine)
            check_long(policy, engine)
            release([server.url], engine.owner)
            check_owner(folder, server.url, work)
            check_base(folder, server.url, work)
            check_rule(folder, server.url, work)
            check_adapters(folder, server.url, work)
            check_vocabulary(folder, server.url, work)
            check_failures(folder, server.url, work)
            check_kill(server, load_policy(folder, dtype="float32"), work, "bin/vllm serve")
    if "transfer" in only and torch.cuda.device_count() > 1:
        check_nccl(work)
    elif "transfer" in only and not torch.cuda.is_available():
        folder, flags = (
            tied().save(work / "sent-to", "ci/real_vllm.py"),
            "--worker-extension-cls drivelit_gloo.OverGloo",
        )
        with serve(work, "transfer", folder, flags, PUBLISH="nccl") as server, serve(work, "plain", folder) as plain:
            check_transfer(folder, server.url, plain.url, work, given.record)
    if "untied" in only:
        folder = untied().save(work / "untied", "ci/real_vllm.py")
        with serve(work, "untied", folder) as server:
            policy = load_policy(folder, dtype="float32")
            engine = VLLMEngine(policy, [server.url], work / "weights-untied", dtype="float32")
            close(engine, "as started, own output head")
            check_publish(policy, engine, "own output head")
            check_kill(server, policy, work, "EngineCore")
    for system in SYSTEMS:
        if system in only:
            check_run(system, work)
    print(f"{len(BAD)} failed" + "".join(f"\n  {what}" for what in BAD))
    return bool(BAD)


if __name__ == "__main__":
    sys.exit(main())
