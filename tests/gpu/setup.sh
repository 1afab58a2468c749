# Prepares the tests with GPUs where no package index can be reached: `source tests/gpu/setup.sh`. $KIT (default /tmp) holds
# packages that were unpacked elsewhere, in `site`, and a GGUF file in `model`; wheels in `.whl` are added. The packages of
# this repository come from the checkout.
export KIT="${KIT:-/tmp}"
if compgen -G ".whl/*.whl" > /dev/null && [ ! -e "$KIT/extra/.done" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$KIT/extra" .whl/*.whl
  touch "$KIT/extra/.done"
fi
export PYTHONPATH="$KIT/site:$KIT/extra"
for package in types buffer rollout converters trainer launcher; do
  export PYTHONPATH="$PWD/packages/$package:$PYTHONPATH"
done
# Nothing is downloaded; cuDNN may be another one than SGLang asks for.
export HF_HUB_OFFLINE=1 SGLANG_DISABLE_CUDNN_CHECK=1 FLASHINFER_DISABLE_VERSION_CHECK=1 TOKENIZERS_PARALLELISM=false
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
if [ -d "$KIT/model" ] && [ ! -e "$KIT/hf/config.json" ]; then
  python3 -m slime.converters.cli gguf-to-hf --gguf "$(find "$KIT/model" -name '*.gguf')" --output-dir "$KIT/hf" --dtype bfloat16
fi
# Ray's dashboard, which takes jobs, needs a directory of pages, also where it was installed without them.
mkdir -p "$KIT/site/ray/dashboard/client/build/static"
# A Ray job has a PYTHONPATH of its own, so the interpreter has to know these directories, and where `ray` is.
python3 - <<'PY'
import os, pathlib, sys, sysconfig, tomllib
paths = os.environ["PYTHONPATH"].split(":")
pathlib.Path(sysconfig.get_path("purelib"), "slime-kit.pth").write_text(f"import sys; sys.path[1:1] = {paths!r}\n")
# SGLang finds plug-ins by the entry points of distributions, and the checkout is none.
project = tomllib.loads(pathlib.Path("packages/rollout/pyproject.toml").read_text())["project"]
about = pathlib.Path(os.environ["KIT"], "extra", "slime_rollout-0.dist-info")
about.mkdir(parents=True, exist_ok=True)
(about / "METADATA").write_text("Metadata-Version: 2.1\nName: slime-rollout\nVersion: 0\n")
groups = project["entry-points"].items()
(about / "entry_points.txt").write_text(
    "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups)
)
ray = pathlib.Path(sys.executable).parent / "ray"
if not ray.exists():
    ray.write_text(f"#!{sys.executable}\nfrom ray.scripts.scripts import main\nmain()\n")
    ray.chmod(0o755)
PY
