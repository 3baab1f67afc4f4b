"""What a recipe takes from outside the package: found, checked and recorded before anything is allocated."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from nvfp4_train.config.problem import Problem
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.numerics.extension import call_fault, find_source, resolve

ANY = object()  # stands for an argument that is known only when the function is called


@dataclass(frozen=True, kw_only=True)
class Extension:
    """One key of a recipe that names code.

    Args:
        key: The key, `recipe.linear.fprop.x.quantizer`.
        path: Its value.
        args: The keyword arguments that stand beside it.
    """

    key: str
    path: str
    args: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """Return what identifies it later: key, import path, arguments, file and the file's hash."""
        return {"key": self.key, "args": self.args, **asdict(find_source(self.path))}


def list_extensions(cfg: RecipeConfig) -> list[Extension]:
    """Return the extensions of a recipe in the order of its keys."""
    linear = cfg.linear
    found = [(f"recipe.linear.{name}.quantizer", spec.quantizer, spec.args) for name, spec in linear.operands.items()]
    found += [
        ("recipe.linear.fprop.gemm", linear.fprop.gemm, linear.fprop.args),
        ("recipe.linear.dgrad.gemm", linear.dgrad.gemm, linear.dgrad.args),
        ("recipe.linear.wgrad.gemm", linear.wgrad.gemm, linear.wgrad.args),
        ("recipe.linear.pair", linear.pair, linear.args),
        ("recipe.after_optimizer", cfg.after_optimizer, cfg.after_optimizer_args),
    ]
    return [Extension(key=key, path=path, args=args or {}) for key, path, args in found if path is not None]


def extension_problems(extensions: list[Extension]) -> list[Problem]:
    """Return a problem for each extension that cannot be imported, or not be called with its arguments."""
    return [problem for extension in extensions if (problem := _problem(extension)) is not None]


def after_step(cfg: RecipeConfig, model: torch.nn.Module, *, step: int) -> None:
    """Call the recipe's function for the moment after an optimizer step, if it has one; gradients are off."""
    if cfg.after_optimizer is not None:
        with torch.no_grad():
            resolve(cfg.after_optimizer)(model, step=step, **(cfg.after_optimizer_args or {}))


def _problem(extension: Extension) -> Problem | None:
    fix = "name a function as package.module:name, in a folder on PYTHONPATH or an installed package"
    try:
        found = resolve(extension.path)
    except ValueError as error:
        return Problem(key=extension.key, value=extension.path, rule=str(error), fix=fix)
    faults = [
        fault
        for function, arguments, options in _calls(extension, found)
        if (fault := call_fault(function, *arguments, **options))
    ]
    if not faults:
        return None
    rule = f"must take the arguments of a {_kind(extension.key)} and those of args: {'; '.join(faults)}"
    return Problem(key=extension.key, value=extension.path, rule=rule, fix="see docs/extending.md for its signature")


def _kind(key: str) -> str:
    return {"quantizer": "quantizer", "gemm": "GEMM row", "pair": "Linear pair"}.get(
        key.rpartition(".")[2], "function after the optimizer"
    )


def _calls(extension: Extension, found: Any) -> list[tuple[Any, tuple[object, ...], dict[str, object]]]:
    """The calls that will be made: function, positional arguments, keyword arguments."""
    args = extension.args
    match _kind(extension.key):
        case "quantizer":
            return [(found, (ANY, ANY, ANY), {"amax": ANY, **args})]
        case "GEMM row":
            return [(found, (ANY, ANY, ANY), args)]
        case "Linear pair":
            names = ("forward", "backward")
            return [(getattr(found, name, None), (ANY, ANY, ANY), args) for name in names]
        case _:
            return [(found, (ANY,), {"step": ANY, **args})]
