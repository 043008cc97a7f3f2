"""What the text of Triton programs must not contain, because some version of Triton refuses it."""

import ast
from pathlib import Path

OPS = Path(__file__).parents[3] / "services" / "worker" / "ops"


def device_functions():
    for path in sorted(OPS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "jit" in map(_name, node.decorator_list):
                yield f"{path.relative_to(OPS)}: {node.name}", node


def _name(decorator):
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else ""


def names_in(node):
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def compared_with_none(function):
    return {
        each.left.id
        for each in ast.walk(function)
        if isinstance(each, ast.Compare)
        and isinstance(each.left, ast.Name)
        and any(isinstance(c, ast.Constant) and c.value is None for c in each.comparators)
    }


def test_no_device_function_returns_an_argument_that_may_be_none():
    """Triton 3.6 compiles functions that take None, and refuses those that return it."""
    functions = dict(device_functions())
    with_none = {name for name, function in functions.items() if compared_with_none(function)}
    assert "attention/triton_kernels.py: _attend_keys" in with_none
    returning = [
        name
        for name in with_none
        for each in ast.walk(functions[name])
        if isinstance(each, ast.Return)
        and each.value is not None
        and compared_with_none(functions[name]) & names_in(each.value)
    ]
    assert returning == []


def test_every_product_names_its_precision():
    """Without one, Triton rounds float32 to TF32. Delta nets choose theirs by dtype, and the base
    product of fused programs is of half precision only."""
    products = [
        (name, {option.arg: ast.unparse(option.value) for option in each.keywords})
        for name, function in device_functions()
        for each in ast.walk(function)
        if isinstance(each, ast.Call)
        and ast.unparse(each.func) == "tl.dot"
        and not name.endswith(": _base_product")
    ]
    assert products
    for name, options in products:
        chosen = "PRECISION" if name.startswith("recurrence/") else "'ieee'"
        assert options["input_precision"] == chosen, name
