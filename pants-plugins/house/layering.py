"""`layering`: a linter that holds every import against the `__dependencies_rules__` of the BUILD files.

Pants applies those rules where a goal resolves dependencies, which no linter of Pants 2.17 does, and stops at the first
denial. This one lists all of them: the module, what it must not depend on, and the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pants.backend.python.dependency_inference.rules import (
    InferPythonImportDependencies,
    PythonImportDependenciesInferenceFieldSet,
)
from pants.core.goals.lint import LintResult, LintTargetsRequest
from pants.core.util_rules.partitions import PartitionerType
from pants.engine.addresses import Addresses
from pants.engine.internals.dep_rules import DependencyRuleAction
from pants.engine.rules import Get, MultiGet, collect_rules, rule
from pants.engine.target import (
    DependenciesRuleApplication,
    DependenciesRuleApplicationRequest,
    InferredDependencies,
)
from pants.option.option_types import SkipOption
from pants.option.subsystem import Subsystem
from pants.util.strutil import pluralize


class Layering(Subsystem):
    options_scope = "layering"
    name = "layering"
    help = "Imports against the layering of the packages."
    skip = SkipOption("lint")


@dataclass(frozen=True)
class LayeringFieldSet(PythonImportDependenciesInferenceFieldSet):
    pass


class LayeringRequest(LintTargetsRequest):
    field_set_type = LayeringFieldSet
    tool_subsystem = Layering
    partitioner_type = PartitionerType.DEFAULT_SINGLE_PARTITION


@rule(desc="Check the layering of the packages")
async def check_layering(request: LayeringRequest.Batch[LayeringFieldSet, Any]) -> LintResult:
    imported = await MultiGet(
        Get(InferredDependencies, InferPythonImportDependencies(field_set)) for field_set in request.elements
    )
    applied = await MultiGet(
        Get(
            DependenciesRuleApplication,
            DependenciesRuleApplicationRequest(
                field_set.address,
                Addresses(sorted(dependencies.include)),
                description_of_origin=f"the imports of {field_set.address}",
            ),
        )
        for field_set, dependencies in zip(request.elements, imported)
    )
    denied = [
        f"{found.origin_address} must not import {found.dependency_address}\n    rule: {found.rule_description}"
        for application in applied
        for found in application.dependencies_rule.values()
        if found.action is DependencyRuleAction.DENY
    ]
    count = sum(len(dependencies.include) for dependencies in imported)
    summary = f"{pluralize(count, 'import')} in {pluralize(len(imported), 'module')}, {len(denied)} denied"
    return LintResult(
        exit_code=1 if denied else 0,
        stdout="\n".join([*denied, summary]) + "\n",
        stderr="",
        linter_name=request.tool_name,
    )


def rules():
    return [*collect_rules(), *LayeringRequest.rules()]
