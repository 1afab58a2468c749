"""--sglang-*: what SGLang's server takes, read from its source, checked before anything starts."""

from __future__ import annotations

import importlib.util
import json
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.engines.registry import KINDS
from slime.rollout.engines.sglang import installed, plugin, read_flags
from slime.rollout.engines.sglang.flags import SGLANG_FLAGS, check, command_line
from slime.rollout.engines.sglang.launch import SGLangOptions, divide_gpus, server_command
from slime.rollout.engines.sglang.read_flags import ServerFlag
from slime.rollout.engines.sglang.reserved import RESERVED
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable, UnknownFlag
from slime.types.settings import parse

SOURCE = textwrap.dedent('''
    import argparse, dataclasses
    from typing import List, Literal, Optional
    BACKENDS = ["flashinfer", "triton"]
    POLICIES = ["lru", "lfu"]

    def add_backend(name):
        BACKENDS.append(name)

    @dataclasses.dataclass
    class ServerArgs:
        """Doc."""
        model_path: A[str, Arg(help="x", aliases=["--model"]), NS("model")]
        tp_size: A[int, Arg(help="x", aliases=["--tensor-parallel-size", "--tp"]), NS("p")] = 1
        mem_fraction_static: A[Optional[float], "help " "in two parts", NS("s")] = None
        disable_radix_cache: A[bool, "x"] = False
        backend: A[Optional[str], Arg(help="x", choices=BACKENDS)] = None
        policy: A[str, Arg(help="x", choices=POLICIES)] = "lru"
        mode: A[Optional[Literal["auto", "low"]], "x"] = None
        sizes: A[Optional[List[int]], "x"] = None
        context: A[Optional[int], Arg(help=f"{1}", type_parser=human_readable_int)] = None
        json_list: A[Optional[List[str]], Arg(help="x", type_parser=json_list_type)] = None
        loras: A[Optional[List[str]], Arg(help="x", action=LoRA, action_kwargs={"type": str, "nargs": "*"})] = None
        strict: A[Optional[bool], Arg(help="x", action=argparse.BooleanOptionalAction)] = None
        backend_fp8: A[str, Arg(help="x", cli_name="--fp8")] = "auto"
        hidden: A[bool, Arg(help="x", no_cli=True)] = False
        unlisted: A[str, NS("x")] = "none"
        plain: int = 3

        @staticmethod
        def add_cli_args(parser):
            add_cli_args_from_dataclass(parser, ServerArgs)
            parser.add_argument("--unlisted", type=str, choices=[m.name for m in Some], help="x")
            parser.add_argument("--old-sizes", "--older", type=int, nargs="+", action=DeprecatedAliasStoreAction)
            parser.add_argument("--old-switch", action=DeprecatedStoreTrueAction)
            parser.add_argument("--fusion", action="store_true")
''')  # fmt: skip


def test_flags_are_read_from_the_source_of_server_args() -> None:
    flags = {flag.name: flag for flag in read_flags.read_flags(SOURCE)}
    assert flags == {
        flag.name: flag
        for flag in (
            ServerFlag("model-path", aliases=("model",)),
            ServerFlag("tp-size", "int", aliases=("tensor-parallel-size", "tp")),
            ServerFlag("mem-fraction-static", "float"),
            ServerFlag("disable-radix-cache", "bool", 0),
            ServerFlag("backend"),  # its choices may grow
            ServerFlag("policy", choices=("lru", "lfu")),
            ServerFlag("mode", choices=("auto", "low")),
            ServerFlag("sizes", "int", "+"),
            ServerFlag("context"),
            ServerFlag("json-list"),
            ServerFlag("loras", nargs="*"),
            ServerFlag("strict", "bool", 0, negated=True),
            ServerFlag("fp8"),
            ServerFlag("unlisted"),
            ServerFlag("old-sizes", "int", "+", aliases=("older",)),
            ServerFlag("old-switch", "bool", 0),
            ServerFlag("fusion", "bool", 0),
        )
    }


def test_the_table_in_the_package_is_what_its_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "sglang-9.8.7-cp312-cp312-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(read_flags.SOURCE, SOURCE)
    monkeypatch.setattr("sys.argv", ["read_flags", str(wheel)])
    assert read_flags.main() == 0
    written = tmp_path / "table.json"
    written.write_text(capsys.readouterr().out)
    monkeypatch.setattr(installed, "TABLE", written)
    table = installed.table()
    assert table.version == "9.8.7"
    assert set(table.by_name.values()) == set(read_flags.read_flags(SOURCE))
    assert table.by_name["tp"].name == "tp-size"


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_table_is_that_of_the_installed_version() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    source = Path(list(spec.submodule_search_locations)[0]).parent / read_flags.SOURCE
    if installed._version() == installed.table().version:
        assert installed.by_name(read_flags.read_flags(source.read_text())) == installed.table().by_name


