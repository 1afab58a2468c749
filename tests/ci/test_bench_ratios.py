"""`benchmarks/run`: ratios from results of the benchmarks, and what counts as a regression."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import ratios
from ratios import Benchmark, BenchmarkFailed

# Results as the programs print them, cut down to what is read.
RESULTS: dict[str, Any] = {
    "types/codec.py": {"ratio_vs_pickle_numpy": 1.2, "ratio_vs_pickle_lists": 20.0},
    "converters/conversion.py": {
        "conversions": [
            {"name": "hf-to-torch-dist", "workers": 1, "of_copying": 0.6, "memory": 0.2},
            {"name": "hf-to-torch-dist", "workers": 2, "of_copying": 0.8, "memory": 0.4},
        ]
    },
    "launcher/data_transport.py": {"one reader ratio": 2.0},
    "buffer/peers.py": {"tokens": {"1024": {"ratios": {"buffer, process / Ray, lists": 0.9, "others": 0.1}}}},
    "rollout/engine.py": {
        "rounds": {
            "embedded, bfloat16": [{"per_second": 400.0}, {"per_second": 500.0}, {"per_second": 900.0}],
            "transformers, bfloat16": [{"per_second": 200.0}, {"per_second": 250.0}, {"per_second": 300.0}],
        }
    },
}


def canned(**changed: Any) -> Any:
    results = RESULTS | changed
    return lambda benchmark: results[benchmark.program]


def values(found: dict[str, Any]) -> dict[str, float]:
    return {name: ratio["value"] for name, ratio in found["ratios"].items()}


def test_every_benchmark_gives_its_ratios() -> None:
    found = ratios.measure(list(ratios.TABLE), run=canned())
    assert values(found) == {
        "codec / pickled numpy": 1.2, "codec / pickled lists": 20.0, "hf-to-torch-dist / copying": 0.6,
        "hf-to-torch-dist / layer and file": 0.2, "buffer by gRPC / Ray's object store": 0.5,
        "buffer, process / Ray, lists": 0.9,
        "embedded engine / transformers": 2.0,
    }  # fmt: skip
    assert found["host"] == {ratios.HOST: 250.0}


def test_the_programs_have_the_flags_that_they_are_called_with() -> None:
    for benchmark in ratios.TABLE.values():
        source = (ratios.BENCHMARKS / benchmark.program).read_text()
        for flag in (word for word in benchmark.arguments if word.startswith("--")):
            assert f'add_argument("{flag}"' in source, (benchmark.program, flag)


@pytest.mark.parametrize(
    ("kind", "now", "worse"),
    [("speed", 0.86, False), ("speed", 0.84, True), ("speed", 3.0, False),
     ("memory", 1.04, False), ("memory", 1.06, True), ("memory", 0.5, False)],
)  # fmt: skip
def test_a_ratio_may_get_a_little_worse(kind: str, now: float, worse: bool) -> None:
    found, before = ({"host": {}, "date": "", "ratios": {"x": {"kind": kind, "value": value}}} for value in (now, 1.0))
    table, regressions = ratios.compare(found, before)
    assert bool(regressions) is worse and ("WORSE" in table) is worse


def test_a_baseline_is_written_compared_with_and_kept_where_it_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ratios.main([], run=canned(), baselines=tmp_path) == 0
    assert "no baseline for this kind of machine" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert ratios.main(["--baseline", "update"], run=canned(), baselines=tmp_path) == 0
    slower: dict[str, Any] = {"types/codec.py": {"ratio_vs_pickle_numpy": 0.9, "ratio_vs_pickle_lists": 19.0}}
    faster_host = json.loads(json.dumps(RESULTS["rollout/engine.py"]).replace("00.0", "000.0").replace("50.0", "500.0"))
    assert ratios.main([], run=canned(), baselines=tmp_path) == 0
    capsys.readouterr()
    changed = slower | {"rollout/engine.py": faster_host}
    assert ratios.main(["--json", str(tmp_path / "now")], run=canned(**changed), baselines=tmp_path) == 1
    told = capsys.readouterr()
    assert "host factor 10.00" in told.out and json.loads((tmp_path / "now").read_text())["host"]
    assert re.findall("regression: (.*?):", told.err) == ["codec / pickled numpy"]
    assert "0.90, 25% worse than 1.20; allowed are 15%" in told.err
    assert ratios.main(["--only", "codec", "--baseline", "update"], run=canned(**slower), baselines=tmp_path) == 0
    assert ratios.main([], run=canned(**slower), baselines=tmp_path) == 0


def test_a_benchmark_without_a_result_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ratios, "BENCHMARKS", tmp_path)
    (tmp_path / "fails.py").write_text("import sys\nsys.exit('no such model')")
    (tmp_path / "judges.py").write_text("import sys\nprint('{\"a\": 1}')\nsys.exit(1)")
    (tmp_path / "writes.py").write_text("import sys\nopen(sys.argv[2], 'w').write('[2]')\nprint('a table')")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(60)")

    def benchmark(program: str, *arguments: str) -> Benchmark:
        return Benchmark(program, arguments, ratios.read_codec)

    assert ratios.run(benchmark("judges.py")) == {"a": 1}
    assert ratios.run(benchmark("writes.py", "--json", "{json}")) == [2]
    with pytest.raises(BenchmarkFailed, match="fails.py ended with 1\nno such model"):
        ratios.run(benchmark("fails.py"))
    with pytest.raises(BenchmarkFailed, match="hangs.py took more than 0.5 s"):
        ratios.run(benchmark("hangs.py"), seconds=0.5)
    monkeypatch.setitem(ratios.TABLE, "codec", benchmark("fails.py"))
    assert ratios.main(["--only", "codec"], baselines=tmp_path) == 2
    assert "benchmarks/run: error: fails.py ended with 1" in capsys.readouterr().err


def test_a_kind_of_machine_names_cores_and_instructions() -> None:
    assert re.fullmatch(r"cpu-\d+-\w+", ratios.device_kind()) and sys.executable
