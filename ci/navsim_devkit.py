"""NAVSIM's own code scores a submission of ours on synthetic logs: records nbs/65_bridges/golden/navsim_scores.json.gz.

First in drivelit's environment, then twice in the devkit's, where nothing of drivelit is imported:

    python ci/navsim_devkit.py FOLDER --write

    python3.11 -m venv devkit
    devkit/bin/pip install numpy==1.23.5 scipy==1.13.1 shapely==2.1.2 "pandas<2.2" "geopandas<1" hydra-core==1.3.2 \
        pyquaternion "opencv-python-headless<4.9" "matplotlib<3.9" aiofiles tqdm
    devkit/bin/python ci/navsim_devkit.py FOLDER --navsim NAVSIM --nuplan NUPLAN_DEVKIT --golden FILE

NAVSIM is a clone of autonomousvision/navsim, first at branch v1.1, then at main (v2); NUPLAN_DEVKIT is one of
motional/nuplan-devkit; FILE is the recorded table, to which each of the two runs adds its part. How long a call takes
on each side is told by `ci/bench/peers.py --only navsim`, which uses this file.

Unmodified and in use: the readers of logs (SceneLoader, Scene, NavSimScenario), MetricCacheProcessor with PDM-Closed
and its search over the lane graph, run_pdm_score_from_submission (v1), the base class of the replay agent (v2),
pdm_score, PDMSimulator, PDMScorer. Replaced: the map's data base, by the map of the scenes, and packages that scoring
never calls (torch, ray, rasterio, ...), by empty modules.
"""

import argparse
import gzip
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import pickle
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import shapely

UNUSED = """aioboto3 bokeh boto3 botocore casadi control guppy joblib psutil pyinstrument pyogrio pytest
pytorch_lightning rasterio ray requests retry rtree selenium sklearn sqlalchemy sympy timm torch torchvision
ujson urllib3""".split()
CITY, PAST, FRAMES, STEP = "us-nv-las-vegas-strip", 4, 14, 0.5
START, APART = np.array([664_432.0, 3_998_282.0]), 2_000.0  # metres: each scene has a place of its own in one city
LAYERS = dict(roadblock="ROADBLOCK", intersection="INTERSECTION", carpark="CARPARK_AREA", drivable="CARPARK_AREA")


class Unused(ModuleType):
    "A package that is imported and never called: its classes are empty, and its functions give another such thing."

    __path__ = []

    def __getattr__(self, key):
        if key.startswith("__"):
            raise AttributeError(key)
        base = UserWarning if key.endswith("Warning") else object
        return type(key, (base,), {}) if key[:1].isupper() else Unused(key)

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else Unused("result")  # a decorator gives its function


class Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Finds the unused packages."

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec):
        return Unused(spec.name)

    def exec_module(self, module):
        pass


