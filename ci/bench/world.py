"""How fast the closed loop is.   python ci/bench/world.py [--routes 11] [--decisions 24] [--repeats 3]

One route of each family, driven along its lane at the first speed, one core; times are of the processor, so a busy
machine does not count. Decisions of half a second: the world alone, with the moment made as a Scene, with one and with
six painted cameras, and the time to take a snapshot and go back to it. Beside it a naive path with the same rules: for
every 0.1 s the road is united again, every road user becomes a polygon, and nothing is prepared. Both must end every
drive at the same step for the same reason.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time  # noqa: E402

import numpy as np  # noqa: E402
import shapely  # noqa: E402

from drivelit.metrics.kinematics import VEHICLE, VX  # noqa: E402
from drivelit.metrics.pdm import EGO_HALF, bearing, ego_centers  # noqa: E402
from drivelit.metrics.pdm_closed import box_polygons  # noqa: E402
from drivelit.rollout import world as world_module  # noqa: E402
from drivelit.rollout.drivers import same_speed  # noqa: E402
from drivelit.rollout.world import KINDS, World  # noqa: E402
from drivelit.scene.core import DRIVABLE_KINDS  # noqa: E402
from drivelit.town.routes import ROUTE_FAMILIES, SEEDS, routes  # noqa: E402


def naive_wrong(stage, ego, before, s, clocks, poses):
    "`_wrong` of the world, with geometry that is made again at every step."
    box = box_polygons(ego_centers(ego), EGO_HALF)
    for i, agent in enumerate(stage.scene.agents):
        if np.isnan(poses[i]).any() or ego[VX] <= 0.05 or bearing(ego[:3], poses[i, :2]) > 150:
            continue
        if shapely.intersects(box, box_polygons(poses[i], stage.halves[i])):
            return KINDS.get(agent.type, "collisions_layout"), "Agent collided"
    for k, (light, line) in enumerate(zip(stage.scene.lights, stage.stops, strict=True)):
        state = light.at(float(clocks[len(stage.scripts) + k]))
        if before + VEHICLE.front <= line < s + VEHICLE.front and state == "red":
            return "red_light", "Agent ran a red light"
    road = shapely.union_all([shapely.make_valid(a.polygon) for a in stage.scene.map.of(*DRIVABLE_KINDS)])
    if not all(road.contains(shapely.Point(p)) for p in shapely.get_coordinates(box)[:4]):
        return "route_dev", "Agent deviated"
    return None


def drive(world, scenes, decisions, look=False):
    "Seconds of the processor and decisions of driving these scenes, and how each ended."
    spent, count, ends = 0.0, 0, []
    for scene in scenes:
        world.reset(options=dict(scene=scene))
        begin = time.process_time()
        for _ in range(decisions):
            if world.state.reason:
                break
            world.step(same_speed(world))
            count += 1
            if look:
                world.scene  # noqa: B018  the moment is made when it is looked at
        spent += time.process_time() - begin
        ends.append((world.state.reason, world.state.steps))
    return spent, count, ends


def best(repeats, *args, **kwargs):
    "Milliseconds a decision, of the fastest repeat, and the ends."
    runs = [drive(*args, **kwargs) for _ in range(repeats)]
    spent, count, ends = min(runs, key=lambda r: r[0])
    return 1e3 * spent / count, ends


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--routes", type=int, default=len(ROUTE_FAMILIES))
    p.add_argument("--decisions", type=int, default=24)
    p.add_argument("--repeats", type=int, default=3)
    args = p.parse_args()
    if min(args.routes, args.decisions, args.repeats) < 1:
        p.error("--routes, --decisions and --repeats are at least 1")
    scenes = routes(args.routes, "tuning")
    print(f"{len(scenes)} routes from seed {SEEDS['tuning']}, {args.decisions} decisions of 0.5 s at most")

    plain, ends = best(args.repeats, World(), scenes, args.decisions)
    print(f"{'':24} {'ms a decision':>14} {'decisions/s':>12} {'x world':>8}")

    def line(name, ms):
        return print(f"{name:24} {ms:14.2f} {1e3 / ms:12.0f} {ms / plain:8.1f}")

    line("world", plain)
    line("and the moment", best(args.repeats, World(), scenes, args.decisions, look=True)[0])
    rig = tuple(scenes[0].cameras)
    for n in (1, 6):
        line(f"{n} camera{'s' if n > 1 else ''}, 192 x 108", best(1, World(cameras=rig[:n]), scenes, args.decisions)[0])

    checked = world_module._wrong
    world_module._wrong = naive_wrong
    try:
        naive, same = best(args.repeats, World(), scenes, args.decisions)
    finally:
        world_module._wrong = checked
    line("naive geometry", naive)
    assert same == ends, f"the naive path ends differently: {same} and {ends}"

    world = World()
    world.reset(options=dict(scene=scenes[0]))
    for _ in range(10):
        world.step(same_speed(world))
    begin = time.process_time()
    for _ in range(100):
        world.restore(world.snapshot())
    print(f"\nsnapshot and restore {10 * (time.process_time() - begin):.2f} ms; both paths end every drive alike")


if __name__ == "__main__":
    main()
