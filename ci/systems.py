"""The table of systems, for scripts: python ci/systems.py [section].

Without a section: a line for each system, "name run-notebook". With one, such as `mtdrive.laptop` (or `laptop`, which
is the first system's): "system profile run-notebook", or the nearest right one and exit code 2.
"""

import sys

from drivelit.training.profiles import ProfileError, find_system, load_profile, systems


def resolve(section):
    "(system, profile, run notebook) of a section's name."
    name, _, profile = section.rpartition(".")
    system = find_system(name) if name else next(iter(systems().values()))
    if profile:
        load_profile(system.name, profile)  # a profile that is none is told here, and not by a notebook's traceback
    return system.name, profile, system.notebook


def main():
    try:
        lines = [resolve(sys.argv[1])] if sys.argv[1:] else [(n, resolve(f"{n}.")[2]) for n in systems()]
    except ProfileError as e:
        print(e, file=sys.stderr)
        return 2
    print("\n".join(" ".join(line) for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