def test_the_table_has_the_flags_of_0_5_17() -> None:
    table = installed.table()
    assert table.version == "0.5.17" and len(set(table.by_name.values())) == 474
    assert table.by_name["mem-fraction-static"] == ServerFlag("mem-fraction-static", "float")
    assert table.by_name["disable-cuda-graph"].nargs == 0
    assert set(RESERVED) <= set(table.by_name)


@pytest.fixture
def other_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another SGLang, as it lies where Python looks for packages."""
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('importing this takes a minute')")
    (package / "srt" / "server_args.py").write_text(SOURCE)
    (tmp_path / "sglang-0.9.9.dist-info").mkdir()
    (tmp_path / "sglang-0.9.9.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.server_flags.cache_clear()
    yield package
    installed.server_flags.cache_clear()


def test_another_version_that_is_installed_is_read_without_importing_it(other_version: Path) -> None:
    assert installed.is_installed()
    assert installed.server_flags().version == "0.9.9"
    assert check({"older": [1, 2]}) == {"old_sizes": [1, 2]}
    with pytest.raises(UnknownFlag, match="unknown option of SGLang 0.9.9 --sglang-mem-fraction; did you mean"):
        check({"mem_fraction": 0.5})
    (other_version / "srt" / "server_args.py").write_text("nothing = 1")
    installed.server_flags.cache_clear()
    with pytest.raises(InvalidFile, match="cannot be read"):
        installed.server_flags()


def settings(*argv: str) -> RolloutSettings:
    words = ["--hf-checkpoint", "x", *argv]
    return parse(words, RolloutSettings, prog="p", description="d", families=[SGLANG_FLAGS])[0]


def test_flags_of_every_shape() -> None:
    given = settings(
        *"--sglang-mem-fraction-static 0.7 --sglang-disable-cuda-graph --sglang-log-level=INFO".split(),
        *"--sglang-cuda-graph-bs-decode 1 2 4 --sglang-chunked-prefill-size -1 --sglang-no-dllm-fdfo".split(),
        *"--sglang-server-concurrency 7 --sglang-tp-size 2 --sglang-context-length 8k".split(),
    )
    assert given.sglang_args == {
        "mem_fraction_static": 0.7,
        "disable_cuda_graph": True,
        "log_level": "INFO",
        "cuda_graph_bs_decode": [1, 2, 4],
        "chunked_prefill_size": -1,
        "dllm_fdfo": False,
        "context_length": "8k",
    }
    assert (given.sglang_server_concurrency, given.rollout_num_gpus_per_engine) == (7, 2)
    assert command_line(given.sglang_args) == [
        "--mem-fraction-static=0.7", "--disable-cuda-graph", "--log-level=info",
        "--cuda-graph-bs-decode", "1", "2", "4", "--chunked-prefill-size=-1", "--no-dllm-fdfo", "--context-length=8k",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "error", "words"),
    [
        ("--sglang-mem-fraction-statik 0.7", UnknownFlag, "did you mean --sglang-mem-fraction-static?"),
        ("--sglang-mem-fraction-static much", InvalidSetting, "must be a number, got 'much'"),
        ("--sglang-schedule-policy lpn", InvalidSetting, "did you mean lpm?"),
        ("--sglang-port 1", InvalidSetting, "--sglang-port cannot be set, .* a free port"),
        ("--sglang-model x", InvalidSetting, "--sglang-model cannot be set, .* give --hf-checkpoint"),
        ("--sglang-prot 1", UnknownFlag, "unknown option --sglang-prot; see --help"),
        ("--sglang-tp 2", UnknownFlag, "did you mean --sglang-tp-size?"),
        ("--sglang-random-seed 1", InvalidSetting, "give --rollout-seed"),
        ("--sglang-enable-memory-saver", InvalidSetting, "--offload-rollout"),
        (
            "--sglang-log-level info --rollout-engine embedded",
            InvalidSetting,
            "--rollout-engine embedded and --sglang-log-level cannot",
        ),
        ("--sglang-log-level info --rollout-external-engine-addrs h:1", InvalidSetting, "--sglang-log-level"),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", InvalidSetting, "a multiple of"),
    ],
)
def test_what_cannot_be_is_refused_by_name(argv: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        settings(*argv.split())


def test_a_file_holds_the_same_names_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("sglang_log_level: warning\nsglang_max_running_requests: 8\nsglang_disable_cuda_graph: true\n")
    given = settings("--config", str(file), "--sglang-max-running-requests", "9")
    assert given.sglang_args == {"log_level": "warning", "max_running_requests": 9, "disable_cuda_graph": True}
    file.write_text("sglang_max_running_request: 8\n")
    with pytest.raises(UnknownFlag, match="did you mean --sglang-max-running-requests"):
        settings("--config", str(file))
    with pytest.raises(InvalidSetting, match="must be an integer"):
        check({"max_running_requests": "8"})


def test_the_command_of_an_engine() -> None:
    options = SGLangOptions(
        model_path="/m", gpus=["0", "1", "2", "3"], memory_saver=True, deterministic=True, random_seed=5,
        args={"pp_size": 2, "host": "0.0.0.0"}, server=["serve"],
    )  # fmt: skip
    assert server_command(options) == [
        "serve", "--model-path=/m", "--tp-size=2", "--weight-version=0", "--enable-memory-saver",
        "--random-seed=5", "--pp-size=2", "--enable-deterministic-inference",
    ]  # fmt: skip
    with pytest.raises(InvalidSetting, match="a multiple of --sglang-pp-size 3"):
        server_command(SGLangOptions(model_path="/m", gpus=["0"], args={"pp_size": 3}))


def test_gpus_are_shared_out_in_order() -> None:
    assert divide_gpus(["4", "5", "6"], None, 1) == [["4"], ["5"], ["6"]]
    assert divide_gpus(["4", "5", "6"], None, 2) == [["4", "5"]]
    assert divide_gpus(["4", "5", "6"], 2, 1) == [["4"], ["5"]]
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus must be at most 3, got 4"):
        divide_gpus(["4", "5", "6"], 4, 2)
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus-per-engine must be at most 3, got 4"):
        divide_gpus(["4", "5", "6"], None, 4)


def test_the_tokens_that_a_run_allows_its_engines_reach_sglang() -> None:
    def commands(**settings: object) -> list[list[str]]:
        rollout = RolloutSettings(hf_checkpoint="none", **settings)  # type: ignore[arg-type]
        return [server_command(start.args[0]) for start in KINDS["sglang"].starts(rollout, ["0"])]  # type: ignore[attr-defined]

    (limited,) = commands(rollout_engine_max_total_tokens=5000)
    assert "--max-total-tokens=5000" in limited
    (own,) = commands()
    assert not any("max-total-tokens" in word for word in own)
    with pytest.raises(InvalidSetting, match="--rollout-engine-max-total-tokens 5000 and --sglang-max-total-tokens"):
        commands(rollout_engine_max_total_tokens=5000, sglang_args={"max_total_tokens": 6000})


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, False),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5}, False),
        ({}, False),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, True),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25}, True),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_model_that_sglang_would_rotate_otherwise_is_refused(
    tmp_path: Path, text: dict[str, Any], refused: bool, inside: bool
) -> None:
    text = {"model_type": "qwen3_5_text" if inside else "qwen3_next", **text}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3_5", "text_config": text} if inside else text))
    if not refused:
        RolloutSettings(hf_checkpoint=str(tmp_path), rollout_engine="sglang")
        return
    with pytest.raises(NotAvailable, match="factor is 0.5, which SGLang does not read, and it would use 0.25"):
        RolloutSettings(hf_checkpoint=str(tmp_path), rollout_engine="sglang")
    RolloutSettings(hf_checkpoint=str(tmp_path), rollout_engine="embedded")
    file.write_text("{")
    RolloutSettings(hf_checkpoint=str(tmp_path), rollout_engine="sglang")


METHODS = "".join(
    f"    def forward_prepare_{name}(self, positions, hidden_states):\n" for name in ("cuda_fused", "fused_gate")
)


@pytest.mark.parametrize(
    ("kernel", "attention", "found", "refused"),
    [
        ("pos = tl.load(p)", METHODS, True, ""),
        ("pos = tl.load(p)", METHODS, False, "is not found; use slime-rollout installed as a distribution"),
        ("pos = tl.load(p)", METHODS.replace("positions, ", ""), True, "does not know this version; use SGLang 0.5.17"),
        ("pos = tl.load(p)", None, True, "does not know this version; use SGLang 0.5.17"),
        ("if MROPE: ...", METHODS, False, ""),
        (None, None, False, ""),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_images_for_a_qwen3_5_are_refused_where_sglang_would_misplace_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kernel: str | None, attention: str | None,
    found: bool, refused: str,
) -> None:  # fmt: skip
    package = tmp_path / "sglang"
    monkeypatch.setattr(installed, "_package", lambda: package)
    monkeypatch.setattr(plugin, "is_found", lambda: found)
    for place, text in ((installed.QWEN3_5_KERNEL, kernel), (installed.QWEN3_5_MODEL, attention)):
        if text is not None:
            (package / place).parent.mkdir(parents=True)
            (package / place).write_text(text)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {"depth": 1}}))
    if refused and family == "qwen3_5":
        with pytest.raises(NotAvailable, match=f"applies only the temporal part of M-RoPE .* {refused}"):
            KINDS["sglang"].check_images(str(model))
    else:
        KINDS["sglang"].check_images(str(model))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_what_an_external_engine_needs_for_images_of_a_qwen3_5_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {"depth": 1}}))
    KINDS["sglang"].check_images(str(tmp_path), "external-0", external=True)
    said = "engine external-0: an SGLang before 0.5.23 has wrong log-probs" in caplog.text
    assert said is (family == "qwen3_5")
