"""The table of systems, for scripts: python ci/systems.py [section].

Without a section: a line for each system, "name run-notebook". With one, such as `mtdrive.laptop` (or `laptop`, which
is the first system's): "system profile notebook", or the nearest right one and exit code 2. The notebook is the
system's run, unless it has one of the profile's name, as 31_quick.ipynb.
"""

import sys

import click

from drivelit.runs.profiles import ProfileError, find_system, load_profile, systems


def resolve(section):
    "(system, profile, run notebook) of a section's name."
    name, _, profile = section.rpartition(".")
    system = find_system(name) if name else next(iter(systems().values()))
    load_profile(system.name, profile)  # a profile that is none is told here, and not by a notebook's traceback
    return system.name, profile, system.notebook_of(profile)


@click.command(help=__doc__)
@click.argument("section", required=False)
def main(section):
    try:
        lines = [resolve(section)] if section is not None else [(n, s.notebook) for n, s in systems().items()]
    except ProfileError as e:
        print(e, file=sys.stderr)
        sys.exit(2)
    print("\n".join(" ".join(line) for line in lines))


if __name__ == "__main__":
    main()
