"""What the algorithms cost, one section at a time:

    python benchmarks/algorithms.py advantages [--rows 2048] [--width 8192] [--repeats 3] [--threads 2] [NAME ...]

Each section is a module `algorithms_SECTION.py` beside this one with its targets in its docstring; `SECTION --help`
lists its options.
"""

import argparse

import algorithms_advantages

SECTIONS = {"advantages": algorithms_advantages}


def main() -> None:
    """Run the section that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = parser.add_subparsers(dest="section", required=True)
    for name, module in SECTIONS.items():
        section = sections.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(section)
    options = parser.parse_args()
    SECTIONS[options.section].run(options)


if __name__ == "__main__":
    main()
