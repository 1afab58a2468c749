# Macros for BUILD files (Pants reads this file as a prelude: no imports here).
#
# The layering of the packages is enforced here: `__dependencies_rules__` refuses every import, of ours or of a third
# party, that the calls of slime_package do not allow. A rule is read from the top, and the first match decides.


def _first_party(siblings):
    return ["//packages/%s/**" % name for name in siblings] + ["!//packages/**"]


def _third_party(names, deny):
    prefix = "!" if deny else ""
    return [prefix + "//3rdparty/python/reqs#" + name for name in names]


def slime_package(name, siblings=(), must_not_import=(), only_in=None, lib_dependencies=()):
    """The targets of packages/NAME: `lib` (the code), `dist` (the wheel) and its parts.

    siblings: packages whose modules it may import.
    must_not_import: requirements of 3rdparty/python that it must not import.
    only_in: requirement -> path globs below the package, the only places that may import it.
    lib_dependencies: what the code needs and does not import.
    """
    rules = []
    confined = only_in or {}
    for path in sorted({path for paths in confined.values() for path in paths}):
        free = [requirement for requirement, paths in confined.items() if path in paths]
        kept_out = [r for r in list(must_not_import) + list(confined) if r not in free]
        rules.append(
            ({"path": "//packages/%s/%s" % (name, path)}, _third_party(kept_out, True), ["//packages/%s/**" % name], _first_party(siblings), "*")
        )
    rules.append(
        ("*", _third_party(list(must_not_import) + list(confined), True), ["//packages/%s/**" % name], _first_party(siblings), "*")
    )
    __dependencies_rules__(*rules)

    python_sources(name="lib", sources=["slime/**/*.py", "slime/**/*.pyi"], dependencies=list(lib_dependencies))
    resources(name="data", sources=["slime/**/py.typed", "slime/**/*.json", "slime/**/*.jinja", "slime/**/*.tsv", "slime/**/*.yaml"])
    resources(name="project", sources=["pyproject.toml", "README.md"])
    python_distribution(
        name="dist",
        dependencies=[":lib", ":data", ":project"],
        provides=python_artifact(name="slime-" + name, version="0.1.0"),
        generate_setup=False,
        sdist=False,
    )


def slime_code(*packages):
    """All of the code of packages, for tests that load some of it by name (plug-ins, commands, Ray workers)."""
    return ["//packages/%s:%s" % (name, part) for name in packages for part in ("lib", "data")]


def slime_tests(package, siblings=(), dependencies=(), timeout=300):
    """The tests of a package: they import what the package may, `siblings` and any third party, Ray only in the launcher.

    dependencies: targets that the tests use and do not import.
    """
    own = ["//packages/%s/**" % package]
    ray = [] if package == "launcher" else ["!//3rdparty/python/reqs#ray"]
    __dependencies_rules__(("*", own, _first_party(siblings), ray, "*"))
    python_tests(
        name="tests",
        sources=["test_*.py", "**/test_*.py"],
        dependencies=slime_code(package, *siblings) + list(dependencies),
        timeout=timeout,
    )
    python_test_utils(name="fixtures", sources=["*.py", "**/*.py", "!test_*.py", "!**/test_*.py", "!conftest.py"])
    # mypy takes two modules of one name for a mistake.
    python_test_utils(name="conftest", sources=["conftest.py"], skip_mypy=True)
