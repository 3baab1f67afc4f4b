"""The rules of the code base that a linter cannot express."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nvfp4_train"
TESTS = ROOT / "tests"
CODE_DIRS = ("nvfp4_train", "scripts", "benchmarks", "tests")

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
MAX_PARAMETERS = 6
MAX_SCRIPT_LINES = 40
FORBIDDEN_NAMES = {"util", "utils", "common", "helper", "helpers", "misc"}
DISTRIBUTED_PACKAGES = {"parallel", "engine", "checkpoint"}
# Folders of tests/ that do not mirror a package.
OTHER_TEST_DIRS = {"conformance", "e2e", "golden", "support", "scripts", "benchmarks"}
# Names of torch functions that draw from the ambient generator when none is passed.
AMBIENT_RANDOM = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "bernoulli",
    "multinomial",
    "manual_seed",
    "rand_like",
    "randn_like",
}

# Packages that run in a training step, and the files in them that may wait for the device.
STEP_PACKAGES = ("model", "precision", "optim", "parallel", "engine", "train")
SYNC_FILES = {"train/metrics.py", "train/evaluate.py"}
# Where the shapes of the computation are data: the CPU's document spans, the token counts of emulated experts and of an
# all-to-all between ranks.
SYNC_FILES |= {"model/documents.py", "precision/experts.py", "parallel/expert.py"}
SYNC_METHODS = {"item", "tolist", "cpu", "numpy"}
# A run is described by its YAML; what launchers and compilers say comes from the environment.
ENVIRONMENT_FILES = {"parallel/runtime.py", "numerics/kernels/loader.py"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    return tuple(sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, Function))


def place(path: Path, node: ast.AST | None = None) -> str:
    line = f":{node.lineno}" if node is not None else ""  # type: ignore[attr-defined]
    return f"{path.relative_to(ROOT)}{line}"


def parameters(node: Function) -> list[str]:
    """Names of the parameters beyond self, cls and the ctx of an autograd function."""
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    if names and names[0] in {"self", "cls", "ctx"}:
        names = names[1:]
    return names + [arg.arg for arg in node.args.kwonlyargs]


def is_public(name: str) -> bool:
    return not name.startswith("_")


def dotted_name(node: ast.AST) -> str:
    """``torch.distributed.all_reduce`` for that chain of attributes; empty for anything else."""
    if isinstance(node, ast.Attribute):
        prefix = dotted_name(node.value)
        return f"{prefix}.{node.attr}" if prefix else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def mentions_distributed(node: ast.AST) -> bool:
    names = [*imported_modules(node), dotted_name(node)]
    return any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in names)


def modules() -> list[Path]:
    """Modules of the package that need a test file."""
    return [path for path in python_files("nvfp4_train") if path.name != "__init__.py"]


def test_there_is_code_to_look_at():
    assert len(python_files("nvfp4_train")) > 20
    assert python_files("tests")


def test_functions_are_short():
    long = [
        f"{place(path, node)} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in python_files(*CODE_DIRS)
        for node in functions(path)
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_functions_have_few_parameters():
    wide = [
        f"{place(path, node)} {node.name}: {len(parameters(node))} parameters"
        for path in python_files("nvfp4_train", "scripts", "benchmarks")
        for node in functions(path)
        if len(parameters(node)) > MAX_PARAMETERS
    ]
    assert not wide, "\n".join(wide)


def test_files_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*CODE_DIRS)}
    assert {place(path): length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_scripts_only_parse_and_call():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files("scripts")}
    assert {place(path): length for path, length in lengths.items() if length > MAX_SCRIPT_LINES} == {}


def test_names_say_what_a_module_holds():
    vague = [
        place(path)
        for path in python_files(*CODE_DIRS)
        if FORBIDDEN_NAMES & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    ]
    assert not vague, "\n".join(vague)


def test_every_module_has_its_test_file():
    missing = []
    for path in modules():
        relative = path.relative_to(PACKAGE)
        if not (TESTS / relative.parent / f"test_{relative.name}").is_file():
            missing.append(f"tests/{relative.parent}/test_{relative.name}")
    assert not missing, "\n".join(missing)


def test_every_test_file_has_its_module():
    orphans = []
    for path in python_files("tests"):
        relative = path.relative_to(TESTS)
        if len(relative.parts) == 1 or relative.parts[0] in OTHER_TEST_DIRS or relative.name == "conftest.py":
            continue
        name = relative.name.removeprefix("test_")
        if relative.name == name or not (PACKAGE / relative.parent / name).is_file():
            orphans.append(place(path))
    assert not orphans, "\n".join(orphans)


def test_package_inits_only_reexport():
    def is_allowed(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return all(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets)
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_docstring or isinstance(node, ast.Import | ast.ImportFrom)

    wrong = [
        place(path, node)
        for path in python_files("nvfp4_train")
        if path.name == "__init__.py"
        for node in parsed(path).body
        if not is_allowed(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_to_do():
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "HA" + "CK", "X" * 3]) + r")\b")
    files = [*python_files(*CODE_DIRS), *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/**/*.yaml")]
    files += [
        *ROOT.glob("nvfp4_train/**/*.cpp"),
        *ROOT.glob("scripts/**/*.sh"),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
    ]
    found = [place(path) for path in files if marks.search(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_only_some_packages_know_about_ranks():
    wrong = [
        place(path, node)
        for path in python_files("nvfp4_train", "scripts", "benchmarks")
        if path.relative_to(ROOT).parts[1] not in DISTRIBUTED_PACKAGES
        for node in ast.walk(parsed(path))
        if mentions_distributed(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_numerics_never_draws_from_the_ambient_generator():
    wrong = [
        place(path, node)
        for path in python_files("nvfp4_train/numerics")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in AMBIENT_RANDOM
        and "generator" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not wrong, "\n".join(wrong)


def test_a_step_does_not_wait_for_the_device():
    wrong = [
        place(path, node)
        for path in python_files(*(f"nvfp4_train/{package}" for package in STEP_PACKAGES))
        if path.relative_to(PACKAGE).as_posix() not in SYNC_FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SYNC_METHODS
    ]
    assert not wrong, "\n".join(wrong)


def test_a_run_does_not_depend_on_environment_variables():
    wrong = [
        place(path, node)
        for path in python_files("nvfp4_train")
        if path.relative_to(PACKAGE).as_posix() not in ENVIRONMENT_FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert not wrong, "\n".join(wrong)


def test_public_names_have_docstrings():
    bare = [place(path) for path in modules() if not ast.get_docstring(parsed(path))]
    bare += [
        f"{place(path, node)} {node.name}"
        for path in python_files("nvfp4_train")
        for node in parsed(path).body
        if isinstance(node, Function | ast.ClassDef) and is_public(node.name) and not ast.get_docstring(node)
    ]
    assert not bare, "\n".join(bare)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed", True),
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed.tensor import DTensor", True),
        ("torch.distributed.all_reduce(x)", True),
        ("import torch", False),
        ("torch.distributions.Normal(0, 1)", False),
    ],
)
def test_the_rank_rule_sees_every_spelling(source: str, found: bool):
    assert any(mentions_distributed(node) for node in ast.walk(ast.parse(source))) is found


def test_the_parameter_rule_skips_self_only():
    [node] = ast.parse("def f(self, a, /, b, *, c, d=1): ...").body
    assert isinstance(node, ast.FunctionDef)
    assert parameters(node) == ["a", "b", "c", "d"]
