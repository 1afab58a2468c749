# Macros for BUILD files. Pants reads this file before them; it imports nothing, and its names are those of BUILD files.
#
# The layering of the packages is stated here: `__dependencies_rules__` refuses every import, of ours or of a third
# party, that a call of slime_package does not allow. Of the rules for a module the first that matches decides.


def _layer(package, siblings, kept_out):
    """Rules for the imports of a module: nothing of `kept_out`; of our packages, only its own and `siblings`."""
    return [
        *[f"!//3rdparty/python/reqs#{requirement}" for requirement in kept_out],
        *[f"//packages/{name}/**" for name in (package, *siblings)],
        "!//packages/**",
        "*",
    ]


def slime_package(name, siblings=(), must_not_import=(), only_in=None, lib_dependencies=()):
    """The targets of packages/NAME: `lib` (code), `data` beside it, `project` (its metadata) and `dist` (the wheel).

    siblings: packages whose modules it may import.
    must_not_import: requirements of 3rdparty/python that it must not import.
    only_in: path glob below the package -> requirements that nothing else in the package may import.
    lib_dependencies: what the code needs and does not import.
    """
    confined = [requirement for requirements in (only_in or {}).values() for requirement in requirements]
    rules = []
    for path, requirements in (only_in or {}).items():
        kept_out = [*must_not_import, *[r for r in confined if r not in requirements]]
        rules.append(({"path": f"//packages/{name}/{path}"}, *_layer(name, siblings, kept_out)))
    rules.append(("*", *_layer(name, siblings, [*must_not_import, *confined])))
    __dependencies_rules__(*rules)

    python_sources(name="lib", sources=["slime/**/*.py", "slime/**/*.pyi"], dependencies=list(lib_dependencies))
    resources(
        name="data",
        sources=[
            f"slime/**/{kind}"
            for kind in ("py.typed", "*.proto", "*.json", "*.jinja", "*.tsv", "*.yaml", "*.html", "*.css", "*.js")
        ],
    )
    resources(name="project", sources=["pyproject.toml", "README.md", "LICENSE"])
    python_distribution(
        name="dist",
        dependencies=[":lib", ":data", ":project"],
        provides=python_artifact(name=f"slime-{name}", version="0.1.0"),
        generate_setup=False,
        sdist=False,
    )


def slime_code(*packages):
    """All of the code of packages, for tests that load some of it by name (plug-ins, commands, Ray workers)."""
    return [f"//packages/{name}:{part}" for name in packages for part in ("lib", "data")]


# Pants makes an environment for each set of requirements that tests have, a quarter of a minute of a processor each. So
# tests that need nearly the same name all that their kind needs. A client that slime must do without is in no kind.
def environment(kind):
    """The requirements of tests of a kind: "tools" (no code of ours), "buffer", "models" (weights) or "runs" (all)."""
    messages = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "numpy", "protobuf", "pyarrow", "pyyaml")
    tests = ("hypothesis", "psutil", "pytest", "uv")
    samples = (*messages, *tests, "blake3", "reasoning-gym", "xxhash", "zstandard")
    stores = ("boto3", "botocore", "moto", "pillow", "psycopg")
    weights = ("gguf", "megatron-core", "safetensors", "tokenizers", "torch", "transformers", "urllib3")
    services = ("aiohttp", "cryptography", "jinja2", "math-verify", "packaging", "prometheus-client", "ray", "rich")
    kinds = {
        "tools": ("buf-bin", "pytest", "uv"),
        "buffer": (*samples, *stores),
        "models": (*samples, *weights, "einops", "mbridge"),
        "runs": (*samples, *stores, *weights, *services, "llvmlite", "matplotlib", "numba", "tensorboard"),
    }
    return [f"//3rdparty/python:reqs#{name}" for name in kinds[kind]]


def slime_tests(package, siblings=(), dependencies=(), requirements=(), alone=(), timeout=300):
    """The tests of a package. They may import what the package may, `siblings`, and Ray only in the launcher.

    Files share processes, a dozen in each, which saves them most of the imports.

    dependencies: targets that the tests use and do not import.
    requirements: what some of them import beside hypothesis, psutil and pytest. All get all of it, so that Pants makes
        one environment for the package.
    alone: names of files that have a process each: they take long, or look at their process.
    """
    __dependencies_rules__(("*", *_layer(package, siblings, [] if package == "launcher" else ["ray"])))
    dependencies = [
        *slime_code(package, *siblings),
        *dependencies,
        *[f"//3rdparty/python:reqs#{name}" for name in ("hypothesis", "psutil", "pytest", *requirements)],
    ]
    python_tests(
        name="tests",
        sources=["test_*.py", "**/test_*.py", *[f"!**/{name}" for name in alone]],
        dependencies=dependencies,
        timeout=timeout,
        batch_compatibility_tag=package,
    )
    if alone:
        python_tests(
            name="alone",
            sources=[f"**/{name}" for name in alone],
            dependencies=dependencies,
            timeout=timeout,
        )
    python_test_utils(name="fixtures", sources=["*.py", "**/*.py", "!test_*.py", "!**/test_*.py"])
