"""`ruff check` as a linter, `ruff format` as a linter and a formatter.

Pants 2.17 knows a ruff from before its subcommands. This takes over its options (`[ruff]` in pants.toml) and runs the
release that is pinned there.
"""

from __future__ import annotations

from typing import Any

from pants.backend.python.lint.ruff import subsystem
from pants.backend.python.lint.ruff.skip_field import SkipRuffField
from pants.backend.python.lint.ruff.subsystem import Ruff, RuffFieldSet
from pants.backend.python.target_types import (
    PythonSourcesGeneratorTarget,
    PythonSourceTarget,
    PythonTestsGeneratorTarget,
    PythonTestTarget,
    PythonTestUtilsGeneratorTarget,
)
from pants.backend.python.util_rules import pex
from pants.backend.python.util_rules.pex import PexRequest, VenvPex, VenvPexProcess
from pants.core.goals.fmt import FmtResult, FmtTargetsRequest
from pants.core.goals.lint import LintResult, LintTargetsRequest
from pants.core.util_rules.config_files import ConfigFiles, ConfigFilesRequest
from pants.core.util_rules.partitions import PartitionerType
from pants.core.util_rules.source_files import SourceFiles, SourceFilesRequest
from pants.engine.fs import Digest, MergeDigests, Snapshot
from pants.engine.process import FallibleProcessResult, ProcessResult
from pants.engine.rules import Get, MultiGet, collect_rules, rule
from pants.util.meta import classproperty
from pants.util.strutil import pluralize


class RuffCheck(LintTargetsRequest):
    field_set_type = RuffFieldSet
    tool_subsystem = Ruff
    partitioner_type = PartitionerType.DEFAULT_SINGLE_PARTITION

    @classproperty
    def tool_name(cls) -> str:
        return "ruff-check"


class RuffFormat(FmtTargetsRequest):
    field_set_type = RuffFieldSet
    tool_subsystem = Ruff
    partitioner_type = PartitionerType.DEFAULT_SINGLE_PARTITION

    @classproperty
    def tool_name(cls) -> str:
        return "ruff-format"


async def _process(ruff: Ruff, command: tuple[str, ...], snapshot: Snapshot) -> VenvPexProcess:
    tool, config = await MultiGet(
        Get(VenvPex, PexRequest, ruff.to_pex_request()),
        Get(ConfigFiles, ConfigFilesRequest, ruff.config_request(snapshot.dirs)),
    )
    digest = await Get(Digest, MergeDigests((snapshot.digest, config.snapshot.digest)))
    return VenvPexProcess(
        tool,
        argv=(*command, "--no-cache", "--force-exclude", *ruff.args, *snapshot.files),
        input_digest=digest,
        output_files=snapshot.files,
        description=f"Run ruff {command[0]} on {pluralize(len(snapshot.files), 'file')}",
    )


@rule(desc="Lint with ruff check")
async def ruff_check(request: RuffCheck.Batch[RuffFieldSet, Any], ruff: Ruff) -> LintResult:
    files = await Get(SourceFiles, SourceFilesRequest(field_set.source for field_set in request.elements))
    process = await _process(ruff, ("check", "--quiet"), files.snapshot)
    result = await Get(FallibleProcessResult, VenvPexProcess, process)
    return LintResult.create(request, result, strip_chroot_path=True)


@rule(desc="Format with ruff format")
async def ruff_format(request: RuffFormat.Batch, ruff: Ruff) -> FmtResult:
    process = await _process(ruff, ("format", "--quiet"), request.snapshot)
    result = await Get(ProcessResult, VenvPexProcess, process)
    return await FmtResult.create(request, result, strip_chroot_path=True)


def rules():
    targets = (
        PythonSourcesGeneratorTarget,
        PythonSourceTarget,
        PythonTestsGeneratorTarget,
        PythonTestTarget,
        PythonTestUtilsGeneratorTarget,
    )
    return [
        *collect_rules(),
        *RuffCheck.rules(),
        *RuffFormat.rules(),
        *subsystem.rules(),
        *pex.rules(),
        *(target.register_plugin_field(SkipRuffField) for target in targets),
    ]
