"""TRL's environment loop beside our rollout: python ci/bench/environment_loop.py [--episodes 16] [--group 1].

The same scenes, policy and limits, both in one process on one core: MTDrive's turns with the PDM agent, each scene
--group times, always the most likely token, so both sides say the same. TRL's `_generate` is timed from the prompts to
the end of the last turn, without its scoring of the tokens; ours is `rollout`. CPU seconds; the rounds alternate.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import tempfile  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from drivelit.bridges.advantages import episodes_of  # noqa: E402
from drivelit.bridges.trl_environment import environment, episode_reward, processor_for, rows  # noqa: E402
from drivelit.mtdrive.task import MTDriveTask  # noqa: E402
from drivelit.policy.engines import TransformersEngine  # noqa: E402
from drivelit.policy.model import load_policy  # noqa: E402
from drivelit.rollout.core import rollout  # noqa: E402
from drivelit.town.scenes import scenes  # noqa: E402

LONGEST = 3000  # tokens of an episode


class Timed(GRPOTrainer):
    "Notes the CPU seconds of its generation."

    def _generate(self, prompts):
        begin = time.process_time()
        out = super()._generate(prompts)
        self.took = time.process_time() - begin
        return out


def trainer_of(policy, task, some, episodes):
    "TRL's trainer, which makes no update here."
    args = GRPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=episodes,
        num_generations=2,
        max_completion_length=LONGEST,
        max_tool_calling_iterations=task.max_turns - 1,
        top_k=1,
        max_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    given = dict(processing_class=processor_for(policy), environment_factory=environment(task, some, LONGEST))
    return Timed(policy.model, episode_reward, args, train_dataset=rows(task, some), **given)


def by_trl(trainer, group):
    "CPU seconds and episodes."
    trainer.model.train()
    batch = trainer._generate_and_score_completions([row for row in trainer.train_dataset for _ in range(group)])
    return trainer.took, episodes_of(batch, [e._session for e in trainer.environments])


def by_rollout(policy, task, some):
    "CPU seconds and episodes."
    policy.model.eval()
    limits = dict(max_turns=task.max_turns, max_new_tokens=LONGEST, max_length=LONGEST)
    engine, begin = TransformersEngine(policy), time.process_time()
    out = rollout(engine, policy, task, some, temperature=0, **limits)
    return time.process_time() - begin, out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--group", type=int, default=1, help="episodes of a scene")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy, task = load_policy("mtdrive"), MTDriveTask(max_turns=args.turns)
    some = scenes(args.episodes // args.group, seed=77)
    trainer, found, same = trainer_of(policy, task, some, args.episodes), {"TRL": [], "ours": []}, []
    for k in range(args.rounds + 1):
        sides = {
            "TRL": by_trl(trainer, args.group),
            "ours": by_rollout(policy, task, [s for s in some for _ in range(args.group)]),
        }
        same.append(np.mean([a.ids == b.ids for a, b in zip(*(e for _, e in sides.values()), strict=True)]))
        for name, (took, played) in sides.items() if k else ():  # the first round warms up
            drawn, whole = sum(t >= 0 for e in played for t in e.turn), sum(len(e.ids) for e in played)
            turns, pictures = np.mean([e.turns for e in played]), sum(len(e.images) for e in played)
            found[name].append([drawn / took, drawn, 1 - drawn / whole, turns, pictures])
    for name, values in found.items():
        speed, drawn, masked, turns, pictures = np.array(values).T
        print(
            f"{name:5} {np.median(speed):6.0f} tokens/s ({speed.min():.0f} to {speed.max():.0f}); a round: "
            f"{drawn.mean():.0f} drawn, {masked.mean():.0%} of the rows masked, {turns.mean():.2f} turns, "
            f"{pictures.mean():.0f} pictures"
        )
    print(f"rows that are equal, token by token: {np.mean(same):.0%}")
    ratios = np.array(found["ours"])[:, 0] / np.array(found["TRL"])[:, 0]
    print(f"ours / TRL, tokens a second: {np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})")


if __name__ == "__main__":
    main()
