"""The README's film, assets/minddrive_drive.webp: python ci/film.py [--number 20] [--out FILE].

The trained policy of the package drives a held-out route; each frame is a decision with its word as a caption.
"""

import argparse
import sys
from pathlib import Path

from drivelit.minddrive.controls import by_experts
from drivelit.minddrive.experts import load_experts
from drivelit.minddrive.pictures import film
from drivelit.runs.profiles import load_profile
from drivelit.scene.town_routes import routes

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "assets" / "minddrive_drive.webp"
ROUTE = 20  # the second turn across oncoming traffic; the policy loses the first
SHOWN = slice(11, 66)  # decisions: before and after them the road is empty


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=ROUTE, help="of the held-out route, from 0")
    parser.add_argument("--out", type=Path, default=PICTURE)
    told = parser.parse_args()
    scene = routes(told.number + 1, "held_out")[told.number]
    title = f"A trained policy, greedy, on a held-out route: {scene.family.replace('_', ' ')}"
    player = by_experts(load_experts("minddrive").eval())
    drive = film(player, scene, load_profile("minddrive", "laptop").inputs, told.out, title, SHOWN)
    print(f"{told.out}: {drive.reason}, {len(drive.choices)} decisions, {told.out.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