def place_of(k):
    "Where scene k stands: x, y, heading."
    return np.array([*(START + [APART * (k % 8), APART * (k // 8)]), 0.7 * k % 6.0 - 3.0])


def placed(points, origin):
    "Points (..., 2) or poses (..., 3) of the frame of `origin` in the frame that it is given in."
    p, (x, y, h) = np.asarray(points, float), origin
    out = [x + np.cos(h) * p[..., 0] - np.sin(h) * p[..., 1], y + np.sin(h) * p[..., 0] + np.cos(h) * p[..., 1]]
    return np.stack(out + ([p[..., 2] + h] if p.shape[-1] == 3 else []), -1)


def turned(v, angle):
    "A vector in axes that are turned by an angle."
    c, s = np.cos(angle), np.sin(angle)
    return np.array([c * v[0] + s * v[1], -s * v[0] + c * v[1]])


def behind(line):
    "The strip of half a metre behind a stop line: a red light where the map has no connector."
    a, b = np.asarray(line, float)
    n = np.array([b[1] - a[1], a[0] - b[0]]) / np.hypot(*(b - a))
    n = n if n @ ((a + b) / 2) > 0 else -n
    return np.array([a, b, b + 0.5 * n, a + 0.5 * n])


def lights_of(scene):
    "Ids of connectors that are red now, and the strips that stand for one."
    route = {a["id"]: a["kind"] for a in scene["map"]["areas"] if a["on_route"]}
    red, strips = [], {}
    for light in scene["lights"]:
        k = max(0, int(np.searchsorted(light["times"], 1e-9)) - 1)
        if light["states"][k] != "red":
            continue
        lanes = [i for i in light["lane_ids"] if i in route]
        connectors = [i for i in lanes if route[i] == "lane_connector"]
        red += connectors
        if not connectors and len(light["stop_line"]) and (lanes or not light["lane_ids"]):
            strips[f"strip {light['id']}"] = behind(light["stop_line"])
    return red, strips


def seen_at(agent, t):
    "Pose and velocity of a road user at a time, or None."
    times = np.array(agent["times"])
    k = int(np.abs(times - t).argmin())
    return (np.array(agent["poses"][k]), np.array(agent["velocity"][k])) if abs(times[k] - t) < 1e-6 else None


def write_log(scene, k, folder):
    "A scene as a log of NAVSIM: 1.5 s of past, now, and 5 s to come."
    ego, expert, place = scene["ego"], np.array(scene["expert"]["poses"]), place_of(k)
    expert = np.concatenate([expert, [2 * expert[-1] - expert[-2], 3 * expert[-1] - 2 * expert[-2]]])
    poses = np.concatenate([np.array(ego["poses"])[-PAST:], expert])
    past_v, past_a = (np.array(ego[f"past_{n}"])[-PAST:] for n in ("velocity", "acceleration"))
    step = np.hypot(*np.diff(poses[:, :2], axis=0).T) / STEP
    red, strips = lights_of(scene)
    frames = []
    for i in range(FRAMES):
        t, here, pose = STEP * (i - PAST + 1), poses[i], placed(poses[i], place)
        found = [(a, s) for a in scene["agents"] if (s := seen_at(a, t)) is not None]
        boxes = []
        for a, (p, _) in found:
            x, y = turned(p[:2] - here[:2], here[2])
            boxes.append([x, y, a["height"] / 2, a["length"], a["width"], a["height"], p[2] - here[2]])
        now = i == PAST - 1
        v = ego["velocity"] if now else past_v[i] if i < len(past_v) else (step[min(i, len(step) - 1)], 0.0)
        acceleration = ego["acceleration"] if now else past_a[i] if i < len(past_a) else (0.0, 0.0)
        frames.append(
            dict(
                token=scene["id"] if now else f"{scene['id']} {i}",
                timestamp=1_600_000_000_000_000 + int(1e6 * (100 * k + t)),
                log_name=f"log {scene['id']}",
                scene_token=scene["id"],
                map_location=CITY,
                roadblock_ids=[f"{scene['id']} lights", f"{scene['id']} route"],
                traffic_lights=[(f"{scene['id']} {n}", True) for n in (*red, *strips)],
                ego2global_translation=[*pose[:2], 0.0],
                ego2global_rotation=[np.cos(pose[2] / 2), 0.0, 0.0, np.sin(pose[2] / 2)],
                ego_dynamic_state=[*v, *acceleration],
                driving_command=np.array([0, 1, 0, 0]),
                cams={f"cam_{n}": {} for n in "f0 l0 l1 l2 r0 r1 r2 b0".split()},
                lidar_path="none",
                anns=dict(
                    gt_boxes=np.array(boxes).reshape(-1, 7),
                    gt_names=[a["type"] for a, _ in found],
                    gt_velocity_3d=np.array([[*turned(v, here[2]), 0.0] for _, (_, v) in found]).reshape(-1, 3),
                    instance_tokens=[a["id"] for a, _ in found],
                    track_tokens=[a["id"] for a, _ in found],
                ),
            )
        )
    (folder / f"log {scene['id']}.pkl").write_bytes(pickle.dumps(frames))


class Lane:
    "A lane, a connector or another area of the map: what the devkit asks of one."

    def __init__(self, name, polygon, block=None, line=(), limit=0.0):
        self.id, self.polygon, self.block, self.speed_limit_mps = name, polygon, block, limit
        self.baseline_path, self.outgoing_edges, self.incoming_edges = SimpleNamespace(discrete_path=line), [], []

    def get_roadblock_id(self):
        return self.block

    def contains_point(self, point):
        return self.polygon.contains(shapely.Point(point.x, point.y))


class Block(Lane):
    "A roadblock with its lanes."

    def __init__(self, name, polygon, lanes=(), before=()):
        super().__init__(name, polygon)
        self.interior_edges, self.incoming_edges = list(lanes), list(before)


class TownMap:
    "The maps of all scenes as one city: the devkit's map API, as far as it is asked."

    map_name = CITY

    def __init__(self, scenes):
        from nuplan.common.actor_state.state_representation import StateSE2
        from nuplan.common.maps.maps_datatypes import SemanticMapLayer

        self.layers, self.blocks, self.named = SemanticMapLayer, [], {}
        self.places = {layer: [] for layer in SemanticMapLayer}
        for k, scene in enumerate(scenes):
            place, name = place_of(k), lambda key, s=scene: f"{s['id']} {key}"
            line = [StateSE2(*p) for p in placed(scene["map"]["centerline"], place)]
            limit, lanes, off = scene["map"]["speed_limit"], [], []
            for a in scene["map"]["areas"]:
                rings = a["polygon"]
                holes = [placed(h, place) for h in rings["holes"]]
                polygon = shapely.Polygon(placed(rings["exterior"], place), holes)
                if a["kind"] in LAYERS:
                    made = Block(name(a["id"]), polygon)
                    self.places[SemanticMapLayer[LAYERS[a["kind"]]]].append(made)
                elif a["kind"] in ("lane", "lane_connector"):  # the search finds the line that the scene gives
                    block = name("route" if a["on_route"] else "other")
                    (lanes if a["on_route"] else off).append(Lane(name(a["id"]), polygon, block, line, limit))
            strips = [
                Lane(name(key), shapely.Polygon(placed(ring, place)), name("lights"), line, limit)
                for key, ring in lights_of(scene)[1].items()
            ]
            lights = Block(name("lights"), shapely.Polygon(), strips)  # on the route, on no road

            def there(some):
                return shapely.union_all([x.polygon for x in some]) if some else shapely.Polygon()

            route = Block(name("route"), there(lanes), lanes, [lights])
            connectors = self.places[SemanticMapLayer.ROADBLOCK_CONNECTOR]
            connectors += [route, *([Block(name("other"), there(off), off)] if off else [])]
            self.named |= {b.id: b for b in (lights, route)}

    def get_proximal_map_objects(self, point, radius, layers):
        around = shapely.Point(point.x, point.y).buffer(radius)
        return {layer: [x for x in self.places[layer] if x.polygon.intersects(around)] for layer in layers}

    def get_map_object(self, name, layer):
        return self.named.get(name)


def plain(value):
    "A number or a text for JSON."
    return value.item() if isinstance(value, np.generic) else value


def caches(folder, scenes, version):
    "Write logs, and the metric caches that the devkit makes of them; the loader of its scenes."
    from navsim.common.dataclasses import SceneFilter
    from navsim.common.dataloader import SceneLoader
    from navsim.planning.metric_caching.metric_cache_processor import MetricCacheProcessor
    from navsim.planning.scenario_builder.navsim_scenario import NavSimScenario
    from nuplan.planning.simulation.trajectory.trajectory_sampling import TrajectorySampling

    logs, cache = folder / f"logs_{version}", folder / f"cache_{version}"
    (cache / "metadata").mkdir(parents=True, exist_ok=True)
    logs.mkdir(exist_ok=True)
    for k, scene in enumerate(scenes):
        write_log(scene, k, logs)
    loader = SceneLoader(logs, logs, scene_filter=SceneFilter(PAST, FRAMES - PAST))
    sampling = TrajectorySampling(num_poses=40, interval_length=0.1)
    files = []
    for token in loader.tokens:
        scenario = NavSimScenario(loader.get_scene_from_token(token), "maps", "v")
        if version == "v1":
            files.append(MetricCacheProcessor(str(cache), True).compute_metric_cache(scenario).file_name)
        else:
            maker = MetricCacheProcessor(str(cache), True, sampling)
            files.append(maker.compute_and_save_metric_cache(scenario).file_name)
    (cache / "metadata/files.csv").write_text("\n".join(["file_name", *map(str, files)]) + "\n")
    return loader, cache, sampling


def score_v1(folder, scenes):
    "The table of its script from a submission."
    from navsim.planning.script.run_pdm_score_from_submission import run_pdm_score
    from navsim.planning.simulation.planner.pdm_planner.scoring.pdm_scorer import PDMScorer
    from navsim.planning.simulation.planner.pdm_planner.simulation.pdm_simulator import PDMSimulator

    _, cache, sampling = caches(folder, scenes, "v1")
    table = run_pdm_score(folder / "submission.pkl", PDMSimulator(sampling), PDMScorer(sampling), cache)
    return table.to_dict("records")


def score_v2(folder, scenes):
    "Its pdm_score for what the replay agent plans; without the comfort from one frame to the next."
    from navsim.common.dataloader import MetricCacheLoader
    from navsim.evaluate.pdm_score import pdm_score
    from navsim.planning.simulation.planner.pdm_planner.scoring.pdm_scorer import PDMScorer, PDMScorerConfig
    from navsim.planning.simulation.planner.pdm_planner.simulation.pdm_simulator import PDMSimulator
    from navsim.traffic_agents_policies.log_replay_traffic_agents import LogReplayTrafficAgents

    sys.path.insert(0, str(folder))
    agent = importlib.import_module("drivelit_replay").ReplayAgent(str(folder / "plans.jsonl"))
    agent.initialize()
    loader, cache, sampling = caches(folder, scenes, "v2")
    known, rows = MetricCacheLoader(cache), []
    for token in known.tokens:
        scene = loader.get_scene_from_token(token)
        plan = agent.compute_trajectory(scene.get_agent_input(), scene)
        scorer = PDMScorer(sampling, PDMScorerConfig(human_penalty_filter=True))
        found, _ = pdm_score(
            known.get_from_token(token),
            plan,
            sampling,
            PDMSimulator(sampling),
            scorer,
            LogReplayTrafficAgents(sampling),
        )
        (row,) = found.drop(columns=["weighted_metrics", "weighted_metrics_array"]).to_dict("records")
        rows.append(dict(token=token) | row)
    return rows


def write(folder):
    "In drivelit's environment: a scene of each family of the town, and a plan for each that drives well or badly."
    from dataclasses import replace

    from drivelit.bridges.navsim import write_agent, write_submission
    from drivelit.metrics.kinematics import constant_velocity
    from drivelit.scene.core import Area, Ego, Map, to_json
    from drivelit.town.scenes import FAMILIES, make_scene

    def single(v):
        return np.asarray(v, np.float32).astype(float)  # a log keeps motion in single precision

    def plain_scene(s):
        "As much of a scene as a log holds: 1.5 s of past, no steering angle."
        e, way = s.ego, np.hypot(*np.diff(s.ego.poses[-PAST - 1 :, :2], axis=0).T)
        v = np.stack([np.r_[way[:-1] / STEP, 0], np.zeros(PAST)], 1)
        v[-1] = e.velocity
        a = np.gradient(v, STEP, axis=0)
        a[-1] = e.acceleration
        now = single(e.velocity), single(e.acceleration)
        ego = Ego(e.times[-PAST:], e.poses[-PAST:].round(4), *now, 0.0, single(v), single(a))
        agents = []
        for x in s.agents:
            if (k := (x.times > -1.51) & (x.times < 5.01)).any():
                size = {n: round(getattr(x, n), 3) for n in ("length", "width", "height")}
                moves = dict(poses=x.poses[k].round(4), velocity=x.velocity[k].round(4))
                agents.append(replace(x, times=x.times[k], **moves, **size))
        areas = [
            Area(a.id, a.kind, shapely.transform(a.polygon, lambda p: p.round(3)), (), a.on_route)
            for a in s.map.areas
            if a.kind not in ("walkway", "crossing")
        ]
        street = Map(areas, s.map.centerline.round(4), round(s.map.speed_limit, 3))
        expert = replace(s.expert, poses=s.expert.poses.round(4))
        return replace(s, ego=ego, agents=agents, map=street, expert=expert, cameras={}, meta={})

    t = STEP * np.arange(1, 9)

    def aside(x, y, h):
        return np.stack([x, y, h], 1)

    rules = [
        lambda s: s.expert.poses,
        constant_velocity,
        lambda s: constant_velocity(s) * [1.3, 1, 1] + aside(t, 0 * t, 0 * t),
        lambda s: s.expert.poses * [0.5, 0.5, 1],
        lambda s: constant_velocity(s) + aside(0 * t, 0.3 * t**2, 0.1 * t),
        lambda s: s.expert.poses - aside(0 * t, 0.6 * t, 0 * t),
        lambda s: 0 * s.expert.poses,
    ]
    (folder / "scenes").mkdir(parents=True, exist_ok=True)
    rows = []
    for k, family in enumerate(FAMILIES):
        scene = plain_scene(make_scene(family, 100 + k))
        token = sha256(scene.id.encode()).hexdigest()[:16]  # v2 takes a token of 17 letters for a synthetic scene
        scene = replace(scene, id=token)
        to_json(scene, folder / "scenes" / f"{scene.id}.json")
        poses = rules[2 if "red" in family else k % len(rules)](scene)
        rows.append(dict(id=scene.id, log=scene.family, poses=poses.round(2).tolist()))
    (folder / "plans.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    print(write_submission(folder / "submission.pkl", folder / "plans.jsonl", devkit="v1"))
    write_agent(folder)


def plans_of(folder):
    "(8, 3) poses of each scene."
    return {r["id"]: np.array(r["poses"]) for r in map(json.loads, (folder / "plans.jsonl").read_text().splitlines())}


def scorer_of(folder, scenes, version):
    """Its simulator and scorer for several plans in one call: (token, plans, drive the reference, too) -> its scores.

    The reference comes first. v1 gives numbers and EP against the best of the call, v2 a table for each plan.
    """
    from navsim.common.dataclasses import Trajectory
    from navsim.common.dataloader import MetricCacheLoader
    from navsim.evaluate.pdm_score import get_trajectory_as_array, transform_trajectory
    from navsim.planning.simulation.planner.pdm_planner.scoring.pdm_scorer import PDMScorer
    from navsim.planning.simulation.planner.pdm_planner.simulation.pdm_simulator import PDMSimulator

    _, cache, sampling = caches(folder, scenes, version)
    known, simulator, scorer = MetricCacheLoader(cache), PDMSimulator(sampling), PDMScorer(sampling)
    kept = {token: known.get_from_token(token) for token in known.tokens}
    traffic = None
    if version == "v2":
        traffic = importlib.import_module("navsim.traffic_agents_policies.log_replay_traffic_agents")
        traffic = traffic.LogReplayTrafficAgents(sampling)

    def call(token, plans, reference=True):
        m = kept[token]
        ways = [transform_trajectory(Trajectory(p.astype(np.float32)), m.ego_state) for p in plans]
        ways = [m.trajectory] * reference + ways
        arrays = np.stack([get_trajectory_as_array(way, sampling, m.ego_state.time_point) for way in ways])
        driven = simulator.simulate_proposals(arrays, m.ego_state)
        given = [m.observation, m.centerline, m.route_lane_ids, m.drivable_area_map]
        if traffic:
            given += [m.map_parameters, traffic.simulate_environment(driven[-1], m), m.past_human_trajectory]
        return scorer.score_proposals(driven, *given)

    return call


def opened(folder, navsim=None, nuplan=None):
    """The devkit of two clones, or the installed one, for the scenes of a folder: its version and `scorer_of`.

    Raises ImportError where there is none.
    """
    scenes = prepare_devkit(folder, navsim, nuplan)
    return version_of(), scorer_of(folder.resolve(), scenes, version_of())


def version_of():
    "v1 or v2."
    return "v2" if importlib.util.find_spec("navsim.traffic_agents_policies") else "v1"


def prepare_devkit(folder, navsim, nuplan):
    "Make the devkit importable, with the map of the scenes of a folder, which are returned."
    sys.meta_path.append(Nothing())  # behind the others: what is installed is used
    sys.path[:0] = [str(p) for p in (navsim, nuplan) if p]
    scenes = [json.loads(f.read_text()) for f in sorted((folder / "scenes").glob("*.json"))]
    town = TownMap(scenes)
    for name in ("navsim.common.dataclasses", "navsim.planning.scenario_builder.navsim_scenario"):
        patch.object(importlib.import_module(name), "get_maps_api", lambda *_: town).start()
    return scenes


def keep(golden, version, scenes, folder, rows):
    "Add a version's table to the recorded file; it belongs to the scenes and plans that are in it."
    with open(folder / "submission.pkl", "rb") as f:
        (plans,) = pickle.load(f)["predictions"]
    told = dict(scenes=scenes, plans={k: plans[k].poses.tolist() for k in sorted(plans)})
    try:
        old = json.loads(gzip.decompress(golden.read_bytes()))
    except FileNotFoundError:
        old = {}
    if any(old.get(k) != v for k, v in told.items()):
        old = {}  # of other scenes
    data = json.dumps(told | {k: old[k] for k in ("v1", "v2") if k in old} | {version: rows})
    golden.write_bytes(gzip.compress(data.encode(), mtime=0))


def main():
    "Score FOLDER."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="scenes/*.json, submission.pkl, plans.jsonl, drivelit_replay.py")
    parser.add_argument("--write", action="store_true", help="write the folder, in drivelit's environment")
    parser.add_argument("--navsim", type=Path, help="clone of autonomousvision/navsim, v1.1 or main")
    parser.add_argument("--nuplan", type=Path, help="clone of motional/nuplan-devkit")
    parser.add_argument("--golden", type=Path, help="the recorded file, to which the table is added")
    args = parser.parse_args()
    if args.write:
        return write(args.folder)
    if not (args.navsim and args.nuplan):
        parser.error("--write, or --navsim and --nuplan")
    scenes, version = prepare_devkit(args.folder, args.navsim, args.nuplan), version_of()
    rows = dict(v1=score_v1, v2=score_v2)[version](args.folder.resolve(), scenes)
    rows = [{k: plain(v) for k, v in r.items()} for r in sorted(rows, key=lambda r: r["token"])]
    (args.folder / f"{version}.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{args.folder / version}.json: {len(rows)} scenes")
    if args.golden:
        keep(args.golden, version, scenes, args.folder, rows)


if __name__ == "__main__":
    main()
