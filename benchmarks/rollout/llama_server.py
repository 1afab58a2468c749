"""A llama.cpp server for the benchmark of the embedded engine; runs in an environment that has xllamacpp and gguf.

    python benchmarks/rollout/llama_server.py --gguf FILE --type BF16 --parallel 64 --context 256 --threads 2

It prints its address, and ends with its standard input. The weights of FILE are converted to `--type` first.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--type", default="BF16", help="BF16, Q8_0 or F32, or `same`")
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="Most tokens of a sequence")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    xllamacpp: Any = importlib.import_module("xllamacpp")
    with tempfile.TemporaryDirectory() as directory:
        path = options.gguf
        if options.type != "same":
            path = Path(directory) / "model.gguf"
            convert(options.gguf, path, options.type)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel = options.parallel
        params.n_ctx = options.parallel * options.context
        params.cont_batching = params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
        params.verbosity, params.warmup, params.port = 0, False, 0
        server = xllamacpp.Server(params)
        print(server.listening_address, flush=True)
        sys.stdin.read()


def convert(source: Path, target: Path, kind: str) -> None:
    """Writes the same model with its matrices in another type; vectors stay as they are."""
    gguf: Any = importlib.import_module("gguf")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    wanted = gguf.GGMLQuantizationType[kind]
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
