"""What rollouts cost, one section at a time:

    python benchmarks/rollout.py simulated
    python benchmarks/rollout.py vllm
    python benchmarks/rollout.py transfer

Each section is a module `rollout_SECTION.py` beside this one with its targets in its docstring; `SECTION --help` lists
its options.
"""

import argparse

import rollout_simulated
import rollout_transfer
import rollout_vllm

SECTIONS = {"simulated": rollout_simulated, "vllm": rollout_vllm, "transfer": rollout_transfer}


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
