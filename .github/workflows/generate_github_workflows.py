"""Writes each workflow that has a template beside it: NAME.yml from NAME.yml.j2.

    generate_github_workflows.py            writes
    generate_github_workflows.py --check    writes nothing; ends with 1 where a workflow is not what its template makes

In the templates blocks are <% %> and variables << >>, so that the ${{ }} of GitHub Actions stands for itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

BANNER = """\
# Generated from {template} by .github/workflows/generate_github_workflows.py.
# Changes go into the template; then run that program, and commit both files.
# A test holds the two together.
"""


def render(template: Path) -> str:
    """Raises jinja2.TemplateError."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return BANNER.format(template=template.name) + environment.get_template(template.name).render()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="Write nothing; fail where a workflow is out of date")
    parser.add_argument("--directory", type=Path, default=Path(__file__).parent, help="Directory of the templates")
    options = parser.parse_args(arguments)
    directory: Path = options.directory.resolve()
    print(f"Scan dir: {directory}")
    stale = 0
    for template in sorted(directory.glob("*.yml.j2")):
        workflow = template.with_suffix("")
        try:
            text = render(template)
        except jinja2.TemplateError as error:
            print(f"{template.name}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        if not options.check:
            workflow.write_text(text, encoding="utf-8")
            print(f"Generated {workflow.name} from {template.name}")
        elif not workflow.is_file() or workflow.read_text(encoding="utf-8") != text:
            print(f"{workflow.name} is not what {template.name} makes: run {Path(__file__).name}", file=sys.stderr)
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
