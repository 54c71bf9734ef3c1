"""The command line of a benchmark in sections, each a module with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import ModuleType


def run_section(description: str | None, sections: Mapping[str, ModuleType]) -> None:
    """Run the section that the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = parser.add_subparsers(dest="section", required=True)
    for name, module in sections.items():
        section = named.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(section)
    options = parser.parse_args()
    sections[options.section].run(options)
